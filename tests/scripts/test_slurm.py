"""The batch scripts, with stand-ins of SLURM's commands."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from ddp_lab.commands.compare import build_parser as compare_parser
from ddp_lab.runtime.flags import build_parser
from sharding import REGISTRY

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
case "${0##*/}" in
  scontrol) if [ "$2" = hostnames ]; then echo n1; else echo "JobState=RUNNING BatchHost=n1"; fi ;;
  sbatch)
    while [[ $1 = --* ]]; do shift; done
    bash "$@" >&2 && echo 8 ;;
  srun)
    while [[ $1 = --* ]]; do shift; done
    exec "$@" ;;
  *) printf '%s\\n' "${0##*/}" "$@" "" >> "$LOG" ;;
esac
"""
"""Of `torchrun` and `python` it only writes down how they are called."""


def stand_in(folder, program, *names):
    for name in names:
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("script", ["one_node.sbatch", "nodes.sbatch", "srun.sbatch", "elastic.sbatch", "sweep.sh"])
def test_a_script_starts_what_there_is(tmp_path, script):
    """Each entrypoint is a file, and each flag is one of `torchrun`, of the entrypoint or of the report."""
    stand_in(tmp_path, STAND_IN, "scontrol", "sbatch", "srun", "torchrun", "python")
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(tmp_path / "log"), "CHOICES": "a zero2"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    environment |= {"SLURM_JOB_NODELIST": "n1"}
    environment |= {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "2"}
    command = ["bash", "-u", f"scripts/slurm/{script}"]
    command += ["sharding", "r"] if script == "sweep.sh" else ["main_shard.py", "--ddp-choice", "zero2"]
    answer = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr
    training, *report = [call.splitlines() for call in (tmp_path / "log").read_text().split("\n\n") if call]
    program, *called = training
    if program == "torchrun":
        launcher = get_args_parser().parse_args(called)
        called = [launcher.training_script, *launcher.training_script_args]
    assert (program, called[0]) == ("python" if script == "srun.sbatch" else "torchrun", "main_shard.py")
    options = build_parser("", REGISTRY.sentences).parse_args(called[1:])
    assert (options.choice, bool(report)) == ("zero2", script == "sweep.sh")
    assert str(options.output_dir) == ("r" if script == "sweep.sh" else "results/x-7")
    for call in report:
        assert call[:4] == ["python", "-m", "ddp_lab", "compare"]
        assert compare_parser().parse_args(call[4:]).output_dir == Path("r")


SLURM = """#!/bin/sh
echo "${0##*/} $*" >> "$LOG"
case "${0##*/}" in
  scancel) exit 1 ;;  # sent once, not every 5 s
  srun)
    kill -USR1 $PPID
    until grep -q scancel "$LOG"; do sleep 0.05; done
    mkdir -p "$RESULTS/profile/zero2"
    cp "$RECORD" "$RESULTS/profile/zero2/1.run.json" ;;
esac
"""


@pytest.mark.parametrize(("how", "is_requeued"), [("stopped", True), ("completed", False)])
@pytest.mark.parametrize("of_array", [False, True])
def test_a_job_that_was_stopped_requeues_itself_alone(tmp_path, how, is_requeued, of_array):
    """The job number of an array's last task is that of the array, by which `scontrol` means all its tasks."""
    stand_in(tmp_path, SLURM, "scontrol", "scancel", "srun")
    (tmp_path / "record").write_text(json.dumps({"ended": {"how": how}}, indent=2))
    files = {"LOG": tmp_path / "log", "RECORD": tmp_path / "record", "RESULTS": tmp_path / "results"}
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"} if of_array else {}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", **array}
    script = "source scripts/slurm/common.sh; on_tasks python"
    answer = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environment | {name: str(path) for name, path in files.items()},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert answer.returncode == 0, answer.stderr
    job, calls = "7_2" if of_array else "7", files["LOG"].read_text().splitlines()
    assert f"scancel --signal=USR1 {job}" in calls
    assert [call for call in calls if "requeue" in call] == ([f"scontrol requeue {job}"] if is_requeued else [])

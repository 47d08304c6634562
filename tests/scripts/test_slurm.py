"""The batch scripts, on a real slurmctld and two slurmd where they can be had."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slurm_cluster import why_no_cluster

ROOT = Path(__file__).resolve().parents[2]
NO_CLUSTER = why_no_cluster()
TIMEOUT_S = 560


def test_scripts_are_valid_bash() -> None:
    scripts = sorted((ROOT / "scripts" / "slurm").glob("*.*sh")) + sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
    assert len(scripts) >= 7
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


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
def test_a_job_that_was_stopped_requeues_itself_alone(
    tmp_path: Path, how: str, is_requeued: bool, of_array: bool
) -> None:
    """The last task of an array has the array's number as its own, which to `scontrol` is all of them."""
    for name in ("scontrol", "scancel", "srun"):
        (tmp_path / name).write_text(SLURM)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "record").write_text(json.dumps({"ended": {"how": how}}, indent=2))
    files = {"LOG": tmp_path / "log", "RECORD": tmp_path / "record", "RESULTS": tmp_path / "results"}
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"} if of_array else {}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", **array}
    script = "source scripts/slurm/common.sh; on_tasks python"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=environment | {name: str(path) for name, path in files.items()},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    own, calls = "7_2" if of_array else "7", files["LOG"].read_text().splitlines()
    assert f"scancel --signal=USR1 {own}" in calls
    assert [call for call in calls if "requeue" in call] == ([f"scontrol requeue {own}"] if is_requeued else [])


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.skipif(bool(NO_CLUSTER), reason=f"no SLURM cluster here: {NO_CLUSTER}")
def test_on_a_real_cluster(tmp_path: Path) -> None:
    """Time limit, drained node, preemption, requeue, resume to the last bit, a sweep with its report."""
    command = [sys.executable, "scripts/slurm/try_cluster.py", "--output-dir", str(tmp_path / "jobs")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.send_signal(signal.SIGTERM)  # it then removes the cluster
        process.wait(timeout=30)
    assert process.returncode == 0, said
    assert said.count("equal to the last bit") == 3 and "the report on them" in said

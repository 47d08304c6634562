"""A node is lost and another one joins: training goes on from the last checkpoint, with another number of ranks."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.scenarios import MARK, ROOT, processes_of, wait_for
from tests.ranks import RankPool
from tests.runtime.checkpoint.test_runs import records
from tests.runtime.test_run import run_here

STRAIGHT = {"choice": "flat_ddp", "workload": "mlp", "depth": 8, "width": 256, "train_samples": 800, "eval_samples": 4}
FLAGS = ["--ddp-choice", "zero2", "--workload", "mlp", "--depth", "8", "--width", "256", "--train-samples", "800"]
FLAGS += ["--eval-samples", "4", "--epochs", "1000", "--no-profile", "--checkpoint-every", "20", "--resume", "auto"]


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint; 0 if there is none."""
    return max((int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/zero2/step_*")), default=0)


@contextmanager
def node(name: str, port: int, is_host: bool, folder: Path) -> Iterator[subprocess.Popen]:
    """An agent of `torchrun` with one rank, as on a node of its own, that joins the others at `port`."""
    agent = ["--nnodes=1:2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-id=elastic", "--rdzv-backend=c10d"]
    agent += [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "--redirects=0"]
    agent += [f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=2,keep_alive_interval=1"]
    environment = {**os.environ, MARK: name, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *agent, "main_shard.py", *FLAGS]
    with (folder / "output").open("a") as output:
        process = subprocess.Popen(
            [*command, "--output-dir", str(folder)], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        for pid in processes_of(name):
            os.kill(pid, signal.SIGKILL)
        process.wait(timeout=10)


@pytest.mark.slow
def test_a_node_is_lost_and_one_joins(ranks: RankPool, tmp_path):
    mark = f"elastic-{os.getpid()}-{tmp_path.name}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def output() -> str:
        return (tmp_path / "output").read_text()

    with node(f"{mark}-1", port, True, tmp_path) as host:
        with node(f"{mark}-2", port, False, tmp_path):
            wait_for(lambda: newest_step(tmp_path) > 0)
        wait_for(lambda: output().count("resumes after step") == 1)  # the second node has gone
        with node(f"{mark}-3", port, False, tmp_path) as joined:
            wait_for(lambda: output().count("resumes after step") == 2)
            wait_for(lambda: newest_step(tmp_path) > int(re.findall(r"resumes after step (\d+)", output())[-1]))
            for pid in processes_of(f"{mark}-3"):
                if pid != joined.pid:
                    os.kill(pid, signal.SIGUSR1)
            assert [host.wait(timeout=60), joined.wait(timeout=60)] == [0, 0]
    runs = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("profile/zero2/*.run.json"))]
    last = runs[-1]
    assert [run["world_size"] for run in runs] == [2, 1, 2] and last["ended"]["how"] == "stopped"
    assert set(last["step_samples"]) == {8}, "the global batch has changed"
    straight = {**STRAIGHT, "epochs": 1000, "max_steps": len(last["train_loss"]), "no_profile": True}
    ranks.run(2, run_here, {**straight, "output_dir": str(tmp_path / "straight")})
    (expected,) = records(tmp_path / "straight", "flat_ddp")
    assert last["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-3)

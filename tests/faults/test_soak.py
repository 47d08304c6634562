"""A run with random signals to random ranks ends as the same run without them, and nothing leaks."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.scenarios import ROOT

STEPS, EVERY = 120, 10
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
MARK = "DDP_LAB_SOAK"


class Job:
    """`zero2` on `sample` under torchrun with a checkpoint every `EVERY` steps."""

    def __init__(self, folder: Path, restarts: int) -> None:
        self.folder, self._mark = folder, f"{os.getpid()}-{folder.name}"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        flags = ["--ddp-choice", "zero2", "--workload", "sample", "--max-steps", str(STEPS), "--epochs", str(STEPS)]
        flags += ["--global-batch-size", "2", "--grad-accum-steps", "1", "--eval-samples", "20", "--no-profile"]
        flags += ["--output-dir", str(folder), "--checkpoint-every", str(EVERY), "--keep-last", "2"]
        folder.mkdir()
        with (folder / "output").open("w") as log:
            self.process = psutil.Popen(
                [*launcher, f"--max-restarts={restarts}", "main_shard.py", *flags, "--timeout-minutes", "0.25"],
                cwd=ROOT,
                env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ranks(self) -> list[psutil.Process]:
        found = {}
        for child in self.process.children():
            try:
                found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
        return [found[rank] for rank in sorted(found)]

    def step(self) -> int:
        """Of the newest checkpoint."""
        folders = (self.folder / "checkpoints" / "zero2").glob("step_*")
        return max((int(path.name.split("_")[1]) for path in folders), default=0)

    def held(self) -> list[tuple[int, int]]:
        """Open files and threads of each rank."""
        try:
            return [(rank.num_fds(), rank.num_threads()) for rank in self.ranks()]
        except psutil.Error:
            return []

    def record(self) -> dict[str, Any]:
        """Of the run's last life, which must have come to its end. No process may be left."""
        records = [json.loads(path.read_text()) for path in (self.folder / "profile" / "zero2").glob("*.run.json")]
        (whole,) = [record for record in records if record["ended"]["how"] == "completed"]
        environments = [process.info["environ"] or {} for process in psutil.process_iter(["environ"])]
        assert not [each for each in environments if each.get(MARK) == self._mark]
        return whole


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_random_signals_cost_nothing_but_time(tmp_path: Path) -> None:
    calm = Job(tmp_path / "calm", restarts=0)
    held: list[list[tuple[int, int]]] = []
    while calm.process.poll() is None:
        if calm.step() >= 2 * EVERY and len(now := calm.held()) == 2:
            held.append(now)
        time.sleep(0.2)
    assert len(held) > 4, "otherwise nothing is said about leaks"
    for rank, kind in ((rank, kind) for rank in range(2) for kind in range(2)):
        values = [now[rank][kind] for now in held[:-1]]  # the last may be of a rank that ends
        assert statistics.median(values[-2:]) <= statistics.median(values[: len(values) // 2])

    draw = random.Random(0)
    struck = Job(tmp_path / "struck", restarts=2)
    for due in (2 * EVERY, 6 * EVERY):
        while struck.step() < due or len(struck.ranks()) < 2:
            assert struck.process.poll() is None, (struck.folder / "output").read_text()
            time.sleep(0.1)
        struck.ranks()[draw.randrange(2)].send_signal(draw.choice(SIGNALS))
        time.sleep(1.0)
    struck.process.wait(timeout=300)
    first, second = calm.record(), struck.record()
    assert first["train_loss"] == second["train_loss"] and first["eval"] == second["eval"]
    assert (struck.folder / "output").read_text().count("error: zero2: ") == 2

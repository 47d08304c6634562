"""A long run with random faults against the same run left alone: python benchmarks/soak.py [--steps 2000] [--faults 8]

Both are two real ranks of workload `sample` under torchrun over Gloo, with a checkpoint every `--every` steps. Of the
second one, a random rank gets a random signal at random moments, and torchrun starts the ranks again. It must end with
the very losses of the first. The first one's ranks, and the second one's torchrun, must end with as many files open, as
many threads and as much memory as they had when a tenth of the run was done. Exit code 1 if anything is not so.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import ddp
import sharding
from training.cli import OneLineParser, unknown_name
from training.errors import UserError

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGSTOP)
MARK = "DDP_LAB_SOAK"
MEASURED = ("files", "threads", "memory_mib")
MOST_GROWTH = {"files": 0.0, "threads": 0.0, "memory_mib": 8.0}
"""More than so much at the end than early on is a leak. Memory differs by what the allocator keeps."""
SETTLED_STEPS = 1000
"""Shorter runs' memory is not judged: it settles late (`zero2` on sample: 375 MiB more at step 120 than at 30, but no
more at 2,000 than at 200 to 400)."""


class Job:
    """One run under torchrun, and what its processes held from second to second."""

    def __init__(self, options: argparse.Namespace, folder: Path, restarts: int) -> None:
        self.folder, self.choice = folder, options.choice
        script = "main_ddp.py" if options.choice in ddp.CHOICES else "main_shard.py"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        flags = ["--ddp-choice", options.choice, "--workload", "sample", "--max-steps", str(options.steps), *BATCH]
        flags += ["--epochs", str(options.steps), "--no-profile", "--output-dir", str(folder)]
        flags += ["--checkpoint-every", str(options.every), "--keep-last", "2", "--timeout-minutes", "0.25"]
        self._mark = f"{os.getpid()}-{folder.name}"
        self._log = (folder / "output").open("w")
        self.process = psutil.Popen(
            [*launcher, f"--max-restarts={restarts}", script, *flags],
            cwd=ROOT,
            env={**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1"},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.samples: dict[tuple[str, int], list[dict[str, float]]] = {}
        self._steps_at_start: dict[int, int] = {}
        self._settling = 2 * options.every

    def ranks(self) -> list[psutil.Process]:
        """The training processes, by rank; empty while they are being started."""
        found = {}
        for child in self.process.children():
            try:
                found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
        return [found[rank] for rank in sorted(found)]

    def step(self) -> int:
        """Of the newest checkpoint."""
        folders = (self.folder / "checkpoints" / self.choice).glob("step_*")
        return max((int(path.name.split("_")[1]) for path in folders), default=0)

    def look(self) -> None:
        """Note what each process holds now, a rank from its second checkpoint on: its start is no measure."""
        step = self.step()
        for kind, process in [("torchrun", self.process), *(("rank", rank) for rank in self.ranks())]:
            if kind == "rank" and step < self._steps_at_start.setdefault(process.pid, step) + self._settling:
                continue
            try:
                held = (process.num_fds(), process.num_threads(), process.memory_info().rss / 2**20)
            except psutil.Error:
                continue
            self.samples.setdefault((kind, process.pid), []).append(dict(zip(MEASURED, held, strict=True)))

    def record(self) -> dict[str, Any]:
        """That of the last life.

        Raises:
            UserError: the run has left none that is complete; carries what its ranks said.
        """
        self._log.close()
        records = [json.loads(path.read_text()) for path in (self.folder / "profile" / self.choice).glob("*.run.json")]
        whole = [record for record in records if record["ended"]["how"] == "completed"]
        if len(whole) != 1:
            raise UserError(f"{self.folder.name}: the run did not come to its end: {'; '.join(self.errors())}")
        return whole[0]

    def errors(self) -> list[str]:
        """What the ranks said of each life that ended early."""
        lines = (self.folder / "output").read_text().splitlines()
        return [line.split("; record: ")[0] for line in lines if line.startswith("error: ")]

    def left(self) -> list[int]:
        """Processes that outlived torchrun."""
        found = []
        for process in psutil.process_iter():
            try:
                found += [process.pid] if process.environ().get(MARK) == self._mark else []
            except psutil.Error:
                continue
        return found


BATCH = ["--global-batch-size", "2", "--grad-accum-steps", "1", "--eval-samples", "20"]


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = (*ddp.CHOICES, *sharding.REGISTRY.names)
    parser.add_argument("--choice", default="zero2", help="strategy (default: zero2)")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default: 2000)")
    parser.add_argument("--faults", type=int, default=8, help="signals that are sent (default: 8)")
    parser.add_argument("--every", type=int, default=50, help="steps from one checkpoint to the next (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="of moments, ranks and signals (default: 0)")
    options = parser.parse_args()
    if options.choice not in known:
        parser.error(unknown_name("strategy", options.choice, known))
    if options.every < 1 or options.faults < 0 or options.steps < 10 * options.every:
        parser.error("--steps must be at least ten times --every, --every at least 1 and --faults at least 0")
    with tempfile.TemporaryDirectory(prefix="ddp-lab-soak-") as folder:
        quiet, disturbed = (Path(folder) / name for name in ("quiet", "disturbed"))
        quiet.mkdir()
        disturbed.mkdir()
        calm, _ = follow(Job(options, quiet, restarts=0), {})
        struck, said = follow(Job(options, disturbed, restarts=options.faults), faults(options))
        try:
            problems = differences(calm, struck)
        except UserError as error:
            problems = [str(error)]
        judged = MEASURED if options.steps >= SETTLED_STEPS else MEASURED[:2]
        problems += [*growth(calm, "rank", judged), *growth(struck, "torchrun", judged)]
        problems += [f"processes left: {job.left()}" for job in (calm, struck) if job.left()]
        said += struck.errors()
        if len(struck.errors()) != options.faults:
            problems.append(f"{len(struck.errors())} lives ended early, of {options.faults} signals")
    print("\n".join(said))
    print(
        "\n".join(f"FAILED: {problem}" for problem in problems)
        or f"equal losses, no growth of {', '.join(judged)}, nothing left"
    )
    return 1 if problems else 0


def faults(options: argparse.Namespace) -> dict[int, tuple[int, signal.Signals]]:
    """At which step which rank gets which signal."""
    draw = random.Random(options.seed)
    steps = sorted(draw.sample(range(options.every, options.steps - options.every), options.faults))
    return {step: (draw.randrange(2), draw.choice(SIGNALS)) for step in steps}


def follow(job: Job, plan: dict[int, tuple[int, signal.Signals]]) -> tuple[Job, list[str]]:
    """Watch a run to its end, and send the signals of `plan` when it has saved a checkpoint at or after their steps."""
    said, due = [], sorted(plan)
    while job.process.poll() is None:
        job.look()
        ranks, step = job.ranks(), job.step()
        if due and step >= due[0] and len(ranks) == 2:
            rank, number = plan[due.pop(0)]
            pids = [process.pid for process in ranks]
            ranks[rank].send_signal(number)
            sent = time.monotonic()
            while job.process.poll() is None and [process.pid for process in job.ranks()] in (pids, pids[:1], pids[1:]):
                time.sleep(0.1)
            said.append(
                f"after step {step}: {number.name} to rank {rank}; ranks gone after {time.monotonic() - sent:.1f} s"
            )
            print(said[-1], file=sys.stderr, flush=True)
            wait_for_progress(job, step)
        time.sleep(1.0)
    return job, said


def wait_for_progress(job: Job, step: int) -> None:
    """Until the ranks have been started again and have saved another checkpoint, so that each signal is a fault of its
    own."""
    while job.process.poll() is None and job.step() <= step:
        job.look()
        time.sleep(1.0)


def differences(calm: Job, struck: Job) -> list[str]:
    """Where the records of two runs part."""
    first, second = calm.record(), struck.record()
    found = []
    for what in ("train_loss", "eval"):
        if first[what] != second[what]:
            found.append(f"{what} differs between the runs")
    print(
        f"{calm.choice}: {len(first['train_loss'])} steps, losses {first['train_loss'][0]:.4f} to "
        f"{first['train_loss'][-1]:.6f}; disturbed {second['train_loss'][-1]:.6f}, resumed last at step "
        f"{(second['resumed_from'] or {}).get('step')}"
    )
    return found


def growth(job: Job, kind: str, judged: Sequence[str]) -> list[str]:
    """What the longest-lived processes of a kind hold more at the end than after a tenth of the run."""
    found = []
    for (of_kind, pid), samples in job.samples.items():
        if of_kind != kind:
            continue
        tenth = max(1, len(samples) // 10)
        for what in MEASURED:
            early = statistics.median(sample[what] for sample in samples[tenth : 2 * tenth] or samples)
            late = statistics.median(sample[what] for sample in samples[-1 - tenth : -1] or samples)
            print(f"{kind} {pid}: {what} {early:.0f} early on, {late:.0f} at the end")
            if what in judged and late - early > MOST_GROWTH[what]:
                found.append(f"{kind} {pid}: {what} grew from {early:.0f} to {late:.0f}")
    return found


if __name__ == "__main__":
    sys.exit(main())

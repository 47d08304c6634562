"""What a part of the check is given, and what it answers."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_lab.record_format import SHARED_GPU
from tests.faults.scenarios import MARK, kill_processes_of

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, SKIPPED, MEASURED = "pass", "FAIL", "skipped", "measured"
"""Verdicts. `measured`: a figure, for which there is no bar."""
STAGES = "@pp2 "
"""In the name of a pipeline of two ranks, between the choice and the schedule."""


def pipelines(ranks: int, share_gpu: bool) -> list[str]:
    """Those that so many ranks can run: pairs among more on one GPU would hang."""
    named = [f"tp{STAGES}{schedule}" for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1")]
    return [*named, f"zero3{STAGES}1f1b"] if ranks % 2 == 0 and (ranks == 2 or not share_gpu) else []


@dataclass(frozen=True)
class Verdict:
    """How a part went: one line for the user, and more for the page.

    Attributes:
        rows: Each a mapping from a column's name to its text.
        texts: What is shown as it is, by a heading.
    """

    how: str
    line: str
    rows: Sequence[dict[str, str]] = ()
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Machine:
    """What the check runs on.

    Attributes:
        ranks: Processes, one for each GPU, or on CPUs two. Rank r is on GPU r modulo their number.
        gpus: How many are used; 0 without.
        folder: All that the check leaves lies here.
        is_quick: Less of everything, so that a machine without GPUs is through in minutes.
        shares_gpu: Several ranks share one, and all that is run gets `--share-gpu`.
        found: What a part leaves for later ones.
        bad_logs: Of the part under way: the logs that tell what went wrong.
    """

    ranks: int
    gpus: int
    folder: Path
    is_quick: bool
    shares_gpu: bool = False
    found: dict[str, Any] = field(default_factory=dict)
    bad_logs: list[Path] = field(default_factory=list)

    @property
    def has_gpus(self) -> bool:
        return self.gpus > 0

    @property
    def sharing(self) -> list[str]:
        """A flag of all programs that start ranks; none where each has its own GPU."""
        return ["--share-gpu"] * self.shares_gpu

    @property
    def named(self) -> str:
        """The ranks, as the first line and the page say it."""
        on_what = f"one GPU: {SHARED_GPU}" if self.gpus else "the CPU, so --share-gpu changes nothing"
        return f"{self.ranks} ranks" + (f" that share {on_what}" if self.shares_gpu else "")

    @property
    def backends(self) -> list[str]:
        """Those that are compared: torch's `nccl`, and the older class behind the name."""
        return ["nccl", "nccl-legacy"] if self.has_gpus else ["gloo"]

    @property
    def global_batch(self) -> list[str]:
        """A flag that fits any number of ranks, with one or two micro-batches."""
        return ["--global-batch-size", str(4 * self.ranks)]

    def run(
        self, log: str, command: Sequence[str], limit_s: float, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python command` from the root of the project. Its output lies in `log`.txt of the folder.

        Raises:
            Broken: it took longer than `limit_s`. Nothing of it lives on, since that would keep the GPUs busy.
        """
        mark, path = uuid.uuid4().hex, self.folder / f"{log}.txt"
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {}), MARK: mark}
        code = None
        with path.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT
            )
            try:
                code = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                raise Broken(f"not done after {limit_s:.0f} s; see {path.name}") from None
            finally:
                process.kill()
                kill_processes_of(mark)  # torchrun's ranks
                process.wait()
                if code != 0:
                    self.bad_logs.append(path)
        return subprocess.CompletedProcess(command, code, path.read_text(errors="replace"))

    def run_well(self, log: str, command: Sequence[str], limit_s: float, **more: Any) -> str:
        """The same, and its output.

        Raises:
            Broken: its exit code is not 0.
        """
        done = self.run(log, command, limit_s, **more)
        if done.returncode != 0:
            said = [line for line in done.stdout.splitlines() if "error" in line.lower()] or [""]
            raise Broken(f"exit code {done.returncode}: {said[0].strip()[:200]}; see {log}.txt")
        return done.stdout

    def torchrun(self, program: str, *flags: str) -> list[str]:
        """A command of all ranks."""
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return [*start, program, *self.sharing, *flags]

    def on_ranks(self, what: str, *flags: str, limit_s: float, log: str = "", **more: Any) -> Any:
        """What `ddp_lab/gpu_check/ranks.py WHAT` finds, from the last line that it prints."""
        command = self.torchrun("ddp_lab/gpu_check/ranks.py", what, *flags)
        output = self.run_well(log or what, command, limit_s, **more)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if not lines:
            raise Broken(f"no result; see {log or what}.txt")
        return json.loads(lines[-1])


class Broken(Exception):
    """A part could not be done. The others go on."""


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        least_gpus: With fewer GPUs it is skipped (without GPUs it runs on CPUs).
    """

    name: str
    look: Callable[[Machine], Verdict]
    least_gpus: int = 1

"""What a part of the check is given, and what it answers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASS, FAIL, SKIPPED, MEASURED = "pass", "FAIL", "skipped", "measured"
"""Verdicts. `measured`: a figure, for which there is no bar."""


@dataclass(frozen=True)
class Verdict:
    """How a part went: one line for the user, and rows for the page.

    Attributes:
        rows: Each a mapping from a column's name to its text.
    """

    how: str
    line: str
    rows: Sequence[dict[str, str]] = ()


@dataclass
class Machine:
    """What the check runs on.

    Attributes:
        ranks: Processes, one for each GPU, or on CPUs two.
        folder: All that the check leaves lies here.
        is_quick: Less of everything, so that a machine without GPUs is through in minutes.
    """

    ranks: int
    has_gpus: bool
    folder: Path
    is_quick: bool
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def backends(self) -> list[str]:
        """Those that are compared: torch's `nccl`, and the older class behind the name."""
        return ["nccl", "nccl-legacy"] if self.has_gpus else ["gloo"]

    def run(
        self, log: str, command: Sequence[str], limit_s: float, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python command` from the root of the project. Its output lies in `log`.txt of the folder.

        Raises:
            Broken: it took longer than `limit_s`.
        """
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        path = self.folder / f"{log}.txt"
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired as late:
            output = late.stdout or b""
            path.write_text(output.decode(errors="replace") if isinstance(output, bytes) else output)
            raise Broken(f"not done after {limit_s:.0f} s; see {path.name}") from None
        path.write_text(done.stdout)
        return done

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

    def torchrun(self, *command: str) -> list[str]:
        """A command of all ranks."""
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}", *command]

    def on_ranks(self, what: str, *flags: str, limit_s: float, log: str = "", **more: Any) -> Any:
        """What `gpu_check/ranks.py WHAT` finds, from the last line that it prints."""
        command = self.torchrun("gpu_check/ranks.py", what, *flags)
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

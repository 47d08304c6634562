"""Where the checks run: how many ranks, on what, and the commands that they start."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.commands.check_gpu import PARTS, ROOT
from ddp_lab.record_format import SHARED_GPU
from tests.faults.scenarios import MARK, kill_processes_of

TELLING = ("error", "Error", "CSAN detected")
FIRST, LAST = 8, 25
"""Lines of a log that the page shows: the first of those that tell, and the last of all."""


@dataclass
class Place:
    """What a test of this folder runs on, and what it leaves for the page.

    Attributes:
        ranks: Processes, one for each GPU, or on CPUs two. Rank r is on GPU r modulo their number.
        folder: All that the check leaves lies here.
        is_quick: Less of everything, so that a machine without GPUs is through in minutes.
        shares_gpu: Several ranks share one, and all that is run gets `--share-gpu`.
        line, rows, texts, measures, logs: Of the test under way: a line for the user, a table and texts for the page,
            whether its figures have no bar, and the logs that tell what went wrong.
    """

    ranks: int
    has_gpus: bool
    folder: Path
    is_quick: bool
    shares_gpu: bool = False
    line: str = ""
    rows: list[dict[str, str]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    measures: bool = False
    logs: list[Path] = field(default_factory=list)

    @property
    def named(self) -> str:
        """The ranks, as the first line and the page say it."""
        on_what = f"one GPU: {SHARED_GPU}" if self.has_gpus else "the CPU, so --share-gpu changes nothing"
        return f"{self.ranks} ranks" + (f" that share {on_what}" if self.shares_gpu else "")

    @property
    def backends(self) -> list[str]:
        """Those that are compared: torch's `nccl`, and the older class behind the name."""
        return ["nccl", "nccl-legacy"] if self.has_gpus else ["gloo"]

    @property
    def sharing(self) -> list[str]:
        """A flag of all programs that start ranks; none where each has its own GPU."""
        return ["--share-gpu"] * self.shares_gpu

    @property
    def global_batch(self) -> list[str]:
        """A flag that fits any number of ranks, with one or two micro-batches."""
        return ["--global-batch-size", str(4 * self.ranks)]

    def begin(self, part: str) -> None:
        """
        Raises:
            pytest.skip.Exception: the part needs more GPUs.
        """
        self.line, self.rows, self.texts, self.measures, self.logs = "", [], {}, False, []
        if self.has_gpus and self.ranks < PARTS[part]:
            pytest.skip(f"needs {PARTS[part]} ranks")

    def says(self, line: str, bad: Sequence[str] = ()) -> None:
        """The test's verdict: it holds if nothing is `bad`."""
        self.line = "; ".join([line, *bad])
        assert not bad, self.line

    def run(
        self, log: str, command: Sequence[str], limit_s: float, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `python command` from the root of the project. Its output lies in `log`.txt of the folder.

        Raises:
            AssertionError: it took longer than `limit_s`. Nothing of it lives on, since that would keep the GPUs busy.
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
                raise AssertionError(f"not done after {limit_s:.0f} s; see {path.name}") from None
            finally:
                process.kill()
                kill_processes_of(mark)  # torchrun's ranks
                process.wait()
                if code != 0:
                    self.logs.append(path)
        return subprocess.CompletedProcess(command, code, path.read_text(errors="replace"))

    def run_well(self, log: str, command: Sequence[str], limit_s: float, **more: Any) -> str:
        """The same, and its output.

        Raises:
            AssertionError: its exit code is not 0.
        """
        answer = self.run(log, command, limit_s, **more)
        errors = [line for line in answer.stdout.splitlines() if "error" in line.lower()] or [""]
        assert answer.returncode == 0, f"exit code {answer.returncode}: {errors[0].strip()[:200]}; see {log}.txt"
        return answer.stdout

    def torchrun(self, program: str, *flags: str) -> list[str]:
        """A command of all ranks."""
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={self.ranks}"]
        return [*start, *program.split(), *self.sharing, *flags]

    def newest_record(self, folder: Path) -> dict[str, Any]:
        """The latest run record under an output folder."""
        paths = sorted(folder.glob("profile/*/*.run.json"), key=lambda path: path.stat().st_mtime)
        record: dict[str, Any] = json.loads(paths[-1].read_text())
        return record


def by_choice(names: Sequence[str], find: Callable[[str], Any]) -> dict[str, Any]:
    """What `find` answers for each choice, or its error as text: an error of all ranks stops no other choice."""
    answers: dict[str, Any] = {}
    for name in names:
        try:
            answers[name] = find(name)
        except Exception as error:  # the sanitizer's is a plain one
            answers[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return answers


def gist(log: Path) -> str:
    """What a reader from afar needs of a log."""
    lines = [line.rstrip()[:300] for line in log.read_text(errors="replace").splitlines()]
    told = [line for line in lines[:-LAST] if any(word in line for word in TELLING)][:FIRST]
    return "\n".join([*told, *["..."] * bool(told), *lines[-LAST:]])

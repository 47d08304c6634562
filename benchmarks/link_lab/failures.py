"""Why a job failed, in one line. A node out of reach comes before the ranks that gave up on it, and a killed rank
before those that lost it."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.link_lab.shaping import unreachable
from benchmarks.link_lab.state import Lab, Node

OWN = "error: "
LOG_NAME = "link_lab.failed.log"
PREFIX_OF_RANK = re.compile(r"^\[rank\d+\]: ")
"""What torch writes before each line of a traceback."""


@dataclass(frozen=True)
class Failure:
    """A rank that failed by itself."""

    node: Node
    rank: int
    exitcode: int
    time: float

    @property
    def was_killed(self) -> bool:
        return self.exitcode == -signal.SIGKILL

    def __str__(self) -> str:
        return f"rank {self.rank} on node {self.node.number} ({self.node.address}) {how_ended(self.exitcode)}"


def how_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"


def why_failed(lab: Lab, codes: Sequence[int | None], log_folder: Path) -> str:
    """The reason. It names the file with the ranks' standard error, unless they gave a reason in a line of their own.

    Args:
        codes: Exit code of each node's `torchrun`; None of one that would not end.
    """
    failures = sorted(read_failures(lab), key=lambda failure: (not failure.was_killed, failure.time))
    lines = stderr_of_ranks(lab.logs)
    if gone := unreachable(lab):
        names = " and ".join(f"node {node.number} ({node.address})" for node in gone)
        gave_up = f"; {failures[0]}: {lines[-1]}" if failures and lines else ""
        return f"{names} cannot be reached over {'its link' if len(gone) == 1 else 'their links'}{gave_up}"
    if failures:
        reason = str(failures[0])
        if failures[0].was_killed:
            return reason
    else:
        node, code = next((node, code) for node, code in zip(lab.nodes, codes, strict=True) if code)
        reason = f"torchrun on node {node.number} ({node.address}) {how_ended(code)}"
    if own := [line for line in lines if line.startswith(OWN)]:
        return f"{reason}: {own[0].removeprefix(OWN)}"
    return f"{reason}: {lines[-1] if lines else 'without a word'} ({keep(lines, log_folder / LOG_NAME)})"


def read_failures(lab: Lab) -> list[Failure]:
    paths = [(node, lab.logs / f"{node.port}.json") for node in lab.nodes]
    return [Failure(node, **entry) for node, path in paths if path.exists() for entry in json.loads(path.read_text())]


def stderr_of_ranks(logs: Path) -> list[str]:
    """The lines of all ranks, rank 0 last; if ranks wrote nothing, those of `torchrun`."""
    paths = sorted(logs.rglob("stderr.log"), reverse=True)
    return read_lines(paths) or read_lines(sorted(logs.glob("*.agent.log"), reverse=True))


def read_lines(paths: Sequence[Path]) -> list[str]:
    lines = [line for path in paths for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return [PREFIX_OF_RANK.sub("", line) for line in lines]


def keep(lines: Sequence[str], log: Path) -> str:
    try:
        log.write_text("\n".join(lines) + "\n")
    except OSError as error:
        return f"the rest could not be kept in {log}: {error.strerror}"
    return f"all of it: {log}"

"""Why a job failed, in one line: a node out of reach rather than the ranks that gave up on it, a killed rank rather
than those that lost it."""

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.link_lab.shaping import unreachable
from benchmarks.link_lab.state import Lab, Node

OWN = "error: "
LOG_NAME = "link_lab.failed.log"


@dataclass(frozen=True)
class Failure:
    """A rank that ended otherwise than well, by itself."""

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
    """The reason, and where the rest of what was said is kept if that is more than the ranks' own word for it.

    Args:
        codes: Exit code of each node's `torchrun`; None of one that would not end.
    """
    failures = read_failures(lab)
    if gone := unreachable(lab):
        names = " and ".join(f"node {node.number} ({node.address})" for node in gone)
        reason = f"{names} cannot be reached over its link" if len(gone) == 1 else f"{names} cannot be reached"
    elif killed := [failure for failure in failures if failure.was_killed]:
        return str(min(killed, key=lambda failure: failure.time))
    elif failures:
        reason = str(min(failures, key=lambda failure: failure.time))
    else:
        node, code = next((node, code) for node, code in zip(lab.nodes, codes, strict=True) if code)
        reason = f"torchrun on node {node.number} ({node.address}) {how_ended(code)}"
    return f"{reason}: {last_word(lab.logs, log_folder)}"


def read_failures(lab: Lab) -> list[Failure]:
    paths = [(node, lab.logs / f"{node.port}.json") for node in lab.nodes]
    return [Failure(node, **entry) for node, path in paths if path.exists() for entry in json.loads(path.read_text())]


def last_word(logs: Path, log_folder: Path) -> str:
    """The ranks' own error line; of anything unforeseen the last line, and where all of it is kept."""
    paths = [*sorted(logs.rglob("stderr.log")), *sorted(logs.glob("*.agent.log"))]
    lines = [line for path in paths for line in path.read_text(errors="replace").splitlines() if line.strip()]
    if own := [line for line in lines if line.startswith(OWN)]:
        return own[0].removeprefix(OWN)
    if not lines:
        return "without a word"
    log = log_folder / LOG_NAME
    try:
        log.write_text("\n".join(lines) + "\n")
    except OSError as error:
        return f"{lines[-1]} (log not kept: {log}: {error.strerror})"
    return f"{lines[-1]} (all of it: {log})"

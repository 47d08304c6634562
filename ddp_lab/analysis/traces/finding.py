"""Finding traces on disk, and putting those of one profile window together."""

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ddp_lab.analysis.traces.reading import peek
from ddp_lab.runtime.errors import UserError

OWN_NAME = re.compile(r"^(?P<run_id>.+)\.step(?P<step>\d+)\.pt\.trace\.json\.gz$")
RANK_IN_PATH = re.compile(r"(?<![a-z])rank[_\-]?(\d{1,6})(?!\d)", re.IGNORECASE)
SUFFIXES = (".json", ".json.gz", ".json.bz2", ".json.xz", ".json.zst")


@dataclass(frozen=True)
class Window:
    """The traces of all ranks over the same optimizer steps.

    Attributes:
        run_id: Of the run; of foreign traces, the name of their folder.
        step: The optimizer step at which the window ends. Of foreign traces, the first profiled step (0 if unknown).
        files: Trace file by rank.
    """

    run_id: str
    step: int
    files: dict[int, Path]


def find_windows(trace_dir: Path) -> list[Window]:
    """All windows below `trace_dir`, oldest first. Files without this project's names are grouped by their steps.

    Raises:
        UserError: there is no such folder, or no trace in it.
    """
    if not trace_dir.is_dir():
        raise UserError(f"{trace_dir}: no such folder; train first, then give profile/<choice>")
    paths = [
        path
        for path in sorted(trace_dir.rglob("*"))
        if path.name.endswith(SUFFIXES)
        and not path.name.startswith(".")
        and not path.name.endswith((".run.json", ".flight.json"))
        and path.is_file()
    ]
    if not paths:
        raise UserError(
            f"{trace_dir}: no trace (*.json or *.json.gz) in this folder; train without --no-profile, and to the end"
        )
    named = [path for path in paths if OWN_NAME.match(path.name)]  # if there are any, other JSON files are not traces
    return group_by_window(named or paths, trace_dir.resolve().name)


def group_by_window(paths: Sequence[Path], foreign_name: str) -> list[Window]:
    """Put the files of each window together.

    A broken file says nothing of its window. If its name says its rank, it joins every window that lacks this rank.

    Raises:
        UserError: two files of one window claim the same rank, or a file's rank is unknown.
    """
    groups: dict[tuple[str, int], list[_RankedFile]] = defaultdict(list)
    without_steps = []
    for path in paths:
        named, match = rank_in_path(path), OWN_NAME.match(path.name)
        rank, step = named, None
        if not match or named is None:
            with suppress(UserError):  # `read_trace` says what is wrong
                rank, step = peek(path)
        file = _RankedFile(path, (rank, named))
        if match:
            groups[match["run_id"], int(match["step"])].append(file)
        elif step is None:
            without_steps.append(file)
        else:
            groups[foreign_name, step].append(file)
    windows = [Window(run_id, step, _by_rank(files)) for (run_id, step), files in sorted(groups.items())]
    if not windows:
        return [Window(foreign_name, 0, _by_rank(without_steps))]
    broken = {rank: file.path for file in without_steps if (rank := file.ranks[-1]) is not None}
    return [replace(window, files=dict(sorted((broken | window.files).items()))) for window in windows]


def rank_in_path(path: Path) -> int | None:
    """The rank in the name of a file or of its folder (`rank_3/...`, `...rank-3...`)."""
    for part in (path.name, path.parent.name):
        if match := RANK_IN_PATH.search(part):
            return int(match[1])
    return None


class _RankedFile(NamedTuple):
    """A trace file, and its rank by each source that may know it, the better source first."""

    path: Path
    ranks: tuple[int | None, ...]


def _by_rank(files: list[_RankedFile]) -> dict[int, Path]:
    """Files by rank. The first source counts that knows the rank of every file and gives no rank twice.

    A single file of unknown rank is taken for rank 0.
    """
    if len(files) == 1:
        return {next((rank for rank in files[0].ranks if rank is not None), 0): files[0].path}
    problems = []
    for ranks in zip(*(file.ranks for file in files), strict=True):
        by_rank: dict[int, Path] = {}
        for (path, _), rank in zip(files, ranks, strict=True):
            if rank is None:
                problems.append(
                    f"{path}: neither its distributedInfo nor its name says which rank it is of; name it rank_<n>.json"
                )
            elif by_rank.setdefault(rank, path) != path:
                problems.append(f"{by_rank[rank]} and {path} are both of rank {rank}; give one of each rank")
        if len(by_rank) == len(files):
            return dict(sorted(by_rank.items()))
    raise UserError(problems[0])


def missing_ranks(window: Window, world_size: int | None) -> list[int]:
    """The ranks without a file. If the world size is unknown, the highest rank found stands for it."""
    ranks = range(world_size or max(window.files) + 1)
    return sorted(set(ranks) - set(window.files))

"""Finding traces on disk, grouping them by window, and reading one with a clear message where it is broken."""

import gzip
import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.errors import TraceError

OWN_NAME = re.compile(r"^(?P<run_id>.+)\.step(?P<step>\d+)\.pt\.trace\.json\.gz$")
RANK_IN_PATH = re.compile(r"rank[_\-]?(\d+)", re.IGNORECASE)
RANK_IN_TEXT = re.compile(r'"rank":\s*(\d+)')
SUFFIXES = (".json", ".json.gz")


@dataclass(frozen=True)
class Window:
    """The traces of all ranks over the same optimizer steps.

    Attributes:
        run_id: Of the run; of foreign traces, the name of their folder.
        step: The optimizer step at which the window ends; 0 for foreign traces.
        files: Trace file by rank.
    """

    run_id: str
    step: int
    files: dict[int, Path]


def find_windows(trace_dir: Path) -> list[Window]:
    """All windows below `trace_dir`, oldest first. Files that do not have this project's names make one window.

    Raises:
        TraceError: there is no such folder, or no trace in it.
    """
    if not trace_dir.is_dir():
        raise TraceError(f"{trace_dir}: no such folder; train first, then give profile/<choice> as --trace-dir")
    paths = [
        path
        for path in sorted(trace_dir.rglob("*"))
        if path.name.endswith(SUFFIXES) and not path.name.startswith(".") and not path.name.endswith(".run.json")
    ]
    if not paths:
        raise TraceError(f"{trace_dir}: no trace (*.json or *.json.gz) in this folder; train without --no-profile")
    own = [path for path in paths if OWN_NAME.match(path.name)]  # other files beside them are not traces of a run
    return group_by_window(own or paths, trace_dir.resolve().name)


def group_by_window(paths: list[Path], foreign_name: str) -> list[Window]:
    """Put the files of one window together.

    Raises:
        TraceError: two files of one window claim the same rank, or a file's rank is unknown.
    """
    groups: dict[tuple[str, int], dict[int, Path]] = {}
    for path in paths:
        match = OWN_NAME.match(path.name)
        key = (match["run_id"], int(match["step"])) if match else (foreign_name, 0)
        rank = rank_of(path)
        ranks = groups.setdefault(key, {})
        if rank in ranks:
            raise TraceError(
                f"{ranks[rank]} and {path} are both of rank {rank}; give one of each rank in --trace-files"
            )
        ranks[rank] = path
    return [Window(run_id, step, dict(sorted(files.items()))) for (run_id, step), files in sorted(groups.items())]


def rank_of(path: Path) -> int:
    """The rank that a path names (`rank_3/...`, `...rank-3...`), else the one that the file itself names.

    Raises:
        TraceError: neither says.
    """
    for part in (path.name, path.parent.name):
        if match := RANK_IN_PATH.search(part):
            return int(match[1])
    if match := RANK_IN_TEXT.search(_read_text(path)):
        return int(match[1])
    raise TraceError(
        f"{path}: neither its name nor its distributedInfo says which rank it is of; name it rank_<n>.json"
    )


def read_trace(path: Path) -> dict[str, Any]:
    """The content of a trace file.

    Raises:
        TraceError: it is empty, cut short, not JSON, or no trace of torch.profiler.
    """
    text = _read_text(path)
    if not text.strip():
        raise TraceError(f"{path}: the file is empty; the run was probably stopped while it wrote; profile again")
    try:
        trace = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(
            f"{path}: not valid JSON ({error}); the file is cut short or no trace; profile again"
        ) from None
    except RecursionError:
        raise TraceError(f"{path}: JSON nested too deeply to be a trace") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise TraceError(f"{path}: no list traceEvents in it, so this is no trace of torch.profiler")
    return trace


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        return data.decode("utf-8", errors="replace")
    except OSError as error:  # gzip.BadGzipFile is one too
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise TraceError(f"{path}: the gzip file is cut short or damaged; profile again") from None


def require_all_ranks(window: Window, world_size: int | None) -> None:
    """Refuse a window in which ranks are missing.

    Raises:
        TraceError: names them.
    """
    if world_size is None:
        return
    missing = sorted(set(range(world_size)) - set(window.files))
    if missing:
        raise TraceError(
            f"run {window.run_id}: no trace of rank {', '.join(map(str, missing))} of {world_size} ranks; copy the "
            "missing files here, or profile again"
        )

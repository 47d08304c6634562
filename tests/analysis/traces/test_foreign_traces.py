"""Traces of strangers: any file names, ranks said anywhere or nowhere, Kineto of any era, things that JSON forbids."""

import gzip
import json
import re
from pathlib import Path

import pytest

from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.runtime.errors import UserError
from tests.analysis.windows import analysis_of
from tests.tables import each_row
from tests.traces import cuda_trace, timeline_of, write


@each_row(
    "names",
    [
        ("host1_77.1700000000.pt.trace.json", "host2_78.1700000001.pt.trace.json.gz"),
        ("trace-rank0.json", "trace-rank1.json"),
        ("rank_0/trace.json", "rank_1/trace.json"),
        ("Rank-0.json.gz", "Rank-1.json.gz"),
    ],
)
@each_row("says_rank", [True, False])
def test_ranks_of_foreign_files(tmp_path, names, says_rank):
    """By distributedInfo; without it, or where it says the same of all, by the names of file or folder."""
    for rank, name in enumerate(names):
        trace = cuda_trace(rank)
        if not says_rank:
            trace["distributedInfo"] = {"rank": 0, "world_size": 2} if "host" not in name else {}
        write(tmp_path / name, trace)
    if "host" in names[0] and not says_rank:
        with pytest.raises(UserError, match="which rank it is of"):
            find_windows(tmp_path)
    else:
        (window,) = find_windows(tmp_path)
        assert {rank: path.name for rank, path in window.files.items()} == {
            rank: Path(name).name for rank, name in enumerate(names)
        }
        assert analyse_window(window).problems == []


def test_windows_of_foreign_files_are_told_apart_by_their_steps(tmp_path):
    for rank in range(2):
        for later in (-5, 5):  # the first window begins with step 0
            trace = cuda_trace(rank)
            for part in trace["traceEvents"]:
                part["name"] = re.sub(r"#(\d+)", lambda match, later=later: f"#{int(match[1]) + later}", part["name"])
            write(tmp_path / f"host_{rank}.{later}.pt.trace.json", trace)
    write(tmp_path / "notes.json", {"no": "trace"})
    windows = find_windows(tmp_path)
    assert [(window.step, list(window.files)) for window in windows] == [(0, [0, 1]), (10, [0, 1])]


def test_a_broken_foreign_file_belongs_to_the_window_that_lacks_its_rank(tmp_path):
    """Without a world size, only the name of the broken file says that a rank is missing."""
    trace = cuda_trace(0)
    del trace["distributedInfo"]["world_size"]
    write(tmp_path / "rank_0.json", trace)
    for broken in (b"", gzip.compress(json.dumps(cuda_trace(1)).encode())[:-200]):
        (tmp_path / "rank_1.json.gz").write_bytes(broken)
        (problem,) = analysis_of(tmp_path).problems
        assert "rank_1.json.gz" in problem


def test_traces_of_old_kineto(tmp_path):
    """Its categories are capitalised, and its steps are operators."""
    old = {"kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator"}
    trace = cuda_trace()
    for part in trace["traceEvents"]:
        part["cat"] = old[part["cat"]]
    assert timeline_of(trace).kernels.equals(timeline_of(cuda_trace()).kernels)

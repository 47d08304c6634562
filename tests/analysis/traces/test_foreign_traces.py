"""Traces of strangers: any file names, ranks said anywhere or nowhere, Kineto of any era, things that JSON forbids."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from ddp_lab.analysis.errors import TraceError
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows, group_by_window
from ddp_lab.analysis.traces.reading import parse_trace
from tests.analysis.traces.test_broken_traces import NAME, steps_at
from tests.traces import cpu_trace, cuda_trace, event, parsed, timeline_of, write


@pytest.mark.parametrize(
    "names",
    [
        ("host1_77.1700000000.pt.trace.json", "host2_78.1700000001.pt.trace.json.gz"),
        ("trace-rank0.json", "trace-rank1.json"),
        ("rank_0/trace.json", "rank_1/trace.json"),
        ("Rank-0.json.gz", "Rank-1.json.gz"),
    ],
)
@pytest.mark.parametrize("says_rank", [True, False])
def test_ranks_of_foreign_files(tmp_path: Path, names: tuple[str, str], says_rank: bool) -> None:
    """By distributedInfo; without it, or where it says the same of all, by the names of file or folder."""
    for rank, name in enumerate(names):
        trace = cuda_trace(rank)
        if not says_rank:
            trace["distributedInfo"] = {"rank": 0, "world_size": 2} if "host" not in name else {}
        write(tmp_path / name, trace)
    if "host" in names[0] and not says_rank:
        with pytest.raises(TraceError, match="which rank it is of"):
            find_windows(tmp_path)
    else:
        (window,) = find_windows(tmp_path)
        assert {rank: path.name for rank, path in window.files.items()} == {
            rank: Path(name).name for rank, name in enumerate(names)
        }
        assert analyse_window(window).problems == []


def test_windows_of_foreign_files_are_told_apart_by_their_steps(tmp_path: Path) -> None:
    for rank in range(2):
        for later in (-5, 5):  # the first window begins with step 0
            trace = cuda_trace(rank)
            for part in trace["traceEvents"]:
                part["name"] = re.sub(r"#(\d+)", lambda match, later=later: f"#{int(match[1]) + later}", part["name"])
            write(tmp_path / f"host_{rank}.{later}.pt.trace.json", trace)
    write(tmp_path / "notes.json", {"no": "trace"})
    windows = find_windows(tmp_path)
    assert [(window.step, list(window.files)) for window in windows] == [(0, [0, 1]), (10, [0, 1])]


def test_a_file_that_is_alone_needs_no_rank_and_no_collectives(tmp_path: Path) -> None:
    trace = cuda_trace()
    alone = [part for part in trace["traceEvents"] if not part["name"].startswith("nccl")]
    write(tmp_path / "trace.json", {"traceEvents": alone})
    (window,) = find_windows(tmp_path)
    assert list(window.files) == [0]
    analysis = analyse_window(window)
    assert analysis.problems == [] and analysis.summary["overlap_pct"].isna().all()
    assert write_summary(analysis, "x", tmp_path / "out").exists()


def test_a_broken_foreign_file_belongs_to_the_window_that_lacks_its_rank(tmp_path: Path) -> None:
    """Without a world size, only the name of the broken file says that a rank is missing."""
    trace = cuda_trace(0)
    del trace["distributedInfo"]["world_size"]
    write(tmp_path / "rank_0.json", trace)
    for broken in (b"", gzip.compress(json.dumps(cuda_trace(1)).encode())[:-200]):
        (tmp_path / "rank_1.json.gz").write_bytes(broken)
        (problem,) = analyse_window(find_windows(tmp_path)[0]).problems
        assert "rank_1.json.gz" in problem


def test_traces_of_old_kineto(tmp_path: Path) -> None:
    """Its categories are capitalised, and its steps are operators."""
    old = {"kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator"}
    trace = cuda_trace()
    for part in trace["traceEvents"]:
        part["cat"] = old[part["cat"]]
    assert timeline_of(trace).kernels.equals(timeline_of(cuda_trace()).kernels)


def test_gloo_without_a_world_size_does_not_guess_it() -> None:
    shape = {"Input Dims": [[4], [2]], "Input type": ["float", "float"]}
    call = event("cpu_op", "c10d::_allgather_base_", 120, 5, **shape)
    span = event("user_annotation", "gloo:all_gather", 130, 9, 2, **{"Input Dims": [[2]], "Input type": ["float"]})
    for info, payload in (({}, np.nan), ({"world_size": 2}, 16.0)):
        trace = {"distributedInfo": info, "traceEvents": [*steps_at((5, 0, 900)), call, span]}
        (row,) = timeline_of(trace).collectives.to_dict("records")
        assert row["bytes"] == payload or (np.isnan(payload) and np.isnan([row["bytes"], row["group_size"]]).all())


def test_an_own_file_outside_its_folder(tmp_path: Path) -> None:
    paths = [write(tmp_path / name / NAME, cpu_trace(rank)) for rank, name in enumerate("ab")]
    (window,) = group_by_window(paths, "x")
    assert list(window.files) == [0, 1] and analyse_window(window).problems == []


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, cuda_trace(0)) for name in ("a.json", "b.json")]
    with pytest.raises(TraceError, match=r"a\.json and .*b\.json are both of rank 0"):
        group_by_window(paths, "x")


def test_what_profilers_write_though_json_forbids_it() -> None:
    text = json.dumps(cpu_trace()).replace('"args": {}', '"args": {"bandwidth": NaN, "rate": Infinity}')
    data = text.encode().replace(b"MmBackward0", b"Mm\xffBack\x01ward")
    trace = parse_trace(data, Path("x"))
    assert len(trace.events) == len(cpu_trace()["traceEvents"]) and "Mm\ufffdBack ward" in "".join(trace.events["name"])


def test_one_step_is_analysed_whole() -> None:
    trace = cpu_trace()
    trace["traceEvents"] = trace["traceEvents"][:8]
    assert timeline_of(trace).steps["number"].tolist() == [5]


def test_operators_of_the_host_are_not_kept_where_a_device_ran() -> None:
    events = [*cuda_trace()["traceEvents"], event("cpu_op", "aten::mm", 0, 5), event("python_function", "f", 0, 5)]
    kept = parsed(*events, event("cpu_op", "record_param_comms", 0, 5, dtype="Float")).events
    assert set(kept["cat"]) == {"kernel", "user_annotation", "cpu_op"}
    assert kept.loc[kept["cat"] == "cpu_op", "args"].tolist() == [{"dtype": "Float"}]

"""What is wrong with a trace is reported with its effect on the figures; no figure changes silently."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_lab.analysis.command import main
from ddp_lab.runtime.errors import UserError
from tests.analysis.windows import analysis_of
from tests.traces import cpu_trace, cuda_trace, event, write

Trace = dict[str, Any]
BEGAN = 1e9
"""In us: traces of real clocks do not begin at 0."""
CALL = {
    "Collective name": "allreduce",
    "In msg nelems": 1000,
    "Out msg nelems": 1000,
    "dtype": "Float",
    "Group size": 2,
}


def good(kind, rank):
    trace = cpu_trace(rank) if kind == "cpu" else cuda_trace(rank, **CALL)
    if kind == "cuda":
        trace["traceEvents"].append(event("cuda_runtime", "cudaMemsetAsync", -50, 1, correlation=0))
    for span in trace["traceEvents"]:
        span["ts"] += BEGAN
    return trace


def of(trace, *names):
    return [span for span in trace["traceEvents"] if any(name in span["name"] for name in names)]


def without(trace, events):
    trace["traceEvents"] = [span for span in trace["traceEvents"] if not any(span is removed for removed in events)]


def shifted(events, by):
    for span in events:
        span["ts"] += by


def launches_of(trace, name):
    links = {span["args"]["correlation"] for span in of(trace, name)}
    return [span for span in of(trace, "Launch") if span["args"]["correlation"] in links]


def without_nccl(trace):
    """The host's calls are there."""
    without(trace, launches_of(trace, "nccl") + of(trace, "nccl"))
    trace["traceEvents"] += [event("cpu_op", "nccl:all_reduce", BEGAN + at, 9) for at in (540, 1540, 2540)]


Change = Callable[[Trace], Any]
OF_CPU = {
    "an operator without time": (lambda t: of(t, "mm")[0].update(ts=None), r"without a time are left out \(1\)"),
    "an operator across another": (lambda t: shifted(of(t, "mm")[:1], 250), "without nesting"),
    "fewer collectives": (lambda t: without(t, of(t, "allreduce_")[:1] + of(t, "gloo:")[:1]), "1 of rank 0, 0 of"),
    "a span of Gloo": (lambda t: without(t, of(t, "gloo:")[:1]), r"Gloo ran are not in the trace \(1\)"),
    "another unit": (lambda t: [span.update(ts=span["ts"] * 1e3, dur=span["dur"] * 1e3) for span in of(t, "")], "unit"),
    "a clock that jumps": (lambda t: shifted([e for e in of(t, "") if e["ts"] > BEGAN + 1500], 400), "between steps"),
}
OF_DEVICE = {
    "a kernel at time 0": (lambda t: of(t, "gemm")[0].update(ts=0, dur=0), r"far from its steps.*\(1\)"),
    "a kernel before its launch": (lambda t: shifted(of(t, "gemm")[:1], -900), r"before they were launched.*\(1\)"),
    "a negative kernel": (lambda t: of(t, "gemm")[0].update(dur=-300), r"negative duration are left out \(1\)"),
    "no launches of NCCL": (lambda t: without(t, launches_of(t, "nccl")), r"whose launch is missing \(3\)"),
    "no launches": (lambda t: without(t, of(t, "Launch", "Memset")), r"whose launch is missing \(9\)"),
    "kernels that are lost": (lambda t: without(t, of(t, "add")), r"launched are not in the trace \(2\)"),
    "the rank of another": (lambda t: t["distributedInfo"].update(rank=0), "says that it is of rank 0"),
    "kernels that overlap": (lambda t: of(t, "add")[0].update(dur=2000), "stream 7 overlap"),
    "a kernel that lasts no time": (lambda t: of(t, "add")[0].update(dur=0), r"last no time are in the trace \(1\)"),
    "a kernel overtaken": (lambda t: shifted(of(t, "gemm")[:1], 1200), "launched earlier"),
    "a device's clock": (lambda t: shifted(of(t, "gemm", "add", "nccl"), -400), "0.350 ms or more behind"),
    "a step that is missing": (lambda t: of(t, "Step#6")[0].update(name="x"), "same run|steps are 5, 7"),
    "no kernels of NCCL": (lambda t: without_nccl(t), r"calls collectives \(2\), but none of their kernels"),
    "a gap between steps": (lambda t: of(t, "Step#5")[0].update(dur=500), "0.500 ms between steps"),
    "another collective": (lambda t: of(t, "nccl")[0]["args"].update({"In msg nelems": 9999}), "kind or size"),
}
WRONG = {"cpu": OF_CPU, "cuda": OF_DEVICE}


def written(folder, kind, change):
    """Two ranks, of which the second is changed."""
    for rank in range(2):
        trace = good(kind, rank)
        if rank:
            change(trace)
        write(folder / f"rank{rank}.pt.trace.json", trace)
    return folder


ALL = [(kind, case) for kind, of_kind in WRONG.items() for case in of_kind]


@pytest.mark.parametrize("cases", [ALL[1::3], pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_is_wrong_is_said_in_one_line(tmp_path, cases):
    for kind, case in cases:
        change, message = WRONG[kind][case]
        try:
            doubts = analysis_of(written(tmp_path / case, kind, change)).doubts
        except UserError as error:
            doubts = [str(error)]
        assert sum(bool(re.search(message, line)) for line in doubts) == 1 and len(doubts) < 4, (case, doubts)


def test_it_is_on_the_page_and_in_the_terminal(tmp_path, capsys):
    """Of both ranks in one line, since they differ only in the number."""
    for rank in range(2):
        trace = good("cuda", rank)
        without(trace, launches_of(trace, "nccl")[rank:])
        write(tmp_path / "profile" / "x" / f"rank{rank}.pt.trace.json", trace)
    assert main("reports", ["--trace-dir", str(tmp_path / "profile" / "x")]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert "kernels whose launch is missing (3) count" in warning and warning.endswith("(2 traces are like this)")
    assert "Doubtful: " in (tmp_path / "reports" / "x" / "summary.html").read_text()


def test_a_device_whose_clock_is_behind_is_set(tmp_path):
    """It is 400 us behind. It is set right by 350, after which kernels begin at their launch and not 50 us later."""
    unchanged = figures(written(tmp_path / "whole", "cuda", lambda trace: None))[0]
    set_right = figures(written(tmp_path / "behind", "cuda", OF_DEVICE["a device's clock"][0]))[0]
    early = figures(written(tmp_path / "early", "cuda", lambda t: shifted(of(t, "gemm", "add", "nccl"), -50)))[0]
    assert set_right == early != unchanged


def test_a_start_that_a_busy_cpu_records_late_is_no_fault(tmp_path):
    """A GPU's times are its own."""
    for kind, name, by in (("cpu", "gloo:", 500), ("cuda", "nccl", 900)):
        late = written(tmp_path / kind, kind, lambda trace, name=name, by=by: shifted(of(trace, name)[:1], by))
        doubts = analysis_of(late).doubts
        assert any("before the last rank" in doubt for doubt in doubts) == (kind == "cuda"), doubts


def test_equal_times_between_steps_are_no_fault(tmp_path):
    folder = written(tmp_path, "cuda", lambda trace: [step.update(dur=800) for step in of(trace, "Step#")])
    assert analysis_of(folder).doubts == []


def figures(folder):
    analysis = analysis_of(folder)
    tables = [analysis.summary, analysis.exposure.steps]
    return "".join(table.round(6).to_csv() for table in tables), analysis.problems + analysis.doubts


def mutated(kind, seed):
    """A change of one event, or of all with its name, to a value that cannot be."""

    def change(trace):
        chance = random.Random(seed)
        if chance.random() < 0.2:
            chance.choice([*WRONG[kind].values()])[0](trace)
            return
        chosen = chance.choice(trace["traceEvents"])
        spans = of(trace, chosen["name"]) if chance.random() < 0.3 else [chosen]
        leaves_no_sign = chosen["name"].startswith(("aten::", "backward", "cudaMemset"))
        damage = chance.choice(["ts", "dur", "again", *["gone"] * (not leaves_no_sign)])
        if damage == "gone":
            without(trace, spans)
        elif damage == "again":
            trace["traceEvents"] += json.loads(json.dumps(spans))
        else:
            values = [None, "x", 1e300, -1e300, -1, 2**70, [], *[0] * (damage == "ts" or "aten" not in chosen["name"])]
            value = chance.choice(values)
            for span in spans:
                span[damage] = value

    return change


@pytest.mark.parametrize("count", [5, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_no_figure_changes_without_a_word(tmp_path, count):
    unchanged = {kind: figures(written(tmp_path / kind, kind, lambda trace: None)) for kind in ("cpu", "cuda")}
    assert unchanged["cpu"][1] == unchanged["cuda"][1] == []

    @settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(("cpu", "cuda")), st.integers(0, 2**32))
    def check(kind, seed):
        try:
            text, doubts = figures(written(tmp_path / "changed", kind, mutated(kind, seed)))
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert doubts or text == unchanged[kind][0]

    check()

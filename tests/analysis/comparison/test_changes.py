"""Two runs of one choice: figures worked out by hand, and the command line with its exit codes."""

import numpy as np
import pandas as pd
import pytest

from ddp_lab.analysis.comparison.changes import Run, changes
from ddp_lab.analysis.comparison.traced import Traced
from ddp_lab.collectives.kinds import LABELS
from tests.in_process import compare_runs
from tests.traces import RHYTHM, cpu_trace, record, record_of_eight_steps, timed, write, write_run

OLD, NEW = "20261121-090000-aaaa", "20261121-100000-bbbb"


def traced(ms, calls, exposed=0.2):
    """Figures of two ranks. Rank 0 takes 1 ms less than `ms` for each profiled step, rank 1 takes 1 ms more; the part
    `exposed` of a step is exposed transfer. A step has `calls` all-reduces of 100 bytes."""
    rows = [
        {"rank": rank, "step": step, "step_ms": length + 2 * rank - 1, "exposed_transfer_ms": exposed * length}
        for step, length in enumerate(ms)
        for rank in (0, 1)
    ]
    steps = pd.DataFrame(rows).assign(exposed_wait_ms=0.0, exposed_copy_ms=0.0, idle_ms=0.0)
    steps["compute_ms"] = steps["step_ms"] - steps["exposed_transfer_ms"]
    kinds = {"all_reduce_calls_per_step": calls, "all_reduce_bytes_per_step": 100 * calls}
    sums = {"collective_calls_per_step": calls, "collective_bytes_per_step": 100 * calls}
    kinds |= sums | {"collective_sent_bytes_per_step": 100 * calls}
    table = pd.DataFrame([kinds, kinds]).reindex(columns=[*ZEROS, *kinds]).fillna(dict.fromkeys(ZEROS, 0.0))
    return Traced(table, {1: steps}, pd.DataFrame(columns=["result", "subject"]), None, 0)  # type: ignore[arg-type]


ZEROS = [f"{kind}_{quantity}_per_step" for kind in LABELS if kind != "all_reduce" for quantity in ("calls", "bytes")]
ZEROS += ["compute_pct", "non_compute_pct", "idle_pct", "overlap_pct"]


def by_figure(baseline, run, earlier=()):
    sides = (side if isinstance(side, list) else [side] for side in (baseline, run))
    return {row["figure"]: row for row in changes(*sides, earlier).to_dict("records")}


def test_step_times_a_fifth_longer():
    """40 steps of 100 ms, times a rhythm whose median is 1.005, and of 120 ms."""
    rows = by_figure(Run(timed("a", 0.1), None), Run(timed("a", 0.12), None))
    time, rate = rows["step time"], rows["throughput"]
    assert (time["baseline"], time["run"], time["change"]) == pytest.approx((100.5, 120.6, 20.1), abs=0.6)
    reach = np.exp(2.7764 * 2**0.5 * 0.04)
    expected = [100 * (1.2 * factor - 1) for factor in (1, 1 / reach, reach)]
    assert [time[name] for name in ("change_pct", "interval_low", "interval_high")] == pytest.approx(expected, abs=0.01)
    assert time["p_value"] < 0.05 and time["result"] == rate["result"] == "worse"
    assert rate["run"] / rate["baseline"] == pytest.approx(1 / 1.2) and rate["unit"] == "samples/s"
    assert rate["change_pct"] == pytest.approx(100 / 1.2 - 100)
    assert rate["interval_low"] == pytest.approx(100 / (1.2 * reach) - 100, abs=0.01)
    assert by_figure(Run(timed("a", 0.12), None), Run(timed("a", 0.1), None))["step time"]["result"] == "better"


def test_more_runs_tell_more():
    """With one run a side a tenth more proves nothing; with three it does, unless runs of a side differ by as much."""
    times, earlier = ([0.1, 0.101, 0.099], [0.11, 0.111, 0.109]), [timed("a", 0.1), timed("a", 0.12), timed("a", 0.14)]
    old, new = ([Run(timed("a", seconds), None) for seconds in side] for side in times)
    for baselines, runs, history, result in (
        (old[:1], new[:1], [], "not known"),
        (old, new, [], "worse"),
        (old, new, earlier, "not known"),
        ([*old, Run(timed("a", 0.13), None)], new, [], "not known"),
    ):
        assert by_figure(baselines, runs, history)["step time"]["result"] == result


def test_what_does_not_differ_and_what_cannot_be_known():
    """Without traces, and with few steps."""
    flat, wobbly = Run(timed("a", 0.1), None), Run(timed("a", 0.1, 0.01), None)
    assert by_figure(flat, flat)["step time"]["result"] == by_figure(flat, flat)["throughput"]["result"] == "equal"
    row = by_figure(flat, wobbly)["step time"]
    assert row["result"] == "not known" and row["interval_low"] < 0 < row["interval_high"]
    rows = by_figure(Run(record("a", 0.1), None), Run(record("a", 0.2), None))
    assert rows["step time"]["change_pct"] == pytest.approx(100)
    for name in ("step time", "exposed wait", "idle", "collectives", "payload"):
        assert rows[name]["result"] == "not known" and (name == "step time" or np.isnan(rows[name]["change"]))
    assert rows["peak memory"]["result"] == "equal" and rows["accuracy"]["baseline"] == 50.0


def test_parts_of_a_step_are_tested_by_run_and_calls_are_counted():
    """18 profiled steps of about 10 ms become 2 ms longer. A fifth of each is exposed: first 2 ms, then 2.4 ms."""
    lengths = (10 * RHYTHM[:18]).tolist()
    old, new = (
        [Run(timed("a", 0.1), traced([length + more for length in lengths], calls)) for more in side]
        for side, calls in (((0, 0.01, 0.02), 3), ((2, 2.01, 2.02), 4))
    )
    for baselines, runs, result in ((old[:1], new[:1], "not known"), (old, new, "worse")):
        rows = by_figure(baselines, runs)
        step, transfer = rows["profiled step"], rows["exposed transfer"]
        mean = np.mean(lengths) + (0.01 if len(baselines) > 1 else 0)
        assert (step["baseline"], step["change"], transfer["change"]) == pytest.approx((mean, 2.0, 0.4))
        assert [step["change_pct"], transfer["change_pct"]] == pytest.approx([200 / mean] * 2)
        assert step["result"] == transfer["result"] == result and rows["exposed copies"]["result"] == "equal"
        assert rows["step time"]["result"] == "equal"
        for name in ("collectives", "payload", "all-reduce: calls", "all-reduce: payload"):
            assert rows[name]["change_pct"] == pytest.approx(100 / 3) and rows[name]["result"] == "worse"
        assert "all-gather: calls" not in rows
    assert by_figure(new, old)["collectives"]["result"] == "better"


# The command line ----------------------------------------------------------------------------------------------------


def run_in(folder, run_id, content, calls=1):
    """A run of `cpu_trace` as training leaves it. Of its `calls` all-reduces a step, all but the first are planted."""

    def trace(rank):
        plain = cpu_trace(rank)
        repeated = [
            {**event, "ts": event["ts"] + 310} for event in plain["traceEvents"] if "allreduce" in event["name"] or
            "gloo:" in event["name"]
        ]  # fmt: skip
        return {**plain, "traceEvents": plain["traceEvents"] + repeated * (calls - 1)}

    write_run(folder, trace, run_id)
    config = {**content["config"], "no_profile": False}
    return write(folder / f"{run_id}.run.json", content | {"run_id": run_id, "config": config})


@pytest.fixture
def zero3(tmp_path):
    """A folder with two runs, the later a fifth slower and with a call more."""
    folder = tmp_path / "profile" / "zero3"
    run_in(folder, OLD, timed("zero3", 0.1))
    run_in(folder, NEW, timed("zero3", 0.12), calls=2)
    return folder


def test_changes_of_two_runs(zero3):
    answer = compare_runs(str(zero3), "--baseline", OLD)
    assert answer.returncode == 0 and answer.stderr == "", answer.stderr
    folder = zero3.parent.parent / "reports_sharding" / "zero3"
    assert str(folder / "changes.csv") in answer.stdout.replace("\n", "") and "all-reduce: calls" in answer.stdout
    table = pd.read_csv(folder / "changes.csv").set_index("figure")
    assert table.loc["step time", "result"] == table.loc["collectives", "result"] == "worse"
    assert table.loc["idle", "result"] == "not known" and not (folder / "summary.html").exists()
    for flags, code, named in (
        (["--run", NEW, "--fail-above", "25"], 3, {"collectives"}),
        (["--baseline", NEW, "--fail-above", "0"], 0, set()),
    ):
        answer = compare_runs(str(zero3), *flags)
        worse = {line.split(" got worse")[0].removeprefix("error: ") for line in answer.stderr.splitlines()}
        assert answer.returncode == code and named <= worse and bool(named) == bool(worse)
        assert "step time" not in worse


def test_runs_from_elsewhere_and_without_traces(zero3, tmp_path):
    record_path = run_in(tmp_path / "kept" / "zero3", OLD, timed("zero3", 0.2))
    untraced = record_of_eight_steps("zero3", 0.1) | {"run_id": "later", "eval": None}
    untraced["config"] |= {"no_profile": True, "no_eval": True}
    write(zero3 / "later.run.json", untraced)
    arguments = ["--baseline", str(record_path), "--run", "later", "--output-dir", str(tmp_path / "out")]
    answer = compare_runs(str(zero3), *arguments)
    assert answer.returncode == 0 and answer.stderr == "", answer.stderr
    table = pd.read_csv(tmp_path / "out" / "reports_sharding" / "zero3" / "changes.csv").set_index("figure")
    assert table.loc["step time", "baseline"] == pytest.approx(200, rel=0.02)
    assert table.loc["collectives", "baseline"] == 1 and np.isnan(table.loc["collectives", "run"])
    assert table.loc["collectives", "result"] == table.loc["eval loss", "result"] == "not known"

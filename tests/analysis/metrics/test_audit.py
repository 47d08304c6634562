"""Expected against measured, in hand-made traces: right runs pass, and each planted fault is found.

Faults in real strategies: `test_real_runs.py`.
"""

import dataclasses

import pandas as pd

from ddp_lab.analysis.metrics.audit import audit
from tests.tables import each_row
from tests.traces import cpu_trace, cuda_trace, record_of_eight_steps, timeline_of


def timelines(make=cpu_trace):
    return [timeline_of(make(rank), rank) for rank in range(2)]


def results(table):
    ranks = [None if pd.isna(rank) else int(rank) for rank in table["rank"]]
    return dict(zip(zip(table["subject"], ranks, strict=True), table["result"], strict=True))


def test_a_right_run_passes_every_check():
    table = audit(timelines(), record_of_eight_steps("x", 0.1))
    assert set(table["result"]) == {"pass"} and (table["difference"].abs() <= table["tolerance"]).all()
    per_run = ["optimizer steps", "samples trained on", "samples evaluated"]
    traffic = ["all-reduce: calls", "all-reduce: payload"]
    states = ["parameters at rest", "gradients at rest", "optimizer states at rest"]
    per_rank = [(subject, rank) for part in (traffic, states) for rank in (0, 1) for subject in part]
    assert list(results(table)) == [*((subject, None) for subject in per_run), *per_rank]


@each_row(
    ("change", "failing"),
    [
        ({"expected_traffic": []}, {(part, rank) for part in ("all-reduce: calls", "sent in all") for rank in (0, 1)}),
        (
            {"expected_traffic": [{"kind": "gather", "count": 1, "payload_bytes": 8}]},  # tables show it as `other`
            {(f"{kind}: calls", rank) for kind in ("all-reduce", "other") for rank in (0, 1)},
        ),
        ({"train_loss": [2.0]}, {("optimizer steps", None)}),
        ({"step_samples": [8, 8]}, {("samples trained on", None)}),
        ({"eval": {"loss": 1.0, "samples": 7}}, {("samples evaluated", None)}),
        ({"eval": None}, set()),
    ],
)
def test_what_differs_from_the_record_fails(change, failing):
    result_by_check = results(audit(timelines(), {**record_of_eight_steps("x", 0.1), **change}))
    failed = {key for key, result in result_by_check.items() if result == "fail" and "payload" not in key[0]}
    assert failed == failing


@each_row(
    ("payload", "change", "failing"),
    [
        (4000, lambda calls: calls, set()),
        (4001, lambda calls: calls, {("sent in all at least", rank) for rank in (0, 1)}),
        (4000, lambda calls: calls.assign(bytes=4001.0), {("all-reduce: payload", 1)}),  # differs from rank 0
    ],
)
def test_without_a_formula_steps_and_ranks_are_equal_and_send_enough(payload, change, failing):
    bound = {"kind": "all_reduce", "count": 1, "payload_bytes": payload, "wire_bytes": payload, "at_least": True}
    first, second = timelines()
    second = dataclasses.replace(second, collectives=change(second.collectives))
    result_by_check = results(audit([first, second], {**record_of_eight_steps("x", 0.1), "expected_traffic": [bound]}))
    assert {key for key, result in result_by_check.items() if result == "fail" and "at rest" not in key[0]} == failing


def test_state_beyond_the_formula_fails():
    run = record_of_eight_steps("x", 0.1)
    run["memory"][1]["gradients_bytes"] *= 2
    table = audit(timelines(), run)
    (row,) = table[table["result"] == "fail"].to_dict("records")
    assert (row["subject"], row["rank"]) == ("gradients at rest", 1)
    assert row["difference"] == row["measured"] - row["expected"] == 10 * 2**20 + 8


def test_a_step_of_fewer_samples_is_not_compared():
    """In step 6 both ranks communicate nothing, and the record says that it trained on half of the samples."""
    truncated = []
    for timeline in timelines():
        at_first = timeline.collectives[timeline.collectives["issued"] < timeline.steps["end"].iloc[0]]
        truncated.append(dataclasses.replace(timeline, collectives=at_first))
    run = record_of_eight_steps("x", 0.1)
    assert {key for key, result in results(audit(truncated, run)).items() if result == "fail"} == {
        (f"all-reduce: {figure}", rank) for figure in ("calls", "payload") for rank in (0, 1)
    }
    short = {**run, "train_samples": 52, "step_samples": [8] * 6 + [4], "train_loss": [2.0] * 7}
    table = audit(truncated, short)
    assert set(table["result"]) == {"pass"}
    assert table.loc[table["unit"] == "calls/step", "steps"].tolist() == [1, 1]
    none_full = audit(truncated, {**short, "step_samples": [4] * 14, "train_loss": [1.0] * 14})
    assert set(none_full.loc[none_full["steps"].notna(), "result"]) == {"unknown"}


def test_unknown_sizes_are_not_called_right():
    checks = results(audit(timelines(cuda_trace), record_of_eight_steps("x", 0.1)))
    assert checks[("all-reduce: calls", 0)] == "pass" and checks[("all-reduce: payload", 0)] == "unknown"

"""Expected against measured: right runs pass, and each planted fault is found, in hand-made traces and in real ones."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from analysis.report.summary_page import write_summary

import sharding
from analysis.metrics.audit import audit, calls_by_step
from analysis.summary import analyse_window
from analysis.traces.finding import find_windows
from analysis.traces.timeline import RankTimeline
from ddp.bucket_ddp_async import BucketDDP
from ddp.simple_ddp_ga import SimpleDDPAccumulated
from tests.ranks import RankPool
from tests.traces import cpu_trace, cuda_trace, record_of_eight_steps, timeline_of
from training.config import RunConfig
from training.distributed import Ranks
from training.run import train_and_record

TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 80, "eval_samples": 8, "profile_wait": 1}


def timelines(make: Callable[..., dict[str, Any]] = cpu_trace) -> list[RankTimeline]:
    return [timeline_of(make(rank), rank) for rank in range(2)]


def results(table: pd.DataFrame) -> dict[tuple[str, int | None], str]:
    ranks = [None if pd.isna(rank) else int(rank) for rank in table["rank"]]
    return dict(zip(zip(table["subject"], ranks, strict=True), table["result"], strict=True))


def test_a_right_run_passes_every_check() -> None:
    table = audit(timelines(), record_of_eight_steps("x", 0.1))
    assert set(table["result"]) == {"pass"} and (table["difference"].abs() <= table["tolerance"]).all()
    whole = ["optimizer steps", "samples trained on", "samples evaluated"]
    traffic = ["all-reduce: calls", "all-reduce: payload"]
    states = ["parameters at rest", "gradients at rest", "optimizer states at rest"]
    each = [(subject, rank) for part in (traffic, states) for rank in (0, 1) for subject in part]
    assert list(results(table)) == [*((subject, None) for subject in whole), *each]


def test_without_a_record_nothing_is_expected() -> None:
    assert audit(timelines(), None).empty


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"expected_traffic": []}, {("all-reduce: calls", 0), ("all-reduce: calls", 1)}),
        ({"train_loss": [2.0]}, {("optimizer steps", None)}),
        ({"step_samples": [8, 8]}, {("samples trained on", None)}),
        ({"eval": {"loss": 1.0, "samples": 7}}, {("samples evaluated", None)}),
    ],
)
def test_what_differs_from_the_record_fails(change: dict[str, Any], failing: set[Any]) -> None:
    found = results(audit(timelines(), {**record_of_eight_steps("x", 0.1), **change}))
    failed = {key for key, result in found.items() if result == "fail" and "payload" not in key[0]}
    assert failed == failing


def test_state_beyond_the_formula_fails() -> None:
    run = record_of_eight_steps("x", 0.1)
    run["memory"][1]["gradients_bytes"] *= 2
    table = audit(timelines(), run)
    (row,) = table[table["result"] == "fail"].to_dict("records")
    assert (row["subject"], row["rank"]) == ("gradients at rest", 1)
    assert row["difference"] == row["measured"] - row["expected"] == 10 * 2**20 + 8


def test_one_step_of_one_rank_is_enough_to_fail() -> None:
    first, second = timelines()
    extra = first.collectives.iloc[[1]]
    first = dataclasses.replace(first, collectives=pd.concat([first.collectives, extra], ignore_index=True))
    table = audit([first, second], record_of_eight_steps("x", 0.1)).set_index(["subject", "rank"])
    assert table.loc[("all-reduce: calls", 0), "measured"] == 2
    assert table.loc[("all-reduce: payload", 0), "difference"] == 4000
    assert (table.loc[(slice(None), 1), "result"] == "pass").all()


def test_a_step_of_fewer_samples_is_not_held_against_the_formula() -> None:
    """In step 6 both ranks communicate nothing, and the record says that it trained on half of the samples."""
    made = []
    for each in timelines():
        at_first = each.collectives[each.collectives["issued"] < each.steps["end"].iloc[0]]
        made.append(dataclasses.replace(each, collectives=at_first))
    run = record_of_eight_steps("x", 0.1)
    assert {key for key, result in results(audit(made, run)).items() if result == "fail"} == {
        (f"all-reduce: {figure}", rank) for figure in ("calls", "payload") for rank in (0, 1)
    }
    short = {**run, "train_samples": 52, "step_samples": [8] * 6 + [4], "train_loss": [2.0] * 7}
    table = audit(made, short)
    assert set(table["result"]) == {"pass"}
    assert table.loc[table["unit"] == "calls/step", "steps"].tolist() == [1, 1]
    none_full = audit(made, {**short, "step_samples": [4] * 14, "train_loss": [1.0] * 14})
    assert set(none_full.loc[none_full["steps"].notna(), "result"]) == {"unknown"}


def test_unknown_sizes_are_not_called_right() -> None:
    found = results(audit(timelines(cuda_trace), record_of_eight_steps("x", 0.1)))
    assert found[("all-reduce: calls", 0)] == "pass" and found[("all-reduce: payload", 0)] == "unknown"


# Faults in real strategies -------------------------------------------------------------------------------------------


class ExtraAllReduce(SimpleDDPAccumulated):
    """All-reduces once more than it says: gradients are right, the time is not."""

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        dist.all_reduce(torch.zeros(250), group=self.process_group)


class DoubledPayload(BucketDDP):
    """Sends every bucket with as much padding behind it."""

    def all_reduce(self, gradient: torch.Tensor, parts: object = (), async_op: bool = False) -> None:
        twice = torch.cat([gradient, torch.zeros_like(gradient)])
        super().all_reduce(twice)
        gradient.copy_(twice[: gradient.numel()])


class NeverReduced(SimpleDDPAccumulated):
    """Forgets the first parameter's gradient."""

    def after_backward(self) -> None:
        all_of_them = self.trainable
        self.trainable = dict(list(all_of_them.items())[1:])
        super().after_backward()
        self.trainable = all_of_them


FAULTS = {"extra": ExtraAllReduce, "doubled": DoubledPayload, "never": NeverReduced}


def run_zero3(folder: str) -> None:
    """Fourteen steps, of which the seventh, `ProfilerStep#6`, is the last of an epoch: 2 samples, not 8."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    settings = RunConfig(
        **(TINY | {"train_samples": 50, "profile_wait": 4}), choice="zero3", epochs=2, output_dir=folder
    )  # type: ignore[arg-type]
    train_and_record(settings, ranks, sharding.load)


def test_a_window_over_the_end_of_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    """ZeRO-3 gathers and scatters once for each micro-batch, of which the short step has one instead of two."""
    ranks.run(2, run_zero3, str(tmp_path))
    (window,) = find_windows(tmp_path / "profile" / "zero3")
    analysis = analyse_window(window)
    assert analysis.record is not None and analysis.record["step_samples"][5:8] == [8, 2, 8]
    scatters = calls_by_step(analysis.timelines[0]).query("kind == 'scatter'").set_index("step")["calls"]
    assert scatters[6] == scatters[5] / 2
    assert set(analysis.audit["result"]) == {"pass"}
    counted = analysis.audit[analysis.audit["unit"].isin(["calls/step", "bytes/step"])]
    assert (counted["steps"] == 1).all() and len(counted)


def run_with(choice: str, folder: str) -> None:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    settings = RunConfig(**TINY, choice=choice, output_dir=folder, profile_repeat=1)  # type: ignore[arg-type]
    train_and_record(settings, ranks, FAULTS.__getitem__)


@pytest.mark.parametrize(
    ("choice", "calls", "payload"),
    [("extra", 1, 1000), ("doubled", 0, 4 * 3 * 16 * 16), ("never", -1, -4 * 16 * 16)],
)
def test_a_wrong_strategy_is_seen(ranks: RankPool, tmp_path: Path, choice: str, calls: int, payload: int) -> None:
    ranks.run(2, run_with, choice, str(tmp_path))
    (window,) = find_windows(tmp_path / "profile" / choice)
    page = write_summary(analyse_window(window), choice, tmp_path / "reports").read_text()
    table = pd.read_csv(tmp_path / "reports" / "audit.csv").set_index(["subject", "rank"])
    for rank in (0, 1):
        assert table.loc[("all-reduce: calls", rank), "difference"] == calls
        assert table.loc[("all-reduce: payload", rank), "difference"] == payload
    wrong = set(table.index[table["result"] == "fail"])
    expected = {"all-reduce: payload"} | ({"all-reduce: calls"} if calls else set())
    assert wrong == {(subject, rank) for subject in expected for rank in (0, 1)}
    assert f"{len(wrong)} fail" in page and f'data-column="difference" data-value="{float(payload)}"' in page
    assert json.dumps(sorted(set(table["result"]))) == '["fail", "pass"]'

"""Predictions held against measurement: the published T4 table, real ranks' memory, and what a table of errors says."""

import argparse
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import planner as benchmark
from benchmarks.predictions import lab_command, t4
from benchmarks.predictions.held import Held, frame, mean_error_pct, median_of, spread_pct, summary, write, wrong_orders
from benchmarks.predictions.memory_command import compare
from benchmarks.predictions.memory_ranks import rows_of
from planner.contracts import Contention
from planner.runs import data_of
from tests.ranks import RankPool
from training.config import RunConfig
from training.distributed import Ranks
from training.errors import UserError


def row(choice: str, predicted: float, measured: float, setting: str = "lab", calibrates: bool = False) -> Held:
    return Held(setting, choice, "step", "ms", predicted, measured, calibrates)


# Tables --------------------------------------------------------------------------------------------------------------


def test_what_calibrates_counts_in_no_figure() -> None:
    rows = [row("a", 90, 100), row("b", 102, 100), row("c", 200, 100, calibrates=True)]
    assert mean_error_pct(rows) == pytest.approx(6) and frame(rows).error_pct.tolist() == pytest.approx([-10, 2, 100])
    said = summary(rows, 5, 3)
    assert said.startswith(
        "mean absolute error 6.00 % of 2 (bar 5 %, stretch 3 %); best b (lab, step) +2.00 %, worst a"
    )
    assert "every row calibrates" in summary(rows[2:], 5)


def test_only_what_is_apart_must_be_in_order() -> None:
    """b and c are 4 % apart; of a-b and a-c one is predicted the wrong way round; settings do not mix."""
    rows = [row("a", 101, 100), row("b", 100, 120), row("c", 110, 124), row("d", 1, 500, setting="other")]
    pairs, wrong = wrong_orders(rows)
    assert pairs == 2 and wrong == ["lab: a is 20 % faster than b, predicted slower"]


def test_takes_become_one_row_of_medians() -> None:
    takes = [row("a", 90, 100), row("b", 5, 50), row("a", 80, 130), row("b", 6, 50), row("a", 70, 110)]
    assert median_of(takes) == [row("a", 80, 110), row("b", 5.5, 50)]
    away = [100 * 10 / 110, 100 * 20 / 110, 0, 0, 0]
    assert spread_pct(takes) == pytest.approx(sum(away) / 5)


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--csv .*: cannot be written"):
        write([row("a", 1, 1)], tmp_path / "file" / "table.csv")


# 2 x T4 --------------------------------------------------------------------------------------------------------------


def test_all_reduces_are_the_published_ones() -> None:
    model = t4.all_reduce_model()
    for size, ms in t4.ALL_REDUCE_MS.items():
        assert 1e3 * float(model.seconds(size * t4.MB)) == pytest.approx(ms, rel=2e-3)
    assert 1e3 * float(model.seconds(0)) == pytest.approx(2.7 - 10 * (26.2 - 2.7) / 90)


def test_the_model_behind_the_table() -> None:
    """By the bytes that fit its all-reduces; the stand-in has as many parameters as the formula, and in fact."""
    assert [name for name, (_, _, fits) in t4.consistent_workloads().items() if fits] == [t4.WORKLOAD]
    with torch.device("meta"):
        module = t4.build_published()
    assert 4 * sum(p.numel() for p in module.parameters()) == t4.gradient_bytes(t4.WORKLOAD) == 4 * 423_183_360


@pytest.mark.slow
def test_the_stand_in_has_the_parameters_of_the_workload() -> None:
    from training.data.synthetic import build

    with torch.device("meta"):
        real, ours = build(RunConfig(workload=t4.WORKLOAD)).model, t4.build_published()
    assert [p.shape for p in real.parameters()] == [p.shape for p in ours.parameters()]


@pytest.mark.slow
def test_steps_that_do_not_overlap_come_out_as_published() -> None:
    rows = t4.held(t4.reckoning(), Contention(), rows=t4.ROWS[:2])
    assert mean_error_pct(rows) < 3


@pytest.mark.slow
def test_the_whole_table_is_within_the_bar() -> None:
    reckoned = t4.reckoning()
    rows = t4.held(reckoned, t4.fitted_contention(reckoned), t4.CALIBRATES)
    assert [row.choice for row in rows if row.calibrates] == ["overlap"] and mean_error_pct(rows) < 5
    assert abs(next(row for row in rows if row.calibrates).error_pct) < 0.5


# Memory --------------------------------------------------------------------------------------------------------------


def measured_rows(config: RunConfig) -> list[dict[str, Any]]:
    import torch.distributed as dist

    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    return rows_of(config, ranks)


@pytest.mark.parametrize("choice", ["flat_ddp", "bucket_ddp_async", "zero3"])
def test_memory_against_real_ranks(ranks: RankPool, choice: str) -> None:
    config = RunConfig(workload="mlp", depth=3, width=64, train_samples=8, eval_samples=2, device="cpu", backend="gloo")
    measured = ranks.run(2, measured_rows, replace(config, choice=choice))[0]
    at_rest, peak = compare("mlp", config, choice, measured)
    assert at_rest.predicted == at_rest.measured and abs(peak.error_pct) < 2


# Documentation -------------------------------------------------------------------------------------------------------


def test_flags_and_columns_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    section = text.split("## `benchmarks/planner.py`")[1].split("\n## ")[0]
    for command, module in benchmark.COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_flags(parser)
        flags = [action.option_strings[-1] for action in parser._actions]
        documented = re.findall(
            r"^\| `(--[^`]+)` \|", section.split(f"### `{command}`")[1].split("\n### ")[0], re.MULTILINE
        )
        assert documented == [flag for flag in flags if flag != "--help"]
    columns = re.findall(r"^\| `([a-z_]+)` \|", section.split("### columns")[1], re.MULTILINE)
    assert columns == frame([row("a", 1, 1)]).columns.tolist()


def test_a_lab_step_is_predicted_for_the_rank_with_the_longest_samples() -> None:
    batch = {"global_batch_size": 8, "grad_accum_steps": 1, "train_samples": 8, "eval_samples": 1}
    config = RunConfig(workload="sample", **batch, device="cpu", backend="gloo")
    rank, batches = lab_command.slowest_rank(lab_command.Case("sample", "1gbit", 2, config, Path()))
    train = data_of(config).train
    longest = [max(len(train[index]["input_ids"]) for index in range(rank, 8, 2)) for rank in range(2)]
    assert longest[1] > longest[0], "so that taking rank 0 would be wrong"
    assert rank == 1 and batches[0]["input_ids"].shape == (4, longest[1])

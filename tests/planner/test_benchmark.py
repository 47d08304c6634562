"""Predictions held against measurement: the published T4 table, real ranks' memory, and what a table of errors says."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from benchmarks import planner as benchmark
from benchmarks.predictions import machine, t4
from benchmarks.predictions.held import Held, finish, frame, wrong_orders
from benchmarks.predictions.ranks import measure_choice, record_operators
from ddp_lab.planner.costs.hardware import table
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from tests.ranks import RankPool


def row(choice: str, predicted: float, measured: float, setting: str = "lab") -> Held:
    return setting, choice, "step", "ms", predicted, measured


def test_only_what_is_apart_must_be_in_order() -> None:
    """b and c are 4 % apart; of a-b and a-c one is predicted the wrong way round; settings do not mix."""
    rows = [row("a", 101, 100), row("b", 100, 120), row("c", 110, 124), row("d", 1, 500, setting="other")]
    pairs, wrong = wrong_orders(frame(rows))
    assert pairs == 2 and wrong == ["lab: a is 20 % faster than b, predicted slower"]


def test_what_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish([row("a", 90, 100), row("b", 102, 100)], tmp_path / "new" / "table.csv")
    said = capsys.readouterr().out
    assert "lab: mean absolute error 6.00 % of 2; smallest b +2.00 %, largest a -10.00 %" in said
    assert "order of choices more than 5 % apart: 0 of 0 right" in said
    table = pd.read_csv(tmp_path / "new" / "table.csv")
    assert table.error_pct.tolist() == pytest.approx([-10, 2])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--csv .*: cannot be written"):
        finish([row("a", 1, 1)], tmp_path / "file" / "table.csv")


# 2 x T4 ---------------------------------------------------------------------------------------------------------------


def test_all_reduces_are_the_published_ones() -> None:
    def ms(size: float) -> float:
        cost = t4.Published().cost("all_reduce", round(size), (0, 1))
        return 1e3 * (cost.latency_s + cost.transfer_s)

    for size, published in t4.ALL_REDUCE_MS.items():
        assert ms(size * t4.MB) == pytest.approx(published, rel=2e-3)
    assert ms(0) == pytest.approx(2.7 - 10 * (26.2 - 2.7) / 90)


@pytest.mark.slow
def test_the_published_table() -> None:
    """Steps that do not overlap come out as published; all of them within 9 % with the contention that plans assume."""
    held = t4.predictions(t4.T4.slowed(t4.slowness()), table()["contention"]["cuda"]["compute"])
    errors = frame(held).error_pct.abs()
    assert errors[:2].mean() < 3 and errors.mean() < 9


# Real ranks -----------------------------------------------------------------------------------------------------------


def measured_on_ranks(config: RunConfig, choices: list[str]) -> dict[str, Any]:
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    rows = {choice: measure_choice(replace(config, choice=choice), 1, ranks) for choice in choices}
    return {"choices": rows, "record": record_operators(config, ranks)}


def test_real_ranks_against_predictions(ranks: RankPool) -> None:
    """Memory is as measured. Step times depend on what else the machine does, so they only have to be there."""
    config = RunConfig(workload="mlp", depth=3, width=64, train_samples=8, eval_samples=2, device="cpu", backend="gloo")
    choices = ["bucket_ddp_async", "zero3"]
    measured = ranks.run(2, measured_on_ranks, config, choices)[0]
    table = frame(machine.compare("mlp", config, measured))
    assert table.what.tolist() == ["at rest", "peak", "step"] * 2
    for held in table.itertuples():
        assert held.predicted > 0 and held.measured > 0
        assert held.what != "at rest" or held.predicted == held.measured
        assert held.what != "peak" or abs(held.error_pct) < 2


def test_a_step_is_predicted_for_the_rank_with_the_longest_samples() -> None:
    config = machine.config_of("sample", 2, 1)
    first = [machine.first_micro_batches(config, 2, rank)[0]["input_ids"].shape[1] for rank in range(2)]
    assert first[0] != first[1] and first[machine.longest_rank(config, 2)] == max(first)
    with pytest.raises(UserError, match=r"--models: unknown model 'mpl'; did you mean .*mlp"):
        machine.config_of("mpl", 2, 1)


def test_flags_and_columns_are_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    section = text.split("## `benchmarks/planner.py`")[1].split("\n## ")[0]
    (commands,) = (a for a in benchmark.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for command, parser in commands.choices.items():
        flags = [action.option_strings[-1] for action in parser._actions]
        of_command = section.split(f"### `{command}`")[1].split("\n### ")[0]
        documented = re.findall(r"^\| `(--[^`]+)` \|", of_command, re.MULTILINE)
        assert documented == [flag for flag in flags if flag != "--help"]
    columns = re.findall(r"^\| `([a-z_]+)` \|", section.split("### columns")[1], re.MULTILINE)
    assert columns == frame([row("a", 1, 1)]).columns.tolist()

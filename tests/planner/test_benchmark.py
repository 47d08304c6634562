"""Predictions held against measurement: the published T4 table, real ranks' memory, and what a table of errors says."""

import argparse
import re
from pathlib import Path

import pytest

from benchmarks import planner as benchmark
from benchmarks.predictions import machine, t4
from benchmarks.predictions.held import Held, frame
from ddp_lab.planner.costs.hardware import table
from ddp_lab.runtime.errors import UserError


def row(choice: str, predicted: float, measured: float, setting: str = "lab") -> Held:
    return setting, choice, "step", "ms", predicted, measured


# 2 x T4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_published_table() -> None:
    """Steps that do not overlap come out as published; all of them within 9 % with the contention that plans assume."""
    held = t4.predictions(t4.T4.slowed(t4.slowness()), table()["contention"]["cuda"]["compute"])
    errors = frame(held).error_pct.abs()
    assert errors[:2].mean() < 3 and errors.mean() < 9


# Real ranks -----------------------------------------------------------------------------------------------------------


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

"""Faults that people make with PyTorch's own wrappers: the first difference is found, and its cause is named. Runs that
are right raise no alarm, however they are wrapped, cut and rounded."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.parity.answer import Answer
from ddp_lab.parity.causes import cause_of
from ddp_lab.parity.comparison import compare
from ddp_lab.parity.store import read
from tests.parity_tool.loops import train
from tests.ranks import RankPool

RUNS = tomllib.loads(Path(__file__).with_name("runs.toml").read_text())


def run_both(folder: Path, how: dict[str, Any]):
    """Run A, and the same with another rounding."""
    train(folder / "a", **how)
    train(folder / "c", rounding=True, **how)


def run_one(folder: Path, how: dict[str, Any]):
    train(folder, **how)


def recorded(ranks: RankPool, folder: Path, row: dict[str, Any], of_a: int = 1, **of_b: Any) -> list[Any]:
    both = row.get("both", {})
    ranks.run(of_a, run_both, folder, both | ({"wrapper": "ddp"} if of_a > 1 else {}))
    ranks.run(row.get("ranks", 2), run_one, folder / "b", of_b | both | row.get("run", {}))
    return [read(folder / run) for run in "abc"]


@pytest.mark.parametrize("name", RUNS["faults"])
def test_a_fault_is_named(name: str, ranks: RankPool, tmp_path: Path):
    row = RUNS["faults"][name]
    of_a = 2 if name == "buffers" else 1
    made = compare(*recorded(ranks, tmp_path, row, of_a, wrapper="ddp", fault=name))
    cause = cause_of(made)
    assert cause is not None, made.first
    for word in row["said"]:
        assert word in f"{cause.name}. {cause.usually}", (cause, made.first)


@pytest.mark.parametrize("name", RUNS["healthy"])
def test_right_runs_agree(name: str, ranks: RankPool, tmp_path: Path):
    a, b, yardstick = recorded(ranks, tmp_path, RUNS["healthy"][name])
    for known in (yardstick, None):
        answer = Answer.of(compare(a, b, known), known is not None, [])
        assert not answer.differs, answer.lines

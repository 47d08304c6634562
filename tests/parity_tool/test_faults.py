"""Faults that people make with PyTorch's own wrappers: the first difference is found, and its cause is named. Runs that
are right raise no alarm, however they are wrapped, cut and rounded."""

import json
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.parity.answer import Answer
from ddp_lab.parity.causes import cause_of
from ddp_lab.parity.comparison import compare
from ddp_lab.parity.store import read
from tests.parity_tool.loops import train
from tests.ranks import RankPool
from tests.tables import by_default

RUNS = tomllib.loads(Path(__file__).with_name("runs.toml").read_text())


def run_both(folder: Path, how: dict[str, Any]):
    """Run A, and the same with another rounding."""
    train(folder / "a", **how)
    train(folder / "c", rounding=True, **how)


def run_one(folder: Path, how: dict[str, Any]):
    train(folder, **how)


FolderOf = Callable[[int, dict[str, Any]], Path]
HEALTHY = ("ddp padded", "fsdp clips", "zero", "tokens cut by hand", "average", "accumulation")
"""Of each kind of wrapper and cut; faults have the other models."""
AS_ANOTHER = {
    *("divided by ranks", "sum on top", "no_sync at last", "group of some", "rate of a rank", "decay", "other shuffle"),
    *("other data", "own batches", "zero between, no bias", "clips scaled", "bias on each rank", "cast buffer"),
    *("sums each micro-batch", "cast parameters", "labels", "no sum backward"),
}
"""Faults that are found in the way of others."""


@pytest.fixture(scope="module")
def folder_of(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Where run A and the yardstick are, which rows of equal settings share."""

    @cache
    def recorded_runs(size: int, settings: str) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        ranks.run(size, run_both, folder, json.loads(settings))
        return folder

    return lambda size, settings: recorded_runs(size, json.dumps(settings, sort_keys=True))


def recorded(ranks: RankPool, folder_of: FolderOf, folder: Path, row: dict[str, Any], **of_b) -> list[Any]:
    shared = row.get("both", {})
    baseline = folder_of(2, shared | {"wrapper": "ddp"}) if "counts" in shared else folder_of(1, shared)
    ranks.run(row.get("ranks", 2), run_one, folder, of_b | shared | row.get("run", {}))
    return [read(run) for run in (baseline / "a", folder, baseline / "c")]


@pytest.mark.parametrize("name", by_default(RUNS["faults"], *RUNS["faults"].keys() - AS_ANOTHER))
def test_a_fault_is_named(name, ranks: RankPool, folder_of, tmp_path):
    row = RUNS["faults"][name]
    comparison = compare(*recorded(ranks, folder_of, tmp_path, row, wrapper="ddp", fault=name))
    cause = cause_of(comparison)
    assert cause is not None, comparison.first
    for word in row["said"]:
        assert word in f"{cause.says}. {cause.usually}", (cause, comparison.first)


@pytest.mark.parametrize("name", by_default(RUNS["healthy"], *HEALTHY))
def test_right_runs_agree(name, ranks: RankPool, folder_of, tmp_path):
    a, b, yardstick = recorded(ranks, folder_of, tmp_path, RUNS["healthy"][name])
    for reference in (yardstick, None):
        answer = Answer.of(compare(a, b, reference), reference is not None, [])
        assert not answer.differs, answer.lines

"""A run that stops and resumes equals one that does not; with another choice or other ranks, within rounding."""

from pathlib import Path

import pytest

from tests.checkpoints import losses, straight_and_asked_to_stop, straight_and_stopped
from tests.parity import NAMES
from tests.ranks import RankPool
from tests.tables import by_default

OFTEN = ("bucket_ddp_async", "zero1", "zero3", "pytorch_zero3")
"""One of each way to hold parameters, gradients and optimizer states."""


@pytest.mark.parametrize(
    "choice",
    by_default([choice for choice in NAMES if not choice.startswith("deepspeed")], *OFTEN),
)
def test_a_stop_changes_nothing(ranks: RankPool, tmp_path, choice):
    """Bitwise: parameters, optimizer, buffers, random numbers and losses of every rank."""
    in_background = choice in ("zero2", "simple_ddp", "pytorch_zero3")
    for straight, stopped, reseeded in ranks.run(3, straight_and_stopped, choice, tmp_path, in_background):
        assert stopped == straight
        assert all(reseeded[name] != straight[name] for name in ("losses", "random")), "the test would not see dropout"


@pytest.mark.parametrize("choice", ["bucket_ddp_async", "zero3"])
def test_one_rank_asks_all_to_stop(ranks: RankPool, tmp_path, choice):
    """All stop after the same step, which is saved, and go on from there as if nothing had happened."""
    for straight, stopped, steps, saved in ranks.run(2, straight_and_asked_to_stop, choice, tmp_path):
        assert steps == saved and 4 <= steps <= 5
        assert stopped == straight


def test_other_choices_and_other_numbers_of_ranks_resume(ranks: RankPool, tmp_path):
    """A relay: each leg resumes from what the one before has saved."""
    expected = ranks.run(2, losses, "simple_ddp", 10, tmp_path / "straight")[0]
    legs = [(2, "zero3"), (3, "zero1"), (1, "pytorch_zero3"), (2, "pytorch_zero1"), (2, "simple_ddp")]
    assert relay(ranks, tmp_path, legs) == pytest.approx(expected, rel=1e-5)


def test_odd_parameters_go_from_choice_to_choice(ranks: RankPool, tmp_path):
    """Parameters that are 0-d, without elements, and of mixed dtypes."""
    expected = ranks.run(2, losses, "simple_ddp", 8, None, None, "odd")[0]
    legs = [(2, "simple_ddp"), (3, "zero3"), (2, "zero1"), (1, "bucket_ddp_async")]
    assert relay(ranks, tmp_path, legs, "odd") == pytest.approx(expected, rel=1e-5)


def relay(
    ranks: RankPool, folder: Path, legs: list[tuple[int, tuple[str, str]]], model: str | None = None
) -> list[float]:
    """The losses of all steps. Each leg makes two of them, from what the one before has saved."""
    before: str | None = None
    for leg, (size, choice) in enumerate(legs):
        losses_by_rank = ranks.run(size, losses, choice, 2 * leg + 2, folder / str(leg), before, model)
        before = str(folder / str(leg))
    return losses_by_rank[0]

"""Workload `digits`: it learns in little time, and its batch normalization has the same statistics everywhere."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankPool
from tests.training.test_run import record_of, run_here
from training.config import RunConfig
from training.data.digits import build


@pytest.mark.parametrize("ranks_of_run", [1, 2])
def test_it_learns_within_four_epochs(ranks: RankPool, tmp_path: Path, ranks_of_run: int) -> None:
    settings = {"choice": "simple_ddp", "workload": "digits", "global_batch_size": 64, "epochs": 4}
    settings |= {"output_dir": str(tmp_path), "no_profile": True}
    assert set(ranks.run(ranks_of_run, run_here, settings)) == {None}
    record = record_of(tmp_path, "simple_ddp")
    assert record["train_samples"] == 1437 and record["eval"]["samples"] == 360
    assert record["eval"]["accuracy"] > 0.9 and record["train_loss"][0] > 2
    for row in record["memory"]:
        assert row["buffers_bytes"] == 2 * 4 * (32 + 64) + 2 * 8, "means, variances, and two counters"


def test_held_out_images_are_the_same_whatever_the_seed() -> None:
    def shades(**settings: Any) -> list[float]:
        return [sample["images"].sum().item() for sample in build(RunConfig(**settings)).evaluation]

    assert shades(seed=3) == shades() and shades(eval_samples=7) == shades()[:7]

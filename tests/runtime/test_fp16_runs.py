"""Runs in fp16: what is recorded of the loss scale, that checkpoints keep it, and that the host reads it late."""

from pathlib import Path

import pytest
import torch

import ddp_lab
from ddp_lab.strategy.strategy import Strategy
from tests.models import build, make_batch
from tests.parity import one_step
from tests.ranks import RankPool
from tests.runtime.checkpoint.test_runs import records
from tests.runtime.records.test_metrics import lines_of
from tests.runtime.test_run import run_here
from tests.tables import each_row

TINY = {"workload": "mlp", "depth": 3, "width": 16, "train_samples": 48, "eval_samples": 4, "no_profile": True}
TINY |= {"global_batch_size": 4}
TOO_LARGE = 2.0**22


def test_a_run_skips_its_first_steps_and_resumes_with_its_scale(ranks: RankPool, tmp_path):
    """It begins with a scale that overflows. Steps count, skipped or not; what is recorded says which were."""
    fp16 = {**TINY, "precision": "fp16", "loss_scale": TOO_LARGE, "choice": "flat_ddp"}
    straight = {**fp16, "output_dir": str(tmp_path / "straight")}
    assert ranks.run(2, run_here, straight) == [None, None]
    (record,) = records(tmp_path / "straight", "flat_ddp")
    skipped, scales = record["skipped_steps"], record["step_loss_scale"]
    assert 0 in skipped and 0 < len(skipped) < len(scales) == 12
    assert scales == [TOO_LARGE / 2 ** sum(earlier < step for earlier in skipped) for step in range(12)]
    assert [norm is None for norm in record["step_grad_norm"]] == [step in skipped for step in range(12)]
    (lines,) = lines_of(tmp_path / "straight", "flat_ddp")
    assert [line["loss_scale"] for line in lines] == scales
    assert [step for step, line in enumerate(lines) if line["skipped"]] == skipped

    saving = {**fp16, "output_dir": str(tmp_path / "stopped"), "checkpoint_every": 1, "max_steps": 1}
    assert ranks.run(2, run_here, saving) == [None, None]
    folder = str(tmp_path / "stopped" / "checkpoints" / "flat_ddp")
    choice = "bucket_ddp_async"
    resuming = {**fp16, "output_dir": str(tmp_path / choice), "choice": choice, "resume": folder}
    assert ranks.run(2, run_here, resuming) == [None, None]
    (resumed,) = records(tmp_path / choice, choice)
    assert resumed["step_loss_scale"] == [None, *scales[1:]] and resumed["skipped_steps"] == skipped[1:]
    assert resumed["train_loss"] == pytest.approx(record["train_loss"], rel=2**-9)
    messages = ranks.run(2, run_here, {**resuming, "loss_scale": 8.0})
    assert "--loss-scale was 4194304.0 and is 8.0" in messages[0]


def make(choice: str, seed: int, scale: float | None, precision: str = "fp16") -> Strategy:
    options = ddp_lab.StrategyOptions(precision=precision, loss_scale=scale, bucket_cap_mb=25.0)
    return ddp_lab.load(choice)(build("plain", seed), lambda p: torch.optim.AdamW(p, lr=1e-2), options)


def state_of(strategy: Strategy) -> list[float]:
    assert strategy.scaler is not None
    return [value.item() for value in strategy.scaler.state().values()]


def saved_by(choice: str, folder: Path) -> list[float]:
    strategy = make(choice, 0, TOO_LARGE)
    for step in range(20):
        one_step(strategy, [make_batch("plain", 2, step)])
    ddp_lab.save_checkpoint(strategy, folder)
    return state_of(strategy)


def loaded_by(choice: str, folder: Path) -> list[float]:
    ddp_lab.load_checkpoint(make("zero2", 2, None, "bf16"), folder)  # another precision has no use for it
    strategy = make(choice, 1, 4.0)
    ddp_lab.load_checkpoint(strategy, folder)
    return state_of(strategy)


@each_row("saves, loads", [("zero3", "bucket_ddp_async"), ("pytorch_ddp", "pytorch_zero3")])
def test_scale_and_growth_tracker_are_saved(ranks: RankPool, tmp_path, saves, loads):
    scale, tracker = ranks.run(2, saved_by, saves, tmp_path / "saved")[0]
    assert 4 < scale < TOO_LARGE and tracker > 0
    assert ranks.run(3, loaded_by, loads, tmp_path / "saved") == [[scale, tracker]] * 3

"""What a run tells of each step while it goes: JSON lines, TensorBoard, Weights & Biases; and of throughput by rank."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.text import LLAMA_SHAPES
from ddp_lab.runtime.errors import NonFiniteError
from ddp_lab.runtime.loop import TrainingResult
from ddp_lab.runtime.records.metrics import step_metrics
from tests.ranks import RankPool
from tests.runtime.test_run import record_of, run_here

DOCS = Path(__file__).parents[3] / "docs"
TOKENS = {"workload": "sample", "train_samples": 44, "no_eval": True, "no_profile": True}


def run_small(settings: dict[str, Any]) -> str | None:
    """A run on reviews of a model of two thin layers."""
    with mock.patch.dict(LLAMA_SHAPES, sample=(32, 48, 2, 4, 2, LLAMA_SHAPES["sample"][-1])):
        return run_here(settings)


def lines_of(folder: Path, choice: str) -> list[list[dict[str, Any]]]:
    """Of each file, oldest first."""
    files = (folder / "profile" / choice).glob("*.metrics.jsonl")
    paths = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    texts = [path.read_text() for path in paths]
    assert all(text.endswith("\n") for text in texts)
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def test_each_step_is_a_line_and_the_record_says_the_same(ranks: RankPool, tmp_path):
    settings = {**TOKENS, "choice": "simple_ddp", "output_dir": str(tmp_path), "schedule": "linear", "warmup_steps": 2}
    settings |= {"train_samples": 22, "global_batch_size": 4, "grad_accum_steps": 1}
    assert ranks.run(2, run_small, settings) == [None, None]
    record, (lines,) = record_of(tmp_path, "simple_ddp"), lines_of(tmp_path, "simple_ddp")
    assert [line["step"] for line in lines] == list(range(6))  # 22 samples in batches of 4
    text = (DOCS / "run-record.md").read_text()
    assert all(f"\n| {key} | " in text for key in lines[0])
    for key, field in {
        "loss": "train_loss",
        "lr": "step_lr",
        "grad_norm": "step_grad_norm",
        "step_time_s": "step_time_s",
        "samples": "step_samples",
        "tokens": "step_tokens",
    }.items():
        assert [line[key] for line in lines] == record[field], key
    assert all(line["tokens_per_second"] == pytest.approx(line["tokens"] / line["step_time_s"]) for line in lines)
    assert [line["time_s"] for line in lines] == sorted(line["time_s"] for line in lines)
    assert record["step_lr"] == pytest.approx([record["config"]["lr"] * part for part in (0.5, 1, 1, 0.75, 0.5, 0.25)])
    seconds, tokens = sum(record["step_time_s"][1:]), sum(record["step_tokens"][1:])
    assert record["tokens_per_second"] == pytest.approx(tokens / seconds)
    by_rank = record["throughput"]
    assert [row["rank"] for row in by_rank] == [0, 1]
    for name in ("samples_per_second", "tokens_per_second"):  # each by its own clock
        assert sum(row[name] for row in by_rank) == pytest.approx(record[name], rel=0.2)
    assert by_rank[0]["tokens_per_second"] != by_rank[1]["tokens_per_second"], "reviews differ in length"
    rate = record["model_flops_per_sample"] * record["samples_per_second"]
    assert record["model_flops_per_second"] == pytest.approx(rate)


def test_tokens_are_those_of_all_ranks(ranks: RankPool, tmp_path):
    """The same samples on one rank and on two, the last step with fewer."""
    tokens = []
    for size in (1, 2):
        folder = str(tmp_path / str(size))
        settings = {**TOKENS, "choice": "flat_ddp", "output_dir": folder, "global_batch_size": 4, "train_samples": 6}
        assert set(ranks.run(size, run_small, settings)) == {None}
        tokens.append(record_of(Path(folder), "flat_ddp")["step_tokens"])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2


def log_three_steps(folder: str, target: str):
    """What a run does with its sinks, on two ranks."""
    config = RunConfig(choice="flat_ddp", output_dir=folder, log_to=target)
    Path(folder, "profile", "flat_ddp").mkdir(parents=True, exist_ok=True)
    result = TrainingResult()
    with pytest.raises(NonFiniteError), step_metrics(config, "a-run", dist.get_rank() == 0) as after_step:
        for step in range(3):
            of_step = {"loss": 2.0 - step, "grad_norm": 0.5, "lr": 0.1, "step_time_s": 0.25}
            result.add(samples=8, tokens=64, rank_counts=(4, 32), loss_scale=None, skipped=False, **of_step)
            after_step(result)
        raise NonFiniteError("step 3: the loss is not finite")


def test_tensorboard_has_every_step_of_a_run_that_fails(ranks: RankPool, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    ranks.run(2, log_three_steps, str(tmp_path), "tensorboard")
    events = accumulator.EventAccumulator(str(tmp_path / "profile" / "flat_ddp" / "a-run.tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 2.0), (1, 1.0), (2, 0.0)]
    assert {event.value for event in events.Scalars("tokens_per_second")} == {256.0}

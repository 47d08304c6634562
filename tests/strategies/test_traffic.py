"""The collectives that a strategy announces are those that run: counted in the profile, by kind, number and bytes."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ddp_lab.analysis.traces.collectives import gloo_collectives
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.strategy.accounting import storage_bytes
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, all_choices, build_and_step, for_each_choice, is_refused, load, options_of
from tests.ranks import RankPool
from tests.tables import each_row

Totals = dict[str, tuple[int, int]]


def profiled_step(
    choice: tuple[str, str], model: str, micro_batches: int, options: dict[str, Any], step_number: int = 2
) -> tuple[Totals, Totals, set[int]]:
    """Totals (calls, bytes) by kind of step `step_number`: announced, and in the trace; and announced group sizes."""
    strategy = load(choice)(build(model), OPTIMIZERS["adam"], options_of(choice, **options))
    for step in range(step_number + 1):
        if step == step_number:
            strategy.finish_parameter_synchronization()  # of the step before
            profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            profiler.start()
        strategy.zero_grad()
        strategy.forward_backward([make_batch(model, 3, 10 * step + index) for index in range(micro_batches)])
        strategy.step()
    strategy.finish_parameter_synchronization()
    dist.barrier()
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        seen = gloo_collectives(read_trace(path).events, dist.get_world_size())
    announced: Totals = {}
    sizes = set()
    for collective in strategy.expected_traffic(micro_batches):
        calls, size = announced.get(collective.kind, (0, 0))
        announced[collective.kind] = (calls + collective.count, size + collective.payload_bytes)
        sizes.add(collective.group_size)
    grouped = seen[seen["kind"] != "barrier"].groupby("kind")["bytes"]
    return announced, {kind: (len(group), int(group.sum())) for kind, group in grouped}, sizes


@for_each_choice
def test_expected_traffic_is_what_runs(ranks: RankPool, choice: tuple[str, str]) -> None:
    """Two cases for each choice, and one of five in turn."""
    always: list[tuple[int, str, int, dict[str, Any]]] = [
        (2, "odd", 2, {"bucket_cap_mb": 0.001}),
        (3, "normed", 2, {"bucket_cap_mb": 0.001}),
    ]
    in_turn: list[tuple[int, str, int, dict[str, Any]]] = [
        (2, "frozen", 3, {}),
        (2, "branching", 2, {"find_unused_parameters": True}),
        (2, "tied", 1, {}),
        (2, "llama", 2, {"precision": "bf16"}),
        (2, "deep", 2, {"activation_checkpointing": "block"}),
    ]
    for world_size, model, micro_batches, options in [*always, in_turn[all_choices().index(choice) % 5]]:
        if is_refused(ranks, choice, model):
            continue
        if "activation_checkpointing" in options and choice[1].startswith("deepspeed"):
            continue  # refuses it
        for announced, seen, sizes in ranks.run(world_size, profiled_step, choice, model, micro_batches, options):
            assert announced == seen, f"{model}, {micro_batches} micro-batches"
            assert sizes == {world_size}


def resting_memory(choice: tuple[str, str]) -> dict[str, int]:
    return build_and_step(choice, optimizer="adam").memory_breakdown()


@each_row("name", ["simple_ddp", "flat_ddp", "bucket_ddp_async", "pytorch_ddp", "pytorch_ddp_plain"])
def test_replicated_memory_is_what_the_formula_says(ranks: RankPool, name: str) -> None:
    """4 bytes an element each for parameters and gradients, 8 for Adam, and Adam's 4-byte step counter a tensor."""
    elements, tensors = 6 * 11 + 11 + 11 * 7 + 7 + 7 + 1, 6
    for memory in ranks.run(2, resting_memory, ("ddp", name)):
        assert memory == {
            "parameters": 4 * elements,
            "gradients": 4 * elements * (2 if name == "pytorch_ddp_plain" else 1),  # DDP's buckets are copies
            "optimizer_state": 8 * elements + 4 * tensors,
            "buffers": 0,
        }


def test_storage_is_counted_once() -> None:
    base = torch.zeros(10)
    assert storage_bytes([base, base[:5], base.view(2, 5), torch.zeros(3)]) == 52

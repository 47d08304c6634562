"""The collectives that a strategy announces are those that run: counted in the profile, by kind, number and bytes."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ddp_lab.analysis.traces.collectives import gloo_collectives, sent_bytes
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.strategy.accounting import storage_bytes
from tests.models import build, make_batch
from tests.parity import OPTIMIZERS, all_choices, build_and_step, for_each_choice, is_refused, load, options_of
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import received_over_tcp

Totals = dict[str, tuple[int, int, float]]


def profiled_step(
    choice: tuple[str, str], model: str, micro_batches: int, options: dict[str, Any], step_number: int = 2
) -> tuple[Totals, Totals, set[int]]:
    """Totals (calls, bytes, bytes that are sent) by kind of step `step_number`: announced, and in the trace; and the
    announced group sizes."""
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
        seen = gloo_collectives(read_trace(path).events, dist.get_world_size())[0]
    announced: Totals = {}
    sizes = set()
    for collective in strategy.expected_traffic(micro_batches):
        calls, size, sent = announced.get(collective.kind, (0, 0, 0.0))
        sent = round(sent + collective.wire_bytes, 2)
        announced[collective.kind] = (calls + collective.count, size + collective.payload_bytes, sent)
        sizes.add(collective.group_size)
    calls = seen[seen["kind"] != "barrier"].assign(sent=sent_bytes).groupby("kind")[["bytes", "sent"]]
    found = {kind: (len(of), int(of["bytes"].sum()), round(of["sent"].sum(), 2)) for kind, of in calls}
    return announced, found, sizes


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


LAYERS, WIDTH, MICRO_BATCHES = 4, 252, 2


class Wide(torch.nn.Module):
    """So wide that what Gloo says beside the data is little."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.square().mean())


def what_arrives(choice: tuple[str, str]) -> tuple[float, float, float]:
    """Of a step: bytes that arrived here, that a rank sends as announced, and of all parameters."""
    strategy = load(choice)(Wide(), OPTIMIZERS["sgd"], options_of(choice))
    nbytes = 4.0 * LAYERS * WIDTH * (WIDTH + 1)
    for _ in range(2):
        dist.barrier()
        before = received_over_tcp()
        strategy.zero_grad()
        strategy.forward_backward([{"x": torch.ones(2, WIDTH)}] * MICRO_BATCHES)
        strategy.step()
        strategy.finish_parameter_synchronization()
        dist.barrier()
    sent = sum(part.wire_bytes for part in strategy.expected_traffic(MICRO_BATCHES))
    return received_over_tcp() - before, sent, nbytes


@each_row("world_size", [2, 3])
def test_what_is_announced_is_sent(ranks: RankPool, world_size: int) -> None:
    """By the formulas of docs/how-it-works, and as the operating system counts it. `zero3` gathers its last unit once a
    micro-batch. Torch's reduce-scatter over Gloo is an all-reduce."""
    formulas = {"zero1": 2, "zero2": MICRO_BATCHES + 1, "zero3": MICRO_BATCHES * (3 - 1 / LAYERS)}
    for name, formula in (formulas | {"pytorch_zero3": MICRO_BATCHES * 3}).items():
        found = ranks.run(world_size, what_arrives, ("sharding", name))
        arrived, sent, whole = (sum(each) / world_size for each in zip(*found, strict=True))
        share = (world_size - 1) / world_size * whole
        assert sent / share == pytest.approx(formula, rel=2e-3), name
        over_gloo = formula + MICRO_BATCHES * (name == "pytorch_zero3")
        assert arrived / share == pytest.approx(over_gloo, rel=0.01), name


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

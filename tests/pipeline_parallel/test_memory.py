"""What a rank of a pipeline holds for backward is what its schedule says, to the byte."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock
from weakref import WeakSet

import torch
from torch import Tensor

from ddp_lab.strategy.strategy import Strategy
from pipeline_parallel.actions import Action, Kind, Shape
from pipeline_parallel.channels import Channel
from pipeline_parallel.checks import lists_of
from pipeline_parallel.runner import Walk
from pipeline_parallel.schedules import SCHEDULES
from tests.models import make_batch
from tests.parity import in_stages, strategy_of
from tests.pipeline_parallel.test_schedules import most_in_flight
from tests.ranks import RankPool
from tests.tables import each_row

MODEL, SAMPLES, RANKS, MICRO_BATCHES = "deep", 2, 3, 6
HIDDEN = 4 * 20 * SAMPLES
"""Bytes of the hidden states of a micro-batch."""
HeldBytes = list[tuple[Action, int]]


class Saved:
    """A tensor that autograd has saved. Only autograd holds this object, so it lives as long as it is saved."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


@contextmanager
def measured(strategy: Strategy) -> Iterator[HeldBytes]:
    """Within this context, the bytes held after each action: saved by autograd, or captured for weight gradients.
    Weights themselves do not count."""
    saved: WeakSet[Saved] = WeakSet()
    weights = {parameter.untyped_storage().data_ptr() for parameter in strategy.module.parameters()}
    bytes_by_action: HeldBytes = []
    original = Walk._do

    def do(walk: Walk, action: Action):
        original(walk, action)
        products = [
            product
            for stage_weights in walk._weight_gradients.values()
            for products_of_weight in stage_weights._products.values()
            for _, product in products_of_weight
        ]
        captured = [cell.cell_contents for product in products for cell in product.__closure__ or ()]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage() for t in [*(s.tensor for s in saved), *captured]
        }
        nbytes = sum(storage.nbytes() for place, storage in storages.items() if place not in weights)
        bytes_by_action.append((action, nbytes))

    def pack(tensor: Tensor) -> Saved:
        saved.add(holder := Saved(tensor))
        return holder

    with mock.patch.object(Walk, "_do", do), torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        yield bytes_by_action


def held_in_steps(schedule: str, stages_per_rank: int) -> tuple[HeldBytes, HeldBytes]:
    """Held bytes in a step of one micro-batch, and in a step of several."""
    with strategy_of(in_stages("tp", f"pp={RANKS}", MODEL, schedule)) as strategy:
        steps = []
        for micro_batches in (1, MICRO_BATCHES):
            strategy.zero_grad()
            with measured(strategy) as bytes_by_action:
                strategy.forward_backward([make_batch(MODEL, SAMPLES, seed) for seed in range(micro_batches)])
            steps.append(bytes_by_action)
        return steps[0], steps[1]


def on_paper(actions: list[Action], adds: dict[tuple[Kind, int], int]) -> int:
    """The peak of held bytes, where `adds` has the bytes that an action of a kind and stage adds."""
    nbytes = peak = 0
    for action in actions:
        nbytes += adds.get(action[:2], 0)
        peak = max(peak, nbytes)
    return peak


@each_row("schedule, stages_per_rank", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
def test_what_is_held_is_what_is_in_flight(ranks: RankPool, schedule, stages_per_rank):
    """A forward pass holds the input of each block and the output of its tanh, which is the next block's input. Where
    backward is split, a product holds its input and its output's gradient until the weight's gradient is computed."""
    lists = lists_of(SCHEDULES[schedule], Shape(RANKS, MICRO_BATCHES, stages_per_rank))
    for rank, (single, several) in enumerate(ranks.run(RANKS, held_in_steps, schedule, stages_per_rank)):
        before = [0, *(size for _, size in single)]
        adds = {action[:2]: size - before[index] for index, (action, size) in enumerate(single)}
        peak = max(size for _, size in several)
        assert several[-1][1] == 0 and peak == on_paper(lists[rank], adds)
        if schedule in ("gpipe", "1f1b"):
            assert peak == most_in_flight(lists[rank]) * adds[Kind.FORWARD, rank]
        if rank == 1:  # all its stages are alike
            blocks, passes = 2 // stages_per_rank, most_in_flight(lists[1])
            assert adds[Kind.FORWARD, rank] == (blocks + 1) * HIDDEN
            if schedule == "zb-h1":
                assert adds[Kind.BACKWARD_INPUT, rank] == (2 * blocks - (blocks + 1)) * HIDDEN
            else:
                assert peak == passes * (blocks + 1) * HIDDEN
                assert passes == {"gpipe": MICRO_BATCHES, "1f1b": RANKS - 1, "interleaved": RANKS + 2 + 1}[schedule]


def left_in_flight(schedule: str) -> int:
    """Messages that one channel holds when a step has been walked, at most."""
    counts = []
    with strategy_of(in_stages("tp", f"pp={RANKS}", MODEL, schedule)) as strategy:
        original = Channel.finish
        with mock.patch.object(Channel, "finish", lambda self: (counts.append(len(self._in_flight)), original(self))):
            strategy.forward_backward([make_batch(MODEL, SAMPLES, seed) for seed in range(MICRO_BATCHES)])
    return max(counts)


def test_what_has_arrived_is_let_go(ranks: RankPool):
    assert max(ranks.run(RANKS, left_in_flight, "1f1b")) == RANKS

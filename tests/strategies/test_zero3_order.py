"""zero3 where ranks run other modules, in other orders, or again: as one process, or refused with its own reason."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import RankPool
from tests.strategies.cases.case import LoopCase, Run, Samples, in_one_process, on_a_rank, samples, squared_error
from tests.strategies.cases.outcomes import assert_equal
from tests.strategies.cases.running import Blocks, blocks_of
from tests.tables import each_row

ALL = (0, 1, 2, 3)
KINDS = {"": False, ", re-entrant": True}


def by_rank(*orders: tuple[int, ...]):
    def loss(run: Run, batch: Samples) -> Tensor:
        return nn.functional.mse_loss(run(batch.x, orders[batch.rank]), batch.y)

    return loss


def by_sample(run: Run, batch: Samples) -> Tensor:
    """Random blocks in random order; each step has its own."""
    chosen = torch.randint(
        4,
        (2 + (batch.step + 2 * batch.rank) % 5,),
        generator=torch.Generator().manual_seed(10 * batch.step + batch.rank),
    )
    return nn.functional.mse_loss(run(batch.x, tuple(chosen.tolist())), batch.y)


def then(run_again, context=torch.no_grad):
    """Between forward and backward, `context` runs another forward pass."""

    def loss(run: Run, batch: Samples) -> Tensor:
        result = squared_error(run, batch)
        with context():
            run_again(run)
        return result

    return loss


def evaluates(*orders: tuple[int, ...]):
    """Runs without a graph; on each rank in its own order."""

    def before(run: Run, module: nn.Module, step: int):
        rank = 0 if isinstance(run, nn.Module) else dist.get_rank()
        with torch.no_grad():
            run(samples(7, 0, 0).x, orders[rank])

    return before


class Segments(Blocks):
    """Checkpoints around several blocks, perhaps with another one in each block; of which samples may skip some."""

    def __init__(
        self, outer: bool, inner: bool | None, size: int = 3, frozen: tuple[int, ...] = (), skips: bool = False
    ):
        super().__init__()
        self.outer, self.inner, self.size, self.skips = outer, inner, size, skips
        for index in frozen:
            self.blocks[index].requires_grad_(False)

    def segment(self, begin: int, hidden: Tensor) -> Tensor:
        for index in range(begin, min(begin + self.size, 4)):
            block = self.blocks[index]
            if self.skips and (int(10 * hidden.detach().abs().sum()) + index) % 3 == 0:
                continue
            hidden = hidden + (
                block(hidden) if self.inner is None else checkpoint(block, hidden, use_reentrant=self.inner)
            )
        return hidden

    def forward(self, x: Tensor, chosen=None) -> Tensor:
        hidden = self.first(x)
        for begin in range(0, 4, self.size):
            hidden = checkpoint(self.segment, begin, hidden, use_reentrant=self.outer)
        return self.last(hidden)


def functional(run: Run, batch: Samples) -> Tensor:
    """Calls the module itself, not the strategy, with one parameter replaced."""
    module = getattr(run, "module", run)
    replaced = {"blocks.1.0.bias": torch.ones(8)}
    return squared_error(lambda x: torch.func.functional_call(module, replaced, (x,)), batch)


def block_by_itself(run: Run, module, step: int):
    with torch.no_grad():
        module.blocks[2](torch.ones(2, 8))


AS_ONE_PROCESS = {
    "another order on each rank": LoopCase(Blocks, by_rank(ALL, (1, 0, 3, 2), (3, 2, 1, 0))),
    "more often on rank 1": LoopCase(Blocks, by_rank(ALL, 2 * ALL, (2,)), unused=True),
    "by sample": LoopCase(Blocks, by_sample, unused=True, micro_batches=2),
    "fewer than in the first step": LoopCase(Blocks, blocks_of(3 * ALL, ALL, 2 * ALL)),
    "evaluation before backward": LoopCase(Blocks, then(lambda run: run(samples(7, 0, 0).x, (3, 1, 0)))),
    "evaluation in another order on each rank": LoopCase(Blocks, before=evaluates((3, 0, *ALL), (1, 2, 1), (0,))),
    **{
        f"checkpoints in a checkpoint{a}{b}": LoopCase(partial(Segments, o, i))
        for a, o in KINDS.items()
        for b, i in {**KINDS, ", of blocks": None}.items()
    },
    **{f"frozen blocks in a checkpoint{a}": LoopCase(partial(Segments, o, None, 4, (1, 3))) for a, o in KINDS.items()},
    **{
        f"blocks of a checkpoint that samples skip{a}": LoopCase(partial(Segments, o, None, skips=True), unused=True)
        for a, o in KINDS.items()
    },
    "a functional call": LoopCase(Blocks, functional, unused=True),
    "a block by itself": LoopCase(Blocks, before=block_by_itself),
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_as_one_process(ranks: RankPool, world_size):
    for index, (name, case) in enumerate(AS_ONE_PROCESS.items()):
        if world_size == 3 if "rank" in name else index % 2 == world_size % 2:
            outcomes = ranks.run(world_size, trained, name)
            assert_equal(name, outcomes, in_one_process(case, world_size), case.tolerance)


def trained(name: str, choice: str = "zero3"):
    return on_a_rank(AS_ONE_PROCESS.get(name) or REFUSED[name][0], choice, 25)


def around_all(run: Run, batch: Samples) -> Tensor:
    x = batch.x.clone().requires_grad_()
    return squared_error(lambda x: checkpoint(run, x, use_reentrant=False), batch._replace(x=x))


def inputs_first(run: Run, batch: Samples) -> Tensor:
    x = batch.x.clone().requires_grad_()
    loss = squared_error(run, batch._replace(x=x))
    torch.autograd.grad(loss, x, retain_graph=True)
    return loss


def products(run: Run, batch: Samples) -> Tensor:
    module = getattr(run, "module", run)
    replaced = {name: 1 * p for name, p in module.named_parameters()}
    return squared_error(lambda x: torch.func.functional_call(module, replaced, (x,)), batch)


def block_trains_by_itself(run: Run, batch: Samples) -> Tensor:
    module = getattr(run, "module", run)
    return squared_error(run, batch) + module.blocks[2](torch.ones(2, 8)).sum()


class Keeps:
    """Trains with the answer of a forward pass that ran before the last optimizer step."""

    def between(self, run: Run, module: nn.Module, step: int):
        self.earlier = run(samples(7, 0, 0).x).sum()

    def loss(self, run: Run, batch: Samples) -> Tensor:
        return squared_error(run, batch) + (self.earlier if batch.step else 0)


keeps = Keeps()
REFUSED: dict[str, tuple[LoopCase, str]] = {
    "in another order": (
        LoopCase(Blocks, blocks_of(ALL, (0, 2, 1, 3))),
        "runs blocks.1, which zero3 has freed, after blocks.2; the ranks have agreed to go on to blocks.3",
    ),
    "seen in backward alone": (
        LoopCase(Blocks, blocks_of(ALL, (3, 1, 2)), unused=True),
        "run in another order than in the",
    ),
    "a checkpoint around all": (
        LoopCase(Blocks, around_all),
        "backward calls the module again, as an activation checkpoint",
    ),
    "vmap": (
        LoopCase(Blocks, lambda run, batch: squared_error(torch.func.vmap(run), batch)),
        "a transform of torch.func (vmap, grad, ...) calls the module",
    ),
    "backward for inputs first": (LoopCase(Blocks, inputs_first), "a backward pass for inputs alone came first"),
    "weights read outside": (
        LoopCase(Blocks, products),
        "was read outside of the module that holds it, where it is NaN",
    ),
    "a block trains by itself": (LoopCase(Blocks, block_trains_by_itself), "a block was called by itself"),
    "a graph from before the step": (
        LoopCase(Blocks, keeps.loss, between=keeps.between),
        "has been modified by an inplace operation",
    ),
}


@each_row("name", REFUSED)
def test_refused_on_every_rank(ranks: RankPool, name):
    for choice in ("zero1", "zero2", "zero3") if name == "a graph from before the step" else ("zero3",):
        for outcome in ranks.run(2, trained, name, choice):
            assert isinstance(outcome, str) and REFUSED[name][1] in outcome, f"{choice}: {outcome}"

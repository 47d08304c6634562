"""The traps that hand-written data parallelism falls into, for every registered choice that each can concern."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.strategy.communication.agreement import NonFiniteError
from ddp_lab.strategy.interface import Strategy
from ddp_lab.strategy.options import StrategyOptions
from tests.models import BRANCHES, build, make_batch
from tests.parity import (
    IN_OWN_LOOPS,
    OPTIMIZERS,
    REFUSALS,
    Choice,
    all_choices,
    assert_close,
    build_and_step,
    check_messages,
    check_parity,
    for_each_choice,
    load,
    message_of,
    naming,
    one_step,
    options_of,
    train_on_rank,
)
from tests.ranks import RankPool
from tests.tables import each_row

BUCKETS = ("ddp", "bucket_ddp_async")
Trap = Callable[[RankPool, Choice], None]
TRAPS: list[tuple[str, Trap, list[Choice]]] = []


def trap(function: Trap, choices: Sequence[Choice] = tuple(all_choices())) -> Trap:
    """One that each of `choices` must not fall into."""
    TRAPS.append((function.__name__, function, list(choices)))
    return function


trap_of_own_loops = partial(trap, choices=IN_OWN_LOOPS)


@for_each_choice
def test_no_trap_is_fallen_into(ranks: RankPool, choice: Choice) -> None:
    """A failure says in which ones."""
    mine = [(name, function) for name, function, choices in TRAPS if choice in choices]
    each_row("name, trap", mine)(lambda name, trap: trap(ranks, choice))()  # type: ignore[misc]


def make(choice: Choice, module: nn.Module, optimizer: str = "sgd") -> Strategy:
    return load(choice)(module, OPTIMIZERS[optimizer], options_of(choice))


# What is trained -----------------------------------------------------------------------------------------------------


@trap
def unused_parameters(ranks: RankPool, choice: Choice) -> None:
    """Also where ranks use different ones, and buckets wait for gradients that never come (TRAPS 1, 2)."""
    for signs, cap_mb in zip(list(BRANCHES)[1:], (25.0, 0.00005, 0.00005), strict=True):
        options = {"bucket_cap_mb": cap_mb, "find_unused_parameters": True}  # PyTorch DDP must be told to search
        for result in check_parity(ranks, choice, signs, [[[2, 2], [2, 2]]] * 3, "adam", options):
            assert not {"spare.weight", "spare.bias"} & result["gradients"].keys()


@partial(trap, choices=[choice for choice in all_choices() if choice[1] not in ("pytorch_zero2", "pytorch_zero3")])
def buckets_of_one_parameter(ranks: RankPool, choice: Choice) -> None:
    """That has a gradient in one micro-batch and none in another, on one rank or on all. FSDP2 must run all units."""
    options = {"bucket_cap_mb": 1e-6, "find_unused_parameters": True}
    for optimizer in ("adam", "sgd"):
        check_parity(ranks, choice, "branching, in turns", [[[1, 1], [1]], [[1], [1]]] * 3, optimizer, options)


@trap
def gradients_in_one_memory(ranks: RankPool, choice: Choice) -> None:
    """What is reduced in the place of one must not change the other."""
    check_parity(ranks, choice, "handed", [[[2], [2]]] * 2, options={"bucket_cap_mb": 0.00001})


UNEVEN = {
    "last window is shorter, and other numbers of samples": [[[2, 2], [2, 2]], [[2], [2]], [[3, 1], [2, 4]]],
    "other numbers of micro-batches, or none, or empty ones": [
        [[2, 2, 2], [1]],
        [[1], []],
        [[], [1, 2]],
        [[2, 0, 1], [0, 2]],
    ],
}


@trap
def uneven_splits(ranks: RankPool, choice: Choice) -> None:
    """The gradient is the mean over all samples, however they are split (TRAPS 4, 5, 6)."""
    for what, steps in UNEVEN.items():
        with naming(what):
            check_parity(ranks, choice, "plain", steps)


@trap
def gradient_clipping(ranks: RankPool, choice: Choice) -> None:
    """With the norm over the whole model, and equal norms on all ranks (TRAPS 9)."""
    results = check_parity(ranks, choice, "tied", [[[2, 2], [2, 2]], [[1], [2, 1]]], clip=0.05)
    assert min(results[0]["norm"]) > 0.05, "nothing was clipped, so nothing was tested"
    assert results[0]["norm"] == results[1]["norm"]


@trap
def zero_grad_either_way(ranks: RankPool, choice: Choice) -> None:
    """Bucket views stay valid whether gradients are dropped or filled with zeros (TRAPS 18)."""
    dropped, filled = (
        ranks.run(2, partial(train_on_rank, set_to_none=flag), choice, "plain", [[[2], [2]]] * 3)[0]["state"]
        for flag in (True, False)
    )
    assert all(torch.equal(dropped[name], filled[name]) for name in dropped)


def bucket_storage(cap_mb: float) -> tuple[bool, int]:
    """Whether gradients lie in buckets, and the bytes that are left of them between steps."""
    strategy = load(BUCKETS)(build("plain"), OPTIMIZERS["sgd"], StrategyOptions(bucket_cap_mb=cap_mb))
    one_step(strategy, [make_batch("plain", 2, 0)] * 2)
    flats = [t.untyped_storage().data_ptr() for t in strategy.gradient_tensors()]
    owned = all(p.grad.untyped_storage().data_ptr() in flats for p in strategy.trainable.values())
    strategy.zero_grad()
    return owned, strategy.memory_breakdown()["gradients"]


@each_row("cap_mb", [25.0, 0.00001])
def test_gradients_are_views_into_buckets_that_end_with_them(ranks: RankPool, cap_mb: float) -> None:
    assert ranks.run(2, bucket_storage, cap_mb) == [(True, 0)] * 2


def leave_no_sync(choice: Choice) -> tuple[bool, ...]:
    strategy = make(choice, build("plain"))
    seen = [strategy.steps.reduces_now]
    for context in (strategy.no_sync(), nullcontext()):
        with pytest.raises(RuntimeError, match="planted"), context, strategy.micro_batch():
            seen.append(strategy.steps.reduces_now)
            raise RuntimeError("planted")
        seen.append(strategy.steps.reduces_now)
    return tuple(seen)


@trap_of_own_loops
def no_sync_restores_after_an_exception(ranks: RankPool, choice: Choice) -> None:
    at_every_micro_batch = {"simple_ddp", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"}
    at_every_micro_batch |= {"deepspeed_zero2", "deepspeed_zero3"}
    assert ranks.run(2, leave_no_sync, choice) == [(False, choice[1] in at_every_micro_batch, False, True, False)] * 2


# Failures that must be seen ------------------------------------------------------------------------------------------


def meet_nonfinite(choice: Choice, where: str, bad_rank: int, bad_micro_batch: int) -> tuple[str, bool]:
    """The error on the second step, and whether parameters stayed as they were."""
    module = build("plain")
    strategy = make(choice, module)
    step = [make_batch("plain", 2, dist.get_rank() * 10 + index) for index in range(2)]
    one_step(strategy, step)
    before = strategy.full_state_dict()
    strategy.zero_grad()
    if dist.get_rank() == bad_rank:
        if where == "the loss":
            step[bad_micro_batch]["y"][0] = float("inf")
        else:
            marked = step[bad_micro_batch]["x"]
            seen: list[bool] = []
            module.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["x"] is marked), with_kwargs=True)

            def poison(part: nn.Module, arguments: Any, output: torch.Tensor) -> None:
                output.register_hook(lambda gradient: gradient * float("nan") if seen[-1] else gradient)

            module.net[2].register_forward_hook(poison)
    message = message_of(NonFiniteError, strategy.forward_backward, step)
    return message, all(torch.equal(before[name], tensor) for name, tensor in strategy.full_state_dict().items())


@trap
def nonfinite(ranks: RankPool, choice: Choice) -> None:
    """Every rank stops before the optimizer step; the error names the rank and the step (TRAPS 10)."""
    for what, bad_rank, bad_micro_batch in (("the loss", 0, 1), ("a gradient", 1, 0)):
        for message, unchanged in ranks.run(2, meet_nonfinite, choice, what, bad_rank, bad_micro_batch):
            assert f"step 1: {what} is not finite on rank {bad_rank};" in message
            named = "sample 2 of rank 0 in this step, from 0, holds NaN or infinity"
            assert (named in message) == (what == "the loss") == ("lower --lr" not in message), message
            assert unchanged


def fail_and_go_on(choice: Choice, where: str) -> tuple[list[Any], list[Any]]:
    """(state, an evaluation's loss, memory) before and after a step that fails; and after one more step, with and
    without the failed one before it."""

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    def hold(strategy: Strategy) -> Any:
        with torch.no_grad():
            loss = strategy(**make_batch("deep", 4, 3)).loss.item()
        return strategy.full_state_dict(), loss, strategy.memory_breakdown()

    steps = [[make_batch("deep", 2, 10 * step + dist.get_rank() + index) for index in range(2)] for step in range(2)]
    around, ends = [], []
    for fails in (True, False):
        module = build("deep")
        strategy = make(choice, module, "adam")
        one_step(strategy, steps[0])
        if fails:
            around.append(hold(strategy))
            handle = module.blocks[2].register_forward_hook(
                fail if where == "forward" else lambda part, arguments, output: output.register_hook(fail) and None
            )
            with pytest.raises(RuntimeError, match="planted"):
                one_step(strategy, steps[1])
            handle.remove()
            around.append(hold(strategy))
        one_step(strategy, steps[1])
        ends.append(hold(strategy))
    return around, ends


def assert_equal(one: Any, other: Any) -> None:
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0]) and one[1] == other[1]


@trap
def a_failed_step_leaves_what_can_go_on(ranks: RankPool, choice: Choice) -> None:
    """Evaluated, saved, and trained further as if the failed step had not been."""
    for where in ("forward", "backward"):
        for (before, after), (with_failure, without) in ranks.run(2, fail_and_go_on, choice, where):
            assert_equal(before, after)
            assert_equal(with_failure, without)
            assert with_failure[2] == without[2], f"memory, {where}"


def refusals(choice: Choice) -> dict[str, str]:
    """What this rank says, by what it must say in it."""
    is_first, strategy = dist.get_rank() == 0, make(choice, build("plain"))
    sparse = nn.ModuleDict({"embedding": nn.Embedding(4, 2, sparse=True)})
    renormed = nn.ModuleDict({"embedding": nn.Embedding(4, 2, max_norm=1.0)})
    batches, state = [make_batch("plain", 2, 0)], {"nothing": torch.zeros(1)}
    return {
        "no samples on ranks [1]": message_of(ValueError, strategy.forward_backward, batches if is_first else []),
        "nothing": message_of(ValueError, strategy.load_full_state_dict, state if is_first else {}),
        "between rank 0 and rank 1": message_of(UnsupportedError, make, choice, build("plain" if is_first else "tied")),
        "embedding embedding has sparse gradients": message_of(ValueError, make, choice, sparse),
        "embedding embedding has max_norm": message_of(ValueError, make, choice, renormed),
        "weight has no shape yet": message_of(ValueError, make, choice, nn.LazyLinear(1)),
        "weight is complex": message_of(ValueError, make, choice, nn.Linear(2, 1, dtype=torch.complex64)),
        "no trainable parameter": message_of(ValueError, make, choice, nn.ReLU()),
    }


@trap
def mistakes_are_refused_on_every_rank(ranks: RankPool, choice: Choice) -> None:
    """A first step without samples on a rank, a state or modules that differ, and what cannot be trained."""
    check_messages(ranks, 2, refusals, choice)


def test_pytorch_ddp_says_what_to_do_about_unused_parameters(ranks: RankPool) -> None:
    choice, options = ("ddp", "pytorch_ddp"), StrategyOptions()
    for message in ranks.run(2, message_of, UnsupportedError, build_and_step, choice, "branching", options):
        assert "spare.weight" in message and "--find-unused-parameters" in message


def second_gradient(choice: Choice) -> None:
    """What is reduced during backward cannot take a second gradient, as another backward pass makes."""
    module = build("plain")
    strategy = make(choice, module)
    refusal = pytest.raises(OneRankError, match="received a second gradient in one micro-batch")
    with refusal if strategy.reduces_in_backward else nullcontext(), strategy.micro_batch():
        loss = strategy(**make_batch("plain", 2, 0)).loss
        loss.backward(retain_graph=True)
        loss.backward()


@trap_of_own_loops
def second_gradient_is_refused(ranks: RankPool, choice: Choice) -> None:
    ranks.run(2, second_gradient, choice)


class OneElement(nn.Module):
    """The loss is the mean of scale * x."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.scale * x).mean())


def gradient_of_one_element(choice: Choice) -> tuple[float, float]:
    strategy = make(choice, OneElement())
    loss = strategy.forward_backward([{"x": torch.full((2,), float(strategy.data_parallel_rank))}])
    return loss.item(), strategy.full_gradients()["scale"].item()


@each_row("name", ddp.CHOICES)
def test_fewer_elements_than_ranks(ranks: RankPool, name: str) -> None:
    """Some ranks have no share of the gradients to look at (TRAPS 14). x is 0, 1 and 2 on the three ranks."""
    assert ranks.run(3, gradient_of_one_element, ("ddp", name)) == [(1.0, 1.0)] * 3


# Buffers and state ---------------------------------------------------------------------------------------------------


@trap
def buffers_follow_rank_0_as_in_pytorch_ddp(ranks: RankPool, choice: Choice) -> None:
    """Broadcast at the start, each rank's own within a step, rank 0's again before the next (TRAPS 11, 12)."""
    results, expected = (
        ranks.run(2, train_on_rank, either, "normed", [[[4, 4], [4, 4]]] * 3)
        for either in (choice, ("ddp", "pytorch_ddp"))
    )
    assert_close(results[0]["state"], expected[0]["state"], 1e-5, "state")
    means, wanted = ([each["own_state"]["norm.running_mean"] for each in of] for of in (results, expected))
    assert torch.allclose(means[0], wanted[0], rtol=1e-6) and torch.allclose(means[1], wanted[1], rtol=1e-6)
    assert not torch.equal(*means)


def buffers_after_load(choice: Choice) -> bool:
    """Whether this rank has rank 0's statistics as soon as they are loaded, whatever they were before."""
    rank, module = dist.get_rank(), build("normed", seed=dist.get_rank())
    strategy = make(choice, module)
    wanted = module.norm.running_mean + 1
    state = strategy.full_state_dict()
    module.norm.running_mean.fill_(rank)
    strategy.load_full_state_dict(state | {"norm.running_mean": wanted.clone()} if rank == 0 else {})
    return torch.equal(module.norm.running_mean, wanted)


@trap_of_own_loops
def loaded_buffers_are_on_every_rank(ranks: RankPool, choice: Choice) -> None:
    assert all(ranks.run(2, buffers_after_load, choice))


@trap
def full_state_continues_elsewhere(ranks: RankPool, choice: Choice) -> None:
    """Into another choice and another world size, as if nothing had happened (TRAPS 19)."""
    for model in ("tied", "odd"):
        choices = [other for other in all_choices() if (other[1], model) not in REFUSALS]
        if choice not in choices:
            continue
        other = choices[(choices.index(choice) + 1) % len(choices)]
        first = ranks.run(2, train_on_rank, choice, model, [[[2, 2], [2, 2]], [[4], [4]]])
        assert first[1]["state"] == {}
        assert first[0]["state"].keys() == build(model).state_dict().keys()
        steps = [[[2], [2, 2], [2]], [[1], [1], [1]]]
        check_parity(ranks, other, model, steps, state=first[0]["state"], first_step=2)

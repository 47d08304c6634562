"""What a data-parallel choice gets wrong without a word, and what it must say. Parity itself is `test_parity.py`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddp
from ddp_lab.runtime.errors import NonFiniteError, OneRankError, UnsupportedError
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.strategy import Strategy
from tests.models import build, make_batch
from tests.parity import (
    FAMILIES,
    IN_OWN_LOOPS,
    NAMES,
    REFUSALS,
    Case,
    assert_close,
    build_and_step,
    built,
    check,
    check_messages,
    message_of,
    one_step,
    trained,
)
from tests.ranks import RankPool
from tests.tables import by_default, each_row
from tests.traffic import counted

Trap = Callable[[RankPool, str], None]
TRAPS: list[tuple[str, Trap, Sequence[str]]] = []


def trap(function: Trap, choices: Sequence[str] = NAMES) -> Trap:
    """Registers a trap, into which none of `choices` may fall."""
    TRAPS.append((function.__name__, function, choices))
    return function


trap_of_own_loops = partial(trap, choices=IN_OWN_LOOPS)


@pytest.mark.parametrize("choice", by_default(NAMES, *FAMILIES))
def test_no_trap_is_fallen_into(ranks: RankPool, choice):
    """A failure names the traps."""
    traps = [(name, function) for name, function, choices in TRAPS if choice in choices]
    each_row("name, trap", traps)(lambda name, trap: trap(ranks, choice))()  # type: ignore[misc]


def steps_told(tells: tuple[bool, bool], wrongly: bool = False) -> tuple[list[float], list[int]]:
    """Losses of three uneven steps, and the all-gathers in each. `tells`: whether each rank passes `following`."""
    rank, strategy = dist.get_rank(), built("simple_ddp")
    steps = [StepData(0, [make_batch("plain", 1 + rank + index, index)] * (1 + rank)) for index in range(3)]
    losses, calls = [], []
    for index, step in enumerate(steps):
        following = steps[min(index + (0 if wrongly else 1), 2)] if tells[rank] else None
        with counted() as issued:
            losses.append(strategy.forward_backward(step.micro_batches, following=following).item())
        calls.append(issued["all_gather", 2][0])
        strategy.step()
        strategy.zero_grad()
    return losses, calls


def test_ranks_ask_what_a_step_holds_where_one_has_not_told(ranks: RankPool):
    answers = {tells: ranks.run(2, steps_told, tells) for tells in [(False, False), (True, False), (True, True)]}
    assert len({tuple(results[0][0]) for results in answers.values()}) == 1
    calls = {tells: results[1][1] for tells, results in answers.items()}
    assert calls == {(False, False): [2, 2, 2], (True, False): [2, 2, 2], (True, True): [2, 1, 1]}


def test_a_step_that_is_not_the_one_that_was_told_is_refused(ranks: RankPool):
    messages = ranks.run(2, message_of, OneRankError, steps_told, (True, True), True)
    assert all("pass as following= what the next call is given" in message for message in messages)


def bucket_storage(cap_mb: float) -> tuple[bool, int]:
    """Whether gradients are views into buckets, and the bytes of gradients after `zero_grad`."""
    strategy = built("bucket_ddp_async", bucket_cap_mb=cap_mb)
    one_step(strategy, [make_batch("plain", 2, 0)] * 2)
    flats = [t.untyped_storage().data_ptr() for t in strategy.gradient_tensors()]
    owned = all(p.grad.untyped_storage().data_ptr() in flats for p in strategy.trainable.values() if p.grad is not None)
    strategy.zero_grad()
    return owned, strategy.memory_breakdown()["gradients"]


@each_row("cap_mb", [25.0, 0.00001])
def test_gradients_are_views_into_buckets_that_end_with_them(ranks: RankPool, cap_mb):
    assert ranks.run(2, bucket_storage, cap_mb) == [(True, 0)] * 2


def leave_no_sync(choice: str) -> tuple[bool, ...]:
    strategy = built(choice)
    reduces = [strategy.steps.reduces_now]
    for context in (strategy.no_sync(), nullcontext()):
        with pytest.raises(RuntimeError, match="planted"), context, strategy.micro_batch():
            reduces.append(strategy.steps.reduces_now)
            raise RuntimeError("planted")
        reduces.append(strategy.steps.reduces_now)
    return tuple(reduces)


@trap_of_own_loops
def no_sync_restores_after_an_exception(ranks: RankPool, choice: str):
    at_every_micro_batch = {"simple_ddp", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"}
    assert ranks.run(2, leave_no_sync, choice) == [(False, choice in at_every_micro_batch, False, True, False)] * 2


# Failures that must be seen ------------------------------------------------------------------------------------------


def poison(module: nn.Module, batch: dict[str, torch.Tensor]):
    """The gradient of the middle layer is NaN, where the module runs on `batch`."""
    is_target: list[bool] = []
    module.register_forward_pre_hook(lambda m, a, kwargs: is_target.append(kwargs["x"] is batch["x"]), with_kwargs=True)

    def hook(part: nn.Module, arguments, output: torch.Tensor):
        output.register_hook(lambda gradient: gradient * float("nan") if is_target[-1] else gradient)

    module.get_submodule("net.2").register_forward_hook(hook)


def meet_nonfinite(choice: str, where: str, bad_rank: int, bad_micro_batch: int) -> tuple[str, bool]:
    """The error on the second step, and whether parameters stayed as they were."""
    strategy = built(choice)
    step = [make_batch("plain", 2, dist.get_rank() * 10 + index) for index in range(2)]
    one_step(strategy, step)
    before = strategy.full_state_dict()
    strategy.zero_grad()
    if dist.get_rank() == bad_rank:
        if where == "the loss":
            step[bad_micro_batch]["y"][0] = float("inf")
        else:
            poison(strategy.module, step[bad_micro_batch])
    message = message_of(NonFiniteError, strategy.forward_backward, step)
    return message, all(torch.equal(before[name], tensor) for name, tensor in strategy.full_state_dict().items())


@trap
def nonfinite(ranks: RankPool, choice: str):
    """Every rank stops before the optimizer step; the error names the rank and the step (TRAPS 10)."""
    for cause, bad_rank, bad_micro_batch in (("the loss", 0, 1), ("a gradient", 1, 0)):
        for message, unchanged in ranks.run(2, meet_nonfinite, choice, cause, bad_rank, bad_micro_batch):
            assert f"step 1: {cause} is not finite on rank {bad_rank};" in message
            named_sample = "sample 2 of rank 0 in this step, from 0, holds NaN or infinity"
            assert (named_sample in message) == (cause == "the loss") == ("lower --lr" not in message), message
            assert unchanged


def fail_and_go_on(choice: str, where: str):
    """A step that fails changes neither state nor answers nor memory, and the next step is as without it."""

    def fail(*_):
        raise RuntimeError("planted")

    def hold(strategy: Strategy):
        with torch.no_grad():
            loss = strategy(**make_batch("deep", 4, 3)).loss.item()
        return strategy.full_state_dict(), loss, strategy.memory_breakdown()

    def is_same(first, second) -> bool:
        return all(torch.equal(first[0][name], second[0][name]) for name in first[0]) and first[1] == second[1]

    steps = [[make_batch("deep", 2, 10 * step + dist.get_rank() + index) for index in range(2)] for step in range(2)]
    ends = []
    for fails in (True, False):
        strategy = built(choice, "deep", "adam")
        one_step(strategy, steps[0])
        if fails:
            before = hold(strategy)
            handle = strategy.module.get_submodule("blocks.2").register_forward_hook(
                fail if where == "forward" else lambda part, arguments, output: output.register_hook(fail) and None
            )
            with pytest.raises(RuntimeError, match="planted"):
                one_step(strategy, steps[1])
            handle.remove()
            assert is_same(before, hold(strategy)), where
        one_step(strategy, steps[1])
        ends.append(hold(strategy))
    assert is_same(*ends) and ends[0][2] == ends[1][2], where


@trap
def a_failed_step_leaves_what_can_go_on(ranks: RankPool, choice: str):
    for where in ("forward", "backward"):
        ranks.run(2, fail_and_go_on, choice, where)


def refusals(choice: str) -> dict[str, str]:
    """This rank's messages by what they must contain."""
    is_first, strategy, make = dist.get_rank() == 0, built(choice), partial(built, choice)
    sparse = nn.ModuleDict({"embedding": nn.Embedding(4, 2, sparse=True)})
    renormed = nn.ModuleDict({"embedding": nn.Embedding(4, 2, max_norm=1.0)})
    batches, state = [make_batch("plain", 2, 0)], {"nothing": torch.zeros(1)}
    return {
        "no samples on ranks [1]": message_of(ValueError, strategy.forward_backward, batches if is_first else []),
        "nothing": message_of(ValueError, strategy.load_full_state_dict, state if is_first else {}),
        "between rank 0 and rank 1": message_of(UnsupportedError, make, "plain" if is_first else "tied"),
        "embedding embedding has sparse gradients": message_of(ValueError, make, sparse),
        "embedding embedding has max_norm": message_of(ValueError, make, renormed),
        "weight has no shape yet": message_of(ValueError, make, nn.LazyLinear(1)),
        "weight is complex": message_of(ValueError, make, nn.Linear(2, 1, dtype=torch.complex64)),
        "no trainable parameter": message_of(ValueError, make, nn.ReLU()),
    }


@trap
def mistakes_are_refused_on_every_rank(ranks: RankPool, choice: str):
    """A first step without samples on a rank, a state or modules that differ, and what cannot be trained."""
    check_messages(ranks, 2, refusals, choice)


def test_pytorch_ddp_says_what_to_do_about_unused_parameters(ranks: RankPool):
    for message in ranks.run(2, message_of, UnsupportedError, build_and_step, Case("pytorch_ddp", "branching")):
        assert "spare.weight" in message and "--find-unused-parameters" in message


def second_gradient(choice: str):
    """A choice that reduces during backward refuses a second gradient, which a second backward pass makes."""
    strategy = built(choice)
    refusal = pytest.raises(OneRankError, match="received a second gradient in one micro-batch")
    with refusal if strategy.reduces_in_backward else nullcontext(), strategy.micro_batch():
        loss = strategy(**make_batch("plain", 2, 0)).loss
        loss.backward(retain_graph=True)
        loss.backward()


@trap_of_own_loops
def second_gradient_is_refused(ranks: RankPool, choice: str):
    ranks.run(2, second_gradient, choice)


class OneElement(nn.Module):
    """The loss is the mean of scale * x."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=(self.scale * x).mean())


def gradient_of_one_element(choice: str) -> tuple[float, float]:
    strategy = built(choice, OneElement())
    loss = strategy.forward_backward([{"x": torch.full((2,), float(strategy.data_parallel_rank))}])
    return loss.item(), strategy.full_gradients()["scale"].item()


@each_row("name", ddp.CHOICES)
def test_fewer_elements_than_ranks(ranks: RankPool, name):
    """Some ranks have no shard of the gradients (TRAPS 14). x is 0, 1 and 2 on the three ranks."""
    assert ranks.run(3, gradient_of_one_element, name) == [(1.0, 1.0)] * 3


# Buffers and state ---------------------------------------------------------------------------------------------------


@trap
def buffers_follow_rank_0_as_in_pytorch_ddp(ranks: RankPool, choice: str):
    """Buffers are broadcast at the start and before each step; within a step each rank has its own (TRAPS 11, 12)."""
    results, expected = (
        ranks.run(2, trained, Case(name, "normed", split=[[[4, 4], [4, 4]]] * 3)) for name in (choice, "pytorch_ddp")
    )
    assert_close(results[0]["state"], expected[0]["state"], 1e-5, "state")
    name = "norm.running_mean"
    means, right = ([of_rank["own_state"][name] for of_rank in of_ranks] for of_ranks in (results, expected))
    assert torch.allclose(means[0], right[0], rtol=1e-6) and torch.allclose(means[1], right[1], rtol=1e-6)
    assert not torch.equal(*means)


def buffers_after_load(choice: str) -> bool:
    """Whether this rank has rank 0's statistics as soon as they are loaded, whatever they were before."""
    rank, module = dist.get_rank(), build("normed", seed=dist.get_rank())
    strategy, mean = built(choice, module), module.get_buffer("norm.running_mean")
    loaded = mean + 1
    state = strategy.full_state_dict()
    mean.fill_(rank)
    strategy.load_full_state_dict(state | {"norm.running_mean": loaded.clone()} if rank == 0 else {})
    return torch.equal(mean, loaded)


@trap_of_own_loops
def loaded_buffers_are_on_every_rank(ranks: RankPool, choice: str):
    assert all(ranks.run(2, buffers_after_load, choice))


@trap
def full_state_continues_elsewhere(ranks: RankPool, choice: str):
    """Training goes on with another choice and another world size as without a change (TRAPS 19)."""
    models = ("tied", "odd")
    for model in (models[FAMILIES.index(choice) % 2],) if choice in FAMILIES else models:
        candidates = [candidate for candidate in NAMES if (candidate, model) not in REFUSALS]
        if choice in candidates:
            first, second = ranks.run(2, trained, Case(choice, model, split=[[[2, 2], [2, 2]], [[4], [4]]]))
            assert second["state"] == {} and first["state"].keys() == build(model).state_dict().keys()
            following = candidates[(candidates.index(choice) + 1) % len(candidates)]
            steps = [[[2], [2, 2], [2]], [[1], [1], [1]]]
            check(ranks, Case(following, model, "dp=3", split=steps, state=first["state"], first_step=2, counted=False))

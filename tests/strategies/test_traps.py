"""The traps that hand-written data parallelism falls into, for every registered choice that each can concern."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.models import build, make_batch
from tests.parity import (
    OPTIMIZERS,
    REFUSALS,
    TOLERANCE,
    all_choices,
    assert_close,
    assert_parity,
    is_refused,
    load,
    options_of,
    oracle,
    train_on_rank,
)
from tests.ranks import RankPool
from training.communication.agreement import NonFiniteError
from training.errors import UnsupportedError
from training.strategy import Strategy

for_each_choice = pytest.mark.parametrize("choice", all_choices(), ids="-".join)
Choice = tuple[str, str]
SEARCHING = {"find_unused_parameters": True}  # what PyTorch DDP needs to be told; the others ignore it


def make(choice: Choice, module: nn.Module, optimizer: str = "sgd", **options: Any) -> Strategy:
    return load(choice)(module, OPTIMIZERS[optimizer], options_of(choice, **options))


# Unused parameters ---------------------------------------------------------------------------------------------------


def use_branches(choice: Choice, signs: list[int], caps: list[float]) -> list[dict[str, Any]]:
    """Three steps of `branching` in which rank r sees samples whose first feature has sign `signs[r]`."""
    results = []
    for cap in caps:
        torch.manual_seed(0)
        strategy = make(choice, build("branching"), "adam", bucket_cap_mb=cap, **SEARCHING)
        for step in range(3):
            strategy.zero_grad()
            strategy.forward_backward(signed_batches(signs, step)[dist.get_rank()])
            unused = strategy.trainable.keys() - strategy.full_gradients().keys()
            strategy.step()
        results.append({"state": strategy.full_state_dict(), "unused": unused})
    return results


def signed_batches(signs: list[int], step: int) -> list[list[dict[str, torch.Tensor]]]:
    batches = [
        [make_batch("branching", 2, 100 * step + 10 * rank + index) for index in range(2)] for rank in range(len(signs))
    ]
    for sign, of_rank in zip(signs, batches, strict=True):
        for micro in of_rank:
            micro["x"][:, 0] = micro["x"][:, 0].abs() * sign
    return batches


@for_each_choice
@pytest.mark.parametrize("signs", [[1, 1], [1, -1], [-1, 1]], ids=["same", "a-b", "b-a"])
def test_unused_parameters(ranks: RankPool, choice: Choice, signs: list[int]) -> None:
    """Also where ranks use different ones, and buckets wait for gradients that never come (TRAPS 1, 2)."""
    if is_refused(ranks, choice, "branching"):
        return
    module = build("branching")
    optimizer = OPTIMIZERS["adam"](list(module.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        flat = [micro for of_rank in signed_batches(signs, step) for micro in of_rank]
        module(**{key: torch.cat([micro[key] for micro in flat]) for key in flat[0]}).loss.backward()
        optimizer.step()
    never = {name for name, p in module.named_parameters() if p.grad is None}
    for answer in ranks.run(2, use_branches, choice, signs, [25.0, 0.00005])[0]:
        assert answer["unused"] == never >= {"spare.weight", "spare.bias"}
        assert_close(answer["state"], module.state_dict(), TOLERANCE["adam"], "parameter")


# Uneven splits -------------------------------------------------------------------------------------------------------

UNEVEN = {
    "last window is shorter": [[[2, 2], [2, 2]], [[2], [2]]],
    "ranks hold different numbers of samples": [[[3, 1], [2, 2]], [[1, 1], [3, 4]]],
    "ranks hold different numbers of micro-batches": [[[2, 2, 2], [1]], [[1], [2, 2]]],
    "a rank holds nothing": [[[2, 2], [2, 2]], [[1], []], [[], [1, 2]]],
    "empty micro-batches": [[[2, 0, 1], [0, 2]]],
}


@for_each_choice
def test_uneven_splits(ranks: RankPool, choice: Choice) -> None:
    """The gradient is the mean over all samples, however they are split (TRAPS 4, 5, 6)."""
    for name, steps in UNEVEN.items():
        results = ranks.run(2, train_on_rank, choice, "plain", steps, "sgd")
        try:
            assert_parity(results, oracle("plain", steps, "sgd"), TOLERANCE["sgd"])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def start_without_samples(choice: Choice) -> str:
    strategy = make(choice, build("plain"))
    with pytest.raises(ValueError, match="no samples on ranks") as caught:
        strategy.forward_backward([make_batch("plain", 2, 0)] if dist.get_rank() == 0 else [])
    return str(caught.value)


@for_each_choice
def test_first_step_without_samples_is_refused_on_every_rank(ranks: RankPool, choice: Choice) -> None:
    assert ["ranks [1]" in message for message in ranks.run(2, start_without_samples, choice)] == [True, True]


# Accumulation and clipping -------------------------------------------------------------------------------------------


def leave_no_sync(choice: Choice) -> tuple[bool, bool, bool]:
    strategy = make(choice, build("plain"))
    before = strategy.synchronizes_gradients
    with pytest.raises(RuntimeError, match="planted"), strategy.no_sync():
        inside = strategy.synchronizes_gradients
        raise RuntimeError("planted")
    return before, inside, strategy.synchronizes_gradients


@for_each_choice
def test_no_sync_restores_after_an_exception(ranks: RankPool, choice: Choice) -> None:
    at_every_micro_batch = {"simple_ddp", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"}
    at_every_micro_batch |= {"deepspeed_zero2", "deepspeed_zero3"}
    inside_expected = choice[1] in at_every_micro_batch
    assert ranks.run(2, leave_no_sync, choice) == [(True, inside_expected, True)] * 2


@for_each_choice
def test_gradient_clipping(ranks: RankPool, choice: Choice) -> None:
    """With the norm over the whole model, and equal norms on all ranks (TRAPS 9)."""
    steps = [[[2, 2], [2, 2]], [[1], [2, 1]]]
    for model in ("plain", "tied", "frozen"):
        results = ranks.run(2, train_on_rank, choice, model, steps, "sgd", 0.05)
        assert min(results[0]["norm"]) > 0.05, "nothing was clipped, so nothing was tested"
        assert results[0]["norm"] == results[1]["norm"]
        assert_parity(results, oracle(model, steps, "sgd", clip=0.05), TOLERANCE["sgd"])


def keep_gradients(choice: Choice, set_to_none: bool) -> dict[str, Any]:
    strategy = make(choice, build("plain"))
    for step in range(3):
        strategy.zero_grad(set_to_none=set_to_none)
        strategy.forward_backward([make_batch("plain", 2, 10 * step + dist.get_rank())])
        strategy.step()
    return strategy.full_state_dict()


@for_each_choice
def test_zero_grad_either_way(ranks: RankPool, choice: Choice) -> None:
    """Bucket views stay valid whether gradients are dropped or filled with zeros (TRAPS 18)."""
    dropped, filled = (ranks.run(2, keep_gradients, choice, flag)[0] for flag in (True, False))
    assert all(torch.equal(dropped[name], filled[name]) for name in dropped)


def bucket_storage() -> bool:
    strategy = make(("ddp", "bucket_ddp_async"), build("plain"))
    places = []
    for step in range(2):
        strategy.zero_grad()
        strategy.forward_backward([make_batch("plain", 2, step)] * 2)
        strategy.step()
        places.append([p.grad.data_ptr() for p in strategy.trainable.values()])
    flats = [t.untyped_storage().data_ptr() for t in strategy.gradient_tensors()]
    owned = all(p.grad.untyped_storage().data_ptr() in flats for p in strategy.trainable.values())
    return places[0] == places[1] and owned


def test_bucket_gradients_are_views_into_persistent_buffers(ranks: RankPool) -> None:
    assert ranks.run(2, bucket_storage) == [True, True]


# Failures that must be seen ------------------------------------------------------------------------------------------


def meet_nonfinite(choice: Choice, where: str, bad_rank: int, bad_micro_batch: int) -> tuple[str, bool]:
    """The error on the second step, and whether parameters stayed as they were."""
    module = build("plain")
    strategy = make(choice, module)
    step = [make_batch("plain", 2, dist.get_rank() * 10 + index) for index in range(2)]
    strategy.zero_grad()
    strategy.forward_backward(step)
    strategy.step()
    before = strategy.full_state_dict()
    strategy.zero_grad()
    if dist.get_rank() == bad_rank:
        if where == "loss":
            step[bad_micro_batch]["y"][0] = float("inf")
        else:
            marked = step[bad_micro_batch]["x"]
            seen: list[bool] = []
            module.register_forward_pre_hook(lambda m, a, kwargs: seen.append(kwargs["x"] is marked), with_kwargs=True)

            def poison(part: nn.Module, arguments: Any, output: torch.Tensor) -> None:
                output.register_hook(lambda gradient: gradient * float("nan") if seen[-1] else gradient)

            module.net[2].register_forward_hook(poison)
    with pytest.raises(NonFiniteError) as caught:
        strategy.forward_backward(step)
    return str(caught.value), all(torch.equal(before[name], t) for name, t in strategy.full_state_dict().items())


@for_each_choice
@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("bad_micro_batch", [0, 1])
def test_nonfinite(ranks: RankPool, choice: Choice, bad_rank: int, bad_micro_batch: int) -> None:
    """Every rank stops before the optimizer step; the error names the rank and the step (TRAPS 10)."""
    for where, what in (("loss", "the loss"), ("gradient", "a gradient")):
        for message, unchanged in ranks.run(2, meet_nonfinite, choice, where, bad_rank, bad_micro_batch):
            assert f"step 1: {what} is not finite on rank {bad_rank};" in message
            assert unchanged


def fail_inside(choice: Choice, where: str) -> tuple[bool, float, float]:
    """Whether a failed step left the state as it was, and the evaluation's loss before and after it."""
    module = build("plain")
    strategy = make(choice, module)
    steps = [[make_batch("plain", 2, 10 * step + dist.get_rank() + index) for index in range(2)] for step in range(2)]
    strategy.forward_backward(steps[0])
    strategy.step()

    def evaluate() -> float:
        with torch.no_grad():
            return strategy.forward(make_batch("plain", 4, 3)).loss.item()

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    state, loss = strategy.full_state_dict(), evaluate()
    handle = module.net[2].register_forward_hook(
        fail if where == "forward" else lambda part, arguments, output: output.register_hook(fail) and None
    )
    with pytest.raises(RuntimeError, match="planted"):
        strategy.forward_backward(steps[1])
    handle.remove()
    after = strategy.full_state_dict()
    return all(torch.equal(after[name], tensor) for name, tensor in state.items()), loss, evaluate()


@for_each_choice
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_what_can_be_evaluated_and_saved(ranks: RankPool, choice: Choice, where: str) -> None:
    for unchanged, before, after in ranks.run(2, fail_inside, choice, where):
        assert unchanged and before == after


def differing_modules(choice: Choice) -> str:
    with pytest.raises(UnsupportedError) as caught:
        make(choice, build("plain") if dist.get_rank() == 0 else build("tied"))
    return str(caught.value)


@for_each_choice
def test_modules_that_differ_between_ranks_are_refused(ranks: RankPool, choice: Choice) -> None:
    for message in ranks.run(2, differing_modules, choice):
        assert "between rank 0 and rank 1" in message


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


def refuse(choice: Choice) -> list[str]:
    messages = []
    for module in (Sparse(), Complex(), nn.ReLU()):
        with pytest.raises(ValueError) as caught:
            make(choice, module)
        messages.append(str(caught.value))
    return messages


@for_each_choice
def test_what_is_not_supported_is_refused_when_built(ranks: RankPool, choice: Choice) -> None:
    sparse, complex_, empty = ranks.run(2, refuse, choice)[0]
    assert "embedding table has sparse gradients" in sparse and "weight is complex" in complex_
    assert "no trainable parameter" in empty


def unused_without_search() -> str:
    strategy = make(("ddp", "pytorch_ddp"), build("branching"))
    with pytest.raises(UnsupportedError) as caught:
        strategy.forward_backward(signed_batches([1, 1], 0)[dist.get_rank()])
    return str(caught.value)


def test_pytorch_ddp_says_what_to_do_about_unused_parameters(ranks: RankPool) -> None:
    assert (
        "spare.weight" in (message := ranks.run(2, unused_without_search)[0]) and "--find-unused-parameters" in message
    )


def second_gradient(choice: Choice) -> str:
    """A hook that reduces at once cannot take a second gradient of one backward, as re-entrant checkpoints make."""
    module = build("plain")
    strategy = make(choice, module)
    loss = module(**make_batch("plain", 2, 0)).loss
    strategy.before_step()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second gradient") as caught:
        loss.backward()
    strategy.finish_gradient_synchronization()
    return str(caught.value)


@pytest.mark.parametrize("name", ["simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async"])
def test_second_gradient_is_refused(ranks: RankPool, name: str) -> None:
    ranks.run(2, second_gradient, ("ddp", name))


# Buffers and state ---------------------------------------------------------------------------------------------------


def train_normed(choice: Choice) -> dict[str, Any]:
    module = build("normed", seed=dist.get_rank())
    module.norm.running_mean.fill_(float(dist.get_rank()))
    strategy = make(choice, module)
    start = module.norm.running_mean.clone()
    for step in range(3):
        strategy.zero_grad()
        strategy.forward_backward([make_batch("normed", 4, 100 * step + 10 * dist.get_rank() + i) for i in range(2)])
        strategy.step()
    return {"start": start, "state": strategy.full_state_dict(), "mean": module.norm.running_mean.clone()}


@for_each_choice
def test_buffers_follow_rank_0_as_in_pytorch_ddp(ranks: RankPool, choice: Choice) -> None:
    """Broadcast at the start, each rank's own within a step, rank 0's again before the next (TRAPS 11, 12)."""
    expected = ranks.run(2, train_normed, ("ddp", "pytorch_ddp"))
    results = ranks.run(2, train_normed, choice)
    for result, wanted in zip(results, expected, strict=True):
        assert result["start"].eq(0).all()
        assert torch.allclose(result["mean"], wanted["mean"], rtol=1e-6)
    assert_close(results[0]["state"], expected[0]["state"], 1e-5, "state")
    assert not torch.equal(results[0]["mean"], results[1]["mean"])


@for_each_choice
def test_full_state_continues_elsewhere(ranks: RankPool, choice: Choice) -> None:
    """Into another choice and another world size, as if nothing had happened (TRAPS 19)."""
    for model in ("tied", "frozen", "odd") if choice[0] == "sharding" else ("tied", "odd"):
        if not is_refused(ranks, choice, model):
            continue_elsewhere(ranks, choice, model)


def continue_elsewhere(ranks: RankPool, choice: Choice, model: str) -> None:
    choices = [other for other in all_choices() if (other[1], model) not in REFUSALS]
    other = choices[(choices.index(choice) + 1) % len(choices)]
    steps = [[[2, 2], [2, 2]], [[4], [4]], [[3, 2], [3]], [[2], [1]]]
    first = ranks.run(2, train_on_rank, choice, model, steps[:2], "sgd")
    assert first[1]["state"] == {}
    assert first[0]["state"].keys() == build(model).state_dict().keys()
    resplit = [[*split, []] for split in steps[2:]]
    resplit[0] = [[2], [2, 2], [2]]
    resplit[1] = [[1], [1], [1]]
    second = ranks.run(3, train_on_rank, other, model, resplit, "sgd", None, False, None, first[0]["state"], 2)
    assert_parity(second, oracle(model, resplit, "sgd", state=first[0]["state"], first_step=2), TOLERANCE["sgd"])


def load_wrong_state(choice: Choice) -> str:
    strategy = make(choice, build("plain"))
    with pytest.raises(ValueError) as caught:
        strategy.load_full_state_dict({"nothing": torch.zeros(1)} if dist.get_rank() == 0 else {})
    return str(caught.value)


@for_each_choice
def test_a_wrong_state_is_refused_on_every_rank(ranks: RankPool, choice: Choice) -> None:
    assert all("nothing" in message for message in ranks.run(2, load_wrong_state, choice))

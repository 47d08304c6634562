"""Strategies in loops that are not the runner's: the user's own forward, loss, backward, clipping and schedule."""

import contextlib
import copy
import gc
import io
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.strategy import batches
from tests.parity import FAMILIES, Case, build_and_step, check_messages, load, message_of, options_of, over_own_loops
from tests.ranks import RankPool
from tests.strategies.cases.containers import NestedAnswer
from tests.tables import each_row

FEATURES, STEPS = 6, 3


class KeywordNet(nn.Module):
    """Takes a positional and a keyword argument, answers with a dataclass, knows no loss."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, *, scale: float) -> NestedAnswer:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + scale * block(hidden)
        return NestedAnswer(self.last(hidden), {"hidden": hidden})


def make_net() -> KeywordNet:
    torch.manual_seed(3)
    return KeywordNet()


def gan_data(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, FEATURES, generator=generator), torch.randn(3, 4, generator=generator)


def updates(choice: str) -> tuple[Tensor, Tensor]:
    """Parameters that a strategy has updated without seeing a forward pass, and those that the optimizer has."""
    plain, module = make_net(), make_net()
    alone = torch.optim.AdamW(plain.parameters(), weight_decay=0.1)
    parameters = nn.ParameterList(module.parameters())
    strategy = load(choice)(parameters, lambda p: torch.optim.AdamW(p, weight_decay=0.1), options_of(choice))
    for step in range(STEPS):
        x = gan_data(step, 0)[0]
        alone.zero_grad()
        plain(x, scale=0.5).prediction.square().mean().backward()
        alone.step()
        with strategy.micro_batch():
            module(x, scale=0.5).prediction.square().mean().backward()
        strategy.step()
        strategy.zero_grad()
    updated, expected = (nn.utils.parameters_to_vector(network.parameters()).detach() for network in (module, plain))
    return updated, expected


@each_row("name", ["zero1", "zero2"])
def test_a_list_of_parameters_is_updated_as_by_the_optimizer(ranks: RankPool, name):
    for updated, expected in ranks.run(2, updates, name):
        torch.testing.assert_close(updated, expected, rtol=1e-6, atol=1e-7)


def misuse(choice: str) -> dict[str, str]:
    module = make_net()
    module.first.requires_grad_(False)
    strategy = load(choice)(module, lambda p: torch.optim.SGD(p, lr=0.1), options_of(choice))
    messages = {}
    with strategy.micro_batch(last=False):
        strategy(torch.ones(2, FEATURES), scale=0.5).prediction.mean().backward()
    messages["step() before the last micro_batch()"] = message_of(RuntimeError, strategy.step)
    with pytest.raises(RuntimeError) as caught, strategy.micro_batch(), strategy.micro_batch():
        pass
    messages["the one before has not ended"] = str(caught.value)
    next(p for name, p in module.named_parameters() if name == "first.weight").requires_grad_(True)
    with pytest.raises(UnsupportedError) as refused, strategy.micro_batch():
        pass
    messages["first.weight was frozen when the strategy was built"] = str(refused.value)
    return messages


def wrong_optimizers(choice: str) -> dict[str, str]:
    module = make_net()
    optimizers: dict[str, Any] = {
        "over other parameters than it was given": lambda _: torch.optim.SGD(module.parameters(), lr=0.1),
        "make_optimizer is of type SGD; give a function": torch.optim.SGD(module.parameters(), lr=0.1),
    }
    make, options = load(choice), options_of(choice)
    cases = optimizers.items()
    return {expected: message_of(UnsupportedError, make, make_net(), wrong, options) for expected, wrong in cases}


TORCH_CALLS: list[Callable[[nn.Module], object]] = [
    lambda module: nn.utils.clip_grad_norm_(module.parameters(), 1.0),
    lambda module: nn.utils.clip_grad_value_(module.parameters(), 1.0),
    lambda module: nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]),
    lambda module: module.last.weight.grad.add_(1),  # type: ignore[operator, union-attr]
    lambda module: module.last.weight.grad.clone(),  # type: ignore[operator, union-attr]
]


def reads_gradients(choice: str, is_wrong: bool) -> dict[str, Tensor]:
    """Parameters after steps. If `is_wrong`, each step reads gradients before its update, and runs backward once more,
    as of another model's loss."""
    module = make_net()
    strategy = load(choice)(module, lambda p: torch.optim.SGD(p, lr=0.1), options_of(choice, bucket_cap_mb=0.0003))
    for step in range(STEPS):
        with strategy.micro_batch():
            strategy(gan_data(step, dist.get_rank())[0], scale=0.5).prediction.square().mean().backward()
        if is_wrong:
            for call in TORCH_CALLS:
                with pytest.raises(UnsupportedError, match="are in shards from the last"):
                    call(module)
            strategy(gan_data(7, 0)[0], scale=0.5).prediction.mean().backward()
            assert strategy.memory_breakdown()["gradients"] and "last.weight" in strategy.full_gradients()
        strategy.step()
        assert module.last.weight.grad is None
        strategy.zero_grad()
    return strategy.full_state_dict()


@each_row("name", ["zero1", "zero2", "zero3"])
def test_gradients_in_shards_are_not_read_in_silence(ranks: RankPool, name):
    state, expected = (ranks.run(2, reads_gradients, name, is_wrong)[0] for is_wrong in (True, False))
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key


@over_own_loops
def test_misuse_is_said(ranks: RankPool, choice):
    check_messages(ranks, 2, misuse, choice)
    check_messages(ranks, 2, wrong_optimizers, choice)


def set_by_hand(choice: str, by_hand: bool, micro_batches: int = 2) -> dict[str, Tensor]:
    """Parameters after steps, in buckets of one parameter. If `by_hand`, gradients of the last micro-batch are set from
    `torch.autograd.grad`, without a backward pass. The unused layer gets none."""
    module = make_net()
    module.spare = nn.Linear(2, 2)
    options = options_of(choice, bucket_cap_mb=1e-6, find_unused_parameters=True)
    strategy = load(choice)(module, lambda p: torch.optim.AdamW(p, lr=0.1), options)
    for step in range(STEPS):
        for index in range(micro_batches):
            with strategy.micro_batch(last=index == micro_batches - 1):
                loss = strategy(gan_data(step, dist.get_rank() + 10 * index)[0], scale=0.5).prediction.square().mean()
                if by_hand and index == micro_batches - 1:
                    named = list(zip(strategy.trainable.values(), strategy.trainable, strict=True))
                    targets = [p for p, name in named if "spare" not in name]
                    for p, gradient in zip(targets, torch.autograd.grad(loss, targets), strict=True):
                        p.grad = gradient + (0 if p.grad is None else p.grad)
                else:
                    loss.backward()
        strategy.step()
        strategy.zero_grad()
    return strategy.full_state_dict()


def in_ones_hands(choice: str) -> dict[str, str]:
    """Messages for what a loop may do to a module that a strategy holds, by what they must contain."""
    module = make_net()
    strategy = load(choice)(module, lambda p: torch.optim.SGD(p, lr=0.1), options_of(choice))
    x, messages = gan_data(0, 0)[0], {}
    with strategy.micro_batch():
        strategy(x, scale=0.5).prediction.mean().backward()
    strategy.step()
    strategy.zero_grad()
    calls: list[Callable[[], Any]] = [lambda: copy.deepcopy(module), lambda: AveragedModel(module).module]
    calls += [lambda: torch.load(saved(module), weights_only=False)]
    for call in calls if choice not in ("pytorch_zero2", "pytorch_zero3") else ():  # FSDP2 itself refuses copies
        if choice == "zero3":
            assert "call strategy.full_state_dict()" in message_of(UnsupportedError, call)
        else:
            assert torch.equal(call()(x, scale=0.5).prediction, module(x, scale=0.5).prediction)
    if choice == "zero3":
        messages["call strategy.full_state_dict()"] = message_of(UnsupportedError, module.state_dict)
        messages["another strategy keeps"] = message_of(UnsupportedError, build_over, module, choice)
    new = nn.Linear(8, 8)
    layer = nn.Linear(8, 1)
    messages["last has parameters that came into"] = message_of(UnsupportedError, setattr, module, "last", layer)
    messages["blocks.3 has"] = message_of(UnsupportedError, module.blocks.append, new)
    messages["first.weight has"] = message_of(UnsupportedError, setattr, module.first, "weight", new.weight)
    module.first, module.act = module.first, nn.Tanh()  # no new parameters
    return messages


def saved(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    return io.BytesIO(file.getvalue())


def build_over(module: nn.Module, choice: str):
    load(choice)(module, lambda p: torch.optim.SGD(p, lr=0.1), options_of(choice))


def refuses_given(choice: str) -> dict[str, str]:
    return {"was set in micro_batch()": message_of(OneRankError, set_by_hand, choice, True, 1)}


@each_row("choice", FAMILIES)
def test_what_a_loop_does_to_the_module(ranks: RankPool, choice):
    check_messages(ranks, 2, in_ones_hands, choice)
    if choice in ("pytorch_zero2", "pytorch_zero3"):  # their parameters are sharded after forward
        return
    if choice != "zero3" and not choice.startswith("pytorch"):
        state, expected = (ranks.run(2, set_by_hand, choice, by_hand)[0] for by_hand in (True, False))
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    else:
        check_messages(ranks, 2, refuses_given, choice)


def dropped(choice: str):
    strategy = build_and_step(Case(choice))
    references = [weakref.ref(strategy), *map(weakref.ref, strategy.module.parameters())]
    del strategy
    gc.collect()
    assert all(reference() is None for reference in references)


@each_row("choice", ["simple_ddp_hook", "bucket_ddp_async", "pytorch_ddp", "zero2", "zero3", "pytorch_zero3"])
def test_a_strategy_that_is_dropped_is_freed(ranks: RankPool, choice):
    """Its parameters are freed, too, although C++ holds their hooks."""
    ranks.run(2, dropped, choice)


def stands_still(ahead: int) -> str:
    """What this rank prints when rank 0 is `ahead` micro-batches before rank 1."""
    changed = mock.patch.multiple(batches, PATIENCE_S=0.2, _places=weakref.WeakSet())
    with changed, contextlib.redirect_stderr(io.StringIO()) as output:
        place = batches.TrainingPlace(dist.group.WORLD)
        place.at = (2, 2 + ahead * (dist.get_rank() == 0))
        deadline = time.monotonic() + (30 if ahead else 1)
        while dist.get_rank() == 0 and time.monotonic() < deadline and not output.getvalue():
            time.sleep(0.1)
        dist.barrier()
    return output.getvalue()


def test_the_rank_that_is_behind_is_named(ranks: RankPool):
    message, by_rank_1 = ranks.run(2, stands_still, 1)
    assert "rank 1 is behind: it has done 2 steps and begun 2 micro-batches of the next, and rank 0 2 and 3" in message
    assert message.count("\n") == 1 and by_rank_1 == ""
    assert ranks.run(2, stands_still, 0) == ["", ""]

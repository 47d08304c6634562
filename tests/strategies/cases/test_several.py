"""Several strategies in one process, strategies on some of the ranks, and states that move between them."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import Tensor, nn
from torch.nn import functional

from tests.parity import FAMILIES, IN_OWN_LOOPS, NAMES, load, options_of
from tests.ranks import RankPool
from tests.strategies.cases.case import FEATURES, SAMPLES, STEPS, momentum, samples
from tests.strategies.cases.running import Blocks
from tests.tables import each_row

State = dict[str, Tensor]
NEXT = dict(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
"""Another choice for each."""


@pytest.fixture(autouse=True, scope="module")
def new_ranks(ranks: RankPool) -> Iterator[None]:
    """After sharding over some of three ranks, torch's own count of groups differs between them."""
    yield
    ranks.close(3)


def make_pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    reader = nn.Sequential(nn.Linear(FEATURES, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, FEATURES)))
    return reader, Blocks()


def make_blocks() -> nn.Module:
    return make_pair()[1]


def joined(step: int, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
    parts = [samples(step, rank, 0) for rank in ranks]
    return torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])


def assert_states(state: State, expected: State):
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-5, atol=1e-5)


def train(module: nn.Module, steps: range, ranks: Sequence[int]) -> State:
    """Train in one process, on the samples of `ranks`."""
    optimizer = momentum(module.parameters())
    for step in steps:
        x, y = joined(step, ranks)
        functional.mse_loss(module(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


# One loss through two models, each with a choice of its own ----------------------------------------------------------


def two_in_one_loss(choice: str, second_choice: str) -> list[State]:
    first, second = (
        load(name)(module, momentum, options_of(name, bucket_cap_mb=0.0003))
        for name, module in zip((choice, second_choice), make_pair(), strict=True)
    )
    for step in range(STEPS):
        for index in range(2):
            x, y = (half.chunk(2)[index] for half in samples(step, dist.get_rank(), 0)[:2])
            with first.micro_batch(last=index == 1), second.micro_batch(last=index == 1):
                (functional.mse_loss(second(first(x)), y) / 2).backward()
        for strategy in (first, second):
            strategy.step()
            strategy.zero_grad()
    return [first.full_state_dict(), second.full_state_dict()]


@each_row("choice", IN_OWN_LOOPS[::3])
def test_two_models_in_one_loss(ranks: RankPool, choice):
    pair = make_pair()
    expected = nn.Sequential(*pair)
    train(expected, range(STEPS), range(2))
    states, *_ = ranks.run(2, two_in_one_loss, choice, NEXT[choice])
    for state, module in zip(states, pair, strict=True):
        assert_states(state, module.state_dict())


# Collectives of the module's own -------------------------------------------------------------------------------------


class SynchronizedNorm(nn.Module):
    """As SyncBatchNorm, which runs on GPUs alone: subtracts the mean over the samples of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        if not dist.is_initialized():
            return x - x.mean(0)
        return x - collectives.all_reduce(x.mean(0)) / dist.get_world_size()


def make_synchronized() -> nn.Module:
    torch.manual_seed(3)
    blocks = (nn.Sequential(nn.Linear(8, 8), SynchronizedNorm(), nn.Tanh()) for _ in range(3))
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Sequential(*blocks), nn.Linear(8, 1))


@each_row("choice", IN_OWN_LOOPS[1::3])
def test_collectives_in_forward_and_backward(ranks: RankPool, choice):
    module = make_synchronized()
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    train(module, range(STEPS), range(3))
    state, *_ = ranks.run(3, train_on, choice, start, range(STEPS), make_synchronized)
    assert_states(state, module.state_dict())


# On some of the ranks ------------------------------------------------------------------------------------------------


def on_two_of_three(choice: str) -> State | str:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return {}
    strategy = load(choice)(make_blocks(), momentum, options_of(choice), process_group=group)
    for step in range(STEPS):
        x, y, *_ = samples(step, dist.get_rank(), 0)
        counts = [SAMPLES - strategy.data_parallel_rank]  # 4 and 3
        (weight,) = strategy.loss_weights(counts)
        with strategy.micro_batch():
            (functional.mse_loss(strategy(x[: counts[0]]), y[: counts[0]]) * weight).backward()
        strategy.step()
        strategy.zero_grad()
    return strategy.full_state_dict()


@each_row("choice", FAMILIES)
def test_a_group_of_two_of_three_ranks(ranks: RankPool, choice):
    """Their losses are means over different numbers of samples."""
    module = make_blocks()
    optimizer = momentum(module.parameters())
    for step in range(STEPS):
        x, y = joined(step, [1, 2])
        functional.mse_loss(module(x[:-1]), y[:-1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    idle, state, non_root = ranks.run(3, on_two_of_three, choice)
    assert idle == non_root == {}
    assert_states(state, module.state_dict())


# States that move ----------------------------------------------------------------------------------------------------


def train_on(choice: str, state: State, steps: range, make: Callable[[], nn.Module] = make_blocks) -> State:
    strategy = load(choice)(make(), momentum, options_of(choice, bucket_cap_mb=0.0003))
    strategy.load_full_state_dict(state if dist.get_rank() == 0 else {})
    for step in steps:
        x, y, *_ = samples(step, dist.get_rank(), 0)
        with strategy.micro_batch():
            functional.mse_loss(strategy(x), y).backward()
        strategy.step()
        strategy.zero_grad()
    return strategy.full_state_dict()

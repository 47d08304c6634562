"""What the public tests of CS336's assignment 2 (2026) ask, of each choice that it applies to.

Its sharded optimizer is asked in `tests/strategies/test_own_loop.py` (a list of parameters).
"""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.examples.adapters import Wrapped
from tests.parity import IN_OWN_LOOPS, naming
from tests.ranks import RankPool
from tests.tables import each_row

RANKS, SAMPLES = 2, 20
CHOICES = [name for _, name in IN_OWN_LOOPS]
SHARDED = ["zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3"]


def with_frozen() -> nn.Module:
    """A bias does not train, and neither does a parameter that nothing reads."""
    module = nn.Sequential(nn.Linear(10, 10, bias=False), nn.ReLU(), nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 5))
    module[2].bias.requires_grad_(False)
    module.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
    return module


def with_tied() -> nn.Module:
    """Two of the layers are one weight."""
    sizes = (10, 10, 50, 10, 50, 5)
    layers = [nn.Linear(m, n, bias=False) for m, n in pairwise(sizes)]
    layers[3].weight = layers[1].weight
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def language_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(100, 64),
        nn.RMSNorm(64),
        nn.Linear(64, 128, bias=False),
        nn.ReLU(),
        nn.RMSNorm(128),
        nn.Linear(128, 64, bias=False),
        nn.Linear(64, 100, bias=False),
    )


def shuffled(steps: int, *data: Tensor) -> Iterator[tuple[Tensor, ...]]:
    for step in range(steps):
        yield data
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))
        data = tuple(tensor[order] for tensor in data)


def mine(*data: Tensor) -> list[Tensor]:
    return [tensor.chunk(RANKS)[dist.get_rank()] for tensor in data]


def ddp(choice: str) -> None:
    """Ranks begin with rank 0's weights, and train as one process does on all samples."""
    for make in (with_frozen, with_tied):
        torch.manual_seed(dist.get_rank())
        own = make()
        torch.manual_seed(0)
        plain, wrapped = make(), Wrapped(choice, own)
        data = torch.randn(SAMPLES, 10), torch.randn(SAMPLES, 5)
        optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, wrapped)]
        for x, y in shuffled(5, *data):
            optimizers[0].zero_grad()
            functional.mse_loss(plain(x), y).backward()
            optimizers[0].step()
            own_x, own_y = mine(x, y)
            functional.mse_loss(wrapped(own_x), own_y).backward()
            wrapped.after_backward(optimizers[1])
            optimizers[1].step()
        for name, tensor in wrapped.strategy.full_state_dict().items():
            assert torch.allclose(tensor, plain.state_dict()[name], rtol=1e-5, atol=1e-7), (make.__name__, name)


@each_row("choice", CHOICES)
def test_ddp(ranks: RankPool, choice: str) -> None:
    ranks.run(RANKS, ddp, choice)


def fsdp(choice: str, dtype: torch.dtype | None) -> None:
    """Weights are cast for forward and backward, and updated in fp32. Nothing warns."""
    torch.manual_seed(42)
    plain = language_model()
    wrapped = Wrapped(choice, deepcopy(plain), dtype)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (plain, wrapped)]
    for x, y in shuffled(3, torch.randint(0, 100, (SAMPLES, 8)), torch.randint(0, 100, (SAMPLES,))):
        lower = deepcopy(plain).to(dtype)
        functional.cross_entropy(lower(x)[:, -1].float(), y).backward()
        for parameter, copied in zip(plain.parameters(), lower.parameters(), strict=True):
            assert copied.grad is not None
            parameter.grad = copied.grad.float()
        optimizers[0].step()
        own_x, own_y = mine(x, y)
        functional.cross_entropy(wrapped(own_x)[:, -1].float(), own_y).backward()
        wrapped.after_backward(optimizers[1])
        for group in wrapped.strategy.optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter.grad is not None
                assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, torch.float32)
        optimizers[1].step()
        for name, tensor in wrapped.strategy.full_state_dict().items():
            close = 1e-4 if dtype else 1e-6
            assert torch.allclose(tensor, plain.state_dict()[name], rtol=close, atol=close), name


def quiet(choice: str, dtype: torch.dtype | None) -> None:
    with warnings.catch_warnings(action="error"):
        fsdp(choice, dtype)


@each_row("choice", SHARDED)
def test_fsdp(ranks: RankPool, choice: str) -> None:
    for dtype in (None, torch.float16, torch.bfloat16):
        with naming(dtype):
            ranks.run(RANKS, quiet, choice, dtype)

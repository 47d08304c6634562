"""Asynchronous tensor parallelism: what runs while what is on its way, and what cannot overlap."""

from typing import Any

import pytest
import torch
from torch import nn

import tensor_parallel.overlap as overlap
from sharding.collectives import Pending
from tensor_parallel.overlap import GatherMultiply, MultiplyScatter
from tensor_parallel.parallelize import parallelize
from tensor_parallel.plan import Column, Region, Row, Shared, Split
from tests.parity import message_of
from tests.ranks import RankPool
from tests.tensor_parallel.meshes import CPU
from training.errors import UnsupportedError
from training.mesh import Mesh, mesh_groups


class Watched(Pending):
    """Notes when it is waited for."""

    def __init__(self, inner: Pending, name: str, events: list[str]) -> None:
        self._inner, self._name, self._events = inner, name, events

    def wait(self) -> None:
        self._events.append(f"{self._name} is here")
        self._inner.wait()


def order_of_events() -> dict[str, list[str]]:
    """In forward and backward of both operators, on three pieces and with two layers cut by columns."""
    events: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            result = function(*args, **kwargs)
            return Watched(result, name, events) if isinstance(result, Pending) else result

        return call

    patch = pytest.MonkeyPatch()
    with mesh_groups(Mesh.parse("tp=2"), "cpu") as groups, patch.context():
        own, first, second = torch.randn(6, 3), torch.randn(3, 4), torch.randn(3, 2)
        inputs, last = torch.randn(12, 4), torch.randn(4, 3)
        for tensor in (own, first, second, inputs, last):
            tensor.requires_grad_()
        for module, name in ((overlap, "all_gather"), (overlap, "reduce_scatter"), (torch, "mm"), (torch, "addmm")):
            patch.setattr(module, name, noted(name, getattr(module, name)))
        found: dict[str, list[str]] = {}

        def take(name: str) -> None:
            found[name] = events.copy()
            events.clear()

        _, *products = GatherMultiply.apply(own, groups.model, 3, first, second)
        take("columns")
        torch.autograd.backward(products, [torch.ones_like(product) for product in products])
        take("columns backward")
        total = MultiplyScatter.apply(inputs, last, groups.model, 3)
        take("row")
        total.backward(torch.ones_like(total))
        take("row backward")
    return found


def test_a_piece_is_on_its_way_while_another_is_multiplied(ranks: RankPool) -> None:
    arrived, left = "all_gather is here", "reduce_scatter is here"
    for found in ranks.run(2, order_of_events):
        assert found["columns"] == ["all_gather"] * 3 + [arrived, "mm", "mm"] * 3
        assert found["columns backward"] == ["mm", "addmm", "reduce_scatter"] * 3 + ["mm", "mm"] + [left] * 3
        assert found["row"] == ["mm", "reduce_scatter"] * 3 + [left] * 3
        assert found["row backward"] == ["all_gather"] * 3 + [arrived, "mm"] * 3 + ["mm"]


class NormInside(nn.Module):
    """A region that norms before it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(hidden)))


def refused() -> str:
    with mesh_groups(Mesh.parse("tp=2"), "cpu") as groups:
        module = nn.Sequential(nn.Identity(), NormInside())
        plan = {"0": Split(), "1": Region(), "1.norm": Shared(), "1.up": Column(), "1.down": Row()}
        parallelize(module, plan, groups, CPU, sequence_parallel=True, pieces=2)
        return message_of(UnsupportedError, module, torch.randn(2, 3, 4))


def test_what_is_not_multiplied_at_the_entrance_is_refused(ranks: RankPool) -> None:
    for message in ranks.run(2, refused):
        assert message.startswith(
            "--async-tensor-parallel: 1.up multiplies something else than what its region is given"
        )

"""Asynchronous tensor parallelism: what runs while what is on its way, and what does not overlap."""

from typing import Any

import pytest
import torch
from torch import nn

import tensor_parallel.overlap as overlap
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.strategy.communication.collectives import Pending
from tensor_parallel.overlap import GatherMultiply, MultiplyScatter
from tensor_parallel.parallelize import parallelize
from tensor_parallel.plan import Column, Plan, Region, Row, Shared, Split
from tests.ranks import RankPool
from tests.tables import each_row
from tests.tensor_parallel.meshes import CPU


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

    with mesh_groups(Mesh.parse("tp=2"), "cpu") as groups, pytest.MonkeyPatch.context() as patch:
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


class Inside(nn.Module):
    """A region that changes its input before it multiplies: by a norm, in place, or not at all for the first layer."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)
        self.change = change

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        up = self.up(hidden) if self.change == "behind" else 0
        hidden = self.norm(hidden) if self.change != "in place" else hidden.mul_(2)
        return self.down(self.gate(hidden) + up)


def trained_twice(change: str) -> list[dict[str, torch.Tensor]]:
    """Answers and gradients with whole products, and in pieces. One weight is frozen."""
    found = []
    with mesh_groups(Mesh.parse("tp=2"), "cpu") as groups:
        for pieces in (1, 2):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(4, 4), Inside(change))
            plan: Plan = {"0": Split(), "1": Region(), "1.norm": Shared(), "1.down": Row()}
            plan |= {"1.up": Column(), "1.gate": Column()}
            module.get_parameter("1.up.weight").requires_grad_(False)
            parallelize(module, plan, groups, CPU, sequence_parallel=True, pieces=pieces)
            answer = module(torch.randn(2, 4, 4))
            found.append({"answer": answer.detach()})
            if change != "in place":  # autograd refuses that
                answer.square().sum().backward()
                found[-1] |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return found


@each_row("change", ["behind", "before", "in place"])
def test_what_is_changed_inside_a_region_is_multiplied_then(ranks: RankPool, change: str) -> None:
    """Ranks have other tokens in pieces, so what they have together is compared."""
    (whole, in_pieces), (other_whole, other_in_pieces) = ranks.run(2, trained_twice, change)
    assert whole.keys() == in_pieces.keys()
    for name, tensor in whole.items():
        wanted, found = tensor + other_whole[name], in_pieces[name] + other_in_pieces[name]
        if name == "answer":
            wanted, found = wanted.sum(), found.sum()
        torch.testing.assert_close(found, wanted)

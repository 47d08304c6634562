"""How parameters are cut, and which modules are taken together: pure functions, on inputs of all sorts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.building import require_own_memory
from ddp_lab.strategy.modules import find_blocks
from sharding.options.order import merge_orders
from sharding.parts.flat import ALIGNMENT, Layout, group_by_kind
from sharding.parts.plan import around_units, find_embeddings, plan_units
from tests.models import build
from tests.tables import each_row

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8)


@given(shapes, st.integers(1, 9))
def test_every_element_has_one_owner(shapes, world_size):
    """Reading all pieces of all ranks in order gives back the parameters (TRAPS 14)."""
    layout = Layout(shapes, world_size, item_bytes=4)
    parameters = [torch.rand(shape) for shape in shapes]
    flat = torch.zeros(layout.padded_numel)
    for slot, parameter in enumerate(parameters):
        layout.view(flat, slot).copy_(parameter)
    rebuilt = [[] for _ in shapes]
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            assert piece.start < piece.end
            rebuilt[piece.slot].append(layout.shard_of(flat, rank)[piece.start : piece.end])
    for parameter, pieces in zip(parameters, rebuilt, strict=True):
        assert torch.equal(torch.cat([*pieces, torch.empty(0)]), parameter.reshape(-1))


@given(shapes, st.integers(1, 9), st.sampled_from((1, 2, 4, 8, 16)))
def test_shards_are_balanced_by_elements(shapes, world_size, item_bytes):
    """All shards are of one size, less than 16 bytes above an even share (TRAPS 16), and begin at such a boundary."""
    layout = Layout(shapes, world_size, item_bytes)
    assert layout.numel == sum(torch.Size(shape).numel() for shape in shapes)
    assert 0 <= (layout.shard_numel - layout.numel / world_size) * item_bytes < ALIGNMENT
    assert layout.shard_numel * item_bytes % ALIGNMENT == 0
    assert layout.padded_numel == layout.shard_numel * world_size
    assert sum(p.end - p.start for rank in range(world_size) for p in layout.pieces(rank)) == layout.numel


@given(st.lists(st.lists(st.integers(0, 6), max_size=9), min_size=1, max_size=4))
def test_orders_merge(orders):
    """The first rank's units are in its own order, and as often as it ran them. Every other unit follows once."""
    merged = merge_orders(orders, 7)
    assert set(merged) == set(range(7))
    assert [index for index in merged if index in orders[0]] == orders[0]
    assert len(merged) == len(orders[0]) + 7 - len(set(orders[0]))


def test_kinds_are_kept_apart():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    c, d = nn.Parameter(torch.zeros(3), requires_grad=False), nn.Parameter(torch.zeros(1))
    assert [[id(p) for p in group] for group in group_by_kind([a, b, c, d])] == [[id(a), id(d)], [id(b)], [id(c)]]


# Memory --------------------------------------------------------------------------------------------------------------

BASE = torch.rand(4, 6)
OVERLAPPING = {
    "the same": (BASE, BASE),
    "transposed": (BASE, BASE.t()),
    "rows": (BASE[:3], BASE[2:]),
    "columns": (BASE[:, :4], BASE[:, 3:]),
    "expanded": (BASE, BASE[:1].expand(3, 6)),
    "another dtype": (BASE, BASE.view(torch.int32).view(torch.bfloat16)),
}
APART = {
    "rows": (BASE[:2], BASE[2:]),
    "columns, which lie between each other": (BASE[:, :3], BASE[:, 3:]),
    "every second": (BASE.view(-1)[::2], BASE.view(-1)[1::2]),
    "no elements": (BASE[:0], BASE),
    "copies": (BASE, BASE.clone()),
}


def holding(first, second, kind="trains"):
    module = nn.Module()
    module.register_parameter("first", nn.Parameter(first, requires_grad=kind != "frozen"))
    if kind == "buffer":
        module.register_buffer("second", second)
    else:
        module.register_parameter("second", nn.Parameter(second, requires_grad=kind == "trains"))
    return module


@each_row("kind", ["trains", "beside a frozen one", "buffer"])
@each_row("name", OVERLAPPING)
def test_two_over_one_memory_are_refused(name, kind):
    with pytest.raises(UnsupportedError, match=r"(first and (buffer )?second|second and first) lie"):
        require_own_memory(holding(*OVERLAPPING[name], kind))


@each_row("name", APART)
def test_what_lies_apart_may_share_a_storage(name):
    require_own_memory(holding(*APART[name]))
    require_own_memory(holding(BASE, BASE, "frozen"))
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    require_own_memory(tied)


# Units ---------------------------------------------------------------------------------------------------------------


def test_embeddings_are_lookups_that_nothing_else_reads():
    module = build("llama")
    plans = plan_units(module, 1e9)
    embeddings = find_embeddings(module, plans)
    assert embeddings.modules == [module.model.embed_tokens]
    assert embeddings.parameters == [module.model.embed_tokens.weight]
    before, after = around_units(module, plans, embeddings.parameters)
    assert not before and len(after) == 2

    renormed, shared, plain = nn.Embedding(3, 2, max_norm=1.0), nn.Embedding(3, 2), nn.Embedding(3, 2)
    tied = nn.Linear(2, 3, bias=False)
    tied.weight = shared.weight
    several = nn.ModuleDict({"renormed": renormed, "shared": shared, "tied": tied, "plain": plain})
    assert find_embeddings(several, []).modules == [plain]


def test_blocks_are_the_outermost_that_repeat():
    inner = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)) for _ in range(3)]
    assert find_blocks(nn.Sequential(nn.Embedding(3, 2), nn.ModuleList(inner), nn.Linear(2, 1))) == inner


def test_a_block_that_shares_a_weight_with_the_outside_is_none():
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    layers[3].weight = layers[0].weight
    assert find_blocks(nn.ModuleList([layers])) == list(layers[1:3])


def test_without_blocks_neighbours_fill_a_unit():
    module = build("branching")
    plans = plan_units(module, 200)
    parameters = [p for plan in plans for p in plan.parameters]
    assert len(plans) > 1 and all(sum(p.numel() * 4 for p in plan.parameters) <= 200 for plan in plans)
    assert sorted(map(id, parameters)) == sorted(map(id, module.parameters()))
    assert plan_units(module, 1e9) == []

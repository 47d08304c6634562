"""How parts of parameters are stored and found again, without ranks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.runtime.checkpoint.parts import OwnParts, StoredParts, read_whole
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.model_parallel import Cut

SHAPE = (12, 5)
HALVES = Cut(0, 12, (((0, 7),), ((7, 12),)))
FUSED = Cut(0, 12, (((0, 2), (6, 9)), ((2, 6), (9, 12))))
"""As queries and keys that are one tensor."""
SHARED = Cut(0, 12, (((0, 6),), ((0, 6),), ((6, 12),), ((6, 12),)))
COLUMNS = Cut(1, 5, (((0, 2),), ((2, 3),), ((3, 5),)))
BLOCKS = Cut(0, 12, (((0, 5),),) * 2 + (((5, 12),),) * 2, Cut(1, 5, (((0, 2),), ((2, 5),)) * 2))
"""As experts, each of which is cut too."""


def own_parts(cut, rank):
    module = torch.nn.Module()
    tensor = torch.zeros(SHAPE)
    module.weight = torch.nn.Parameter(cut.part(tensor, rank) if cut else tensor)
    parallel = None
    if cut:
        place = {"rank_in": lambda cut: rank, "tensor_rank": rank, "is_owner": lambda name: cut.is_owner(rank)}
        parallel = SimpleNamespace(cuts={"weight": cut}, **place)
    strategy = SimpleNamespace(module=module, model_parallel=parallel)
    return OwnParts(strategy)


class Files:
    """What `cut` stores of a tensor, each part in one range. Notes what is read."""

    def __init__(self, tensor, cut):
        self.read_keys = []
        self._stored = {}
        for rank in range(len(cut.ranges)) if cut else (0,):
            parts = own_parts(cut, rank)
            if parts.is_saved_here("weight"):
                part = cut.part(tensor, rank) if cut else tensor
                self._stored[f"parameter/{parts.key('weight')}"] = part.reshape(-1)

    def read(self, key, start, end):
        self.read_keys.append(f"{key} {start}-{end}")
        return self._stored[key][start:end]


CUTS = [None, HALVES, FUSED, SHARED, COLUMNS, BLOCKS]


@given(st.sampled_from(CUTS), st.sampled_from(CUTS), st.data())
def test_any_part_is_put_together_from_any_others(stored, held_cut, data):
    tensor = torch.arange(60.0).view(SHAPE)
    rank = data.draw(st.integers(0, len(held_cut.ranges) - 1 if held_cut else 0))
    part = (held_cut.part(tensor, rank) if held_cut else tensor).reshape(-1)
    start = data.draw(st.integers(0, len(part)))
    end = data.draw(st.integers(start, len(part)))
    files = Files(tensor, stored)
    reader = StoredParts(files, {"weight": stored} if stored else {}, own_parts(held_cut, rank))
    values = reader.read("parameter", "weight", start, end)
    assert torch.equal(values, part[start:end])
    if stored == held_cut:
        (read,) = files.read_keys
        assert read.endswith(f" {start}-{end}"), "nothing more is read"


def test_parts_that_lack_something_are_refused():
    def blocks(*then):
        return replace(BLOCKS, then=replace(BLOCKS.then, ranges=then))

    tensor, (first, second, *_) = torch.arange(60.0).view(SHAPE), BLOCKS.then.ranges
    twice, lacking = blocks(first, second, first, ((0, 5),)), blocks(first, second, first, first)
    assert torch.equal(read_whole(Files(tensor, twice), "parameter/weight", SHAPE, twice), tensor)
    short, elsewhere = blocks(first, second, first), replace(HALVES, dim=2)
    for stored, cut in ((lacking, lacking), (BLOCKS, short), (HALVES, elsewhere)):
        with pytest.raises(UserError, match="is cut wrongly there"):
            read_whole(Files(tensor, stored), "parameter/weight", SHAPE, cut)

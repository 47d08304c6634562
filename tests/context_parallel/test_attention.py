"""Ring and Ulysses attention against attention of the whole sequence in one process."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from context_parallel.layout import SequenceLayout
from context_parallel.ring import Ring, RingAttention
from context_parallel.ulysses import ulysses
from reference.pytorch_cp import TorchRing
from tests.ranks import RankPool
from tests.tables import each_row

SCALE = 0.3


class AttentionCase(NamedTuple):
    ranks: int
    way: str
    dtype: torch.dtype = torch.float32
    heads: tuple[int, int] = (4, 4)
    unit: int = 3
    documents: bool = False


BOTH_RINGS = ("ring", "zigzag")
CASES = [
    *(AttentionCase(ranks, way, torch.float64) for ranks in (2, 3, 4) for way in BOTH_RINGS),
    *(AttentionCase(ranks, way, heads=(4, 2), unit=5, documents=True) for ranks in (2, 3, 4) for way in BOTH_RINGS),
    *(AttentionCase(4, way, torch.bfloat16, heads=(4, 1), unit=16) for way in BOTH_RINGS),
    AttentionCase(4, "zigzag", torch.bfloat16, unit=16, documents=True),
    *(AttentionCase(2, "ulysses", dtype, heads=(4, 2)) for dtype in (torch.float64, torch.bfloat16)),
    AttentionCase(3, "ulysses", heads=(6, 2), documents=True),
    AttentionCase(4, "ulysses", heads=(12, 2), documents=True),
    *(AttentionCase(ranks, "pytorch_cp", heads=(4, 2), unit=5, documents=ranks == 3) for ranks in (2, 3)),
    AttentionCase(4, "pytorch_cp", torch.bfloat16, unit=16),
]


def layout_of(case: AttentionCase) -> SequenceLayout:
    return SequenceLayout(case.ranks, case.way in ("zigzag", "pytorch_cp"))


TIMES = 1.4
"""How many times larger an error may be than one process's in the same precision, for any number of ranks."""


def inputs(case: AttentionCase) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys, values and the gradient of outputs, of a full sequence; and each token's document number. Some
    documents begin and end within a rank's part, and one is longer than a part."""
    length, generator = case.unit * layout_of(case).chunks, torch.Generator().manual_seed(0)
    kinds = (case.heads[0], case.heads[1], case.heads[1], case.heads[0])
    tensors = [torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64) for heads in kinds]
    begins = torch.zeros(2, length, dtype=torch.int64)
    begins[0, [2, 3, length // 2 + 1]] = begins[1, [length // 3, length - 1]] = 1
    return [tensor.to(case.dtype) for tensor in tensors], begins.cumsum(1) if case.documents else None


def attend_alone(case: AttentionCase, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients in one process."""
    (*tensors, gradient), documents = inputs(case)
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in tensors)
    out = attend(documents, q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient.to(dtype))]


def attend(documents: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    return scaled_dot_product_attention(q, k, v, mask, scale=SCALE, enable_gqa=True)


def on_rank(case: AttentionCase) -> list[Tensor]:
    """A rank's part of these outputs and gradients."""
    group = dist.group.WORLD
    assert group is not None
    ring, (tensors, documents) = Ring(group, zigzag=layout_of(case).zigzag), inputs(case)
    *qkv, gradient = (ring.layout.part(tensor, ring.rank, 2) for tensor in tensors)
    for tensor in qkv:
        tensor.requires_grad_()
    if case.way == "ulysses":
        out = ulysses(*qkv, group, partial(attend, documents))
    elif case.way == "pytorch_cp":
        out = TorchRing.apply(*qkv, documents, ring, SCALE)
    else:
        out = RingAttention.apply(*qkv, documents, ring, SCALE)
    return [out.detach(), *torch.autograd.grad(out, qkv, gradient)]


@each_row("case", CASES)
def test_attention_over_ranks_is_as_exact_as_in_one_process(ranks: RankPool, case):
    layout = layout_of(case)
    parts = zip(*ranks.run(case.ranks, on_rank, case), strict=True)
    exact, alone = attend_alone(case, torch.float64), attend_alone(case, case.dtype)
    rounding = 4 * torch.finfo(torch.promote_types(case.dtype, torch.float32)).eps
    for name, rank_parts, baseline, right in zip(("out", "q", "k", "v"), parts, alone, exact, strict=True):
        assert rank_parts[0].dtype == case.dtype
        tensors = layout.whole(rank_parts, 2), baseline
        error, allowed = ((tensor.double() - right).norm() / right.norm() for tensor in tensors)
        assert error < TIMES * allowed + rounding, f"{name}: {error:.1e}, alone {allowed:.1e}"


class Large(Ring):
    """The ring as the last of `size` ranks sees it. It has all keys and values, and communicates nothing."""

    def __init__(self, k: Tensor, v: Tensor, size: int):
        self.rank, self.size, self.layout = size - 1, size, SequenceLayout(size)
        self._parts = torch.stack([k, v]).chunk(size, 3)

    def turns(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        return ((source, self._parts[source]) for source in reversed(range(self.size)))

    def shift(self, tensor: Tensor):
        assert tensor.dtype == torch.float32, "gradients go around in fp32"
        return SimpleNamespace(wait=lambda: torch.zeros_like(tensor))


def test_rounding_does_not_add_up_along_a_ring():
    case = AttentionCase(64, "ring", torch.bfloat16, unit=2)
    q, k, v, gradient = inputs(case)[0]
    ring, last = Large(k, v, case.ranks), slice(-case.unit, None)
    part = [tensor[:, :, last].clone().requires_grad_() for tensor in (q, k, v)]
    out = RingAttention.apply(*part, None, ring, SCALE)
    results = out.detach(), torch.autograd.grad(out, part, gradient[:, :, last])[0]
    alone, exact = attend_alone(case, case.dtype), attend_alone(case, torch.float64)
    for result, baseline, right in zip(results, alone, exact, strict=False):
        error, allowed = ((tensor.double() - right[:, :, last]).norm() for tensor in (result, baseline[:, :, last]))
        assert error < TIMES * allowed


class RecordedRing(Ring):
    """A ring without ranks, which records when a message is posted and when it is waited for."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.events: list[str] = []

    def shift(self, tensor: Tensor):
        self.events.append(f"post {int(tensor)}")
        return SimpleNamespace(wait=lambda: self.events.append(f"wait {int(tensor)}") or tensor + 1)


def test_the_next_block_is_under_way_before_one_is_computed():
    ring = RecordedRing(rank=1, size=3)
    for source, keys in ring.turns(torch.tensor(0)):
        ring.events.append(f"compute {int(keys)} of {source}")
    assert ring.events == [
        *("post 0", "compute 0 of 1", "wait 0"),
        *("post 1", "compute 1 of 0", "wait 1"),
        "compute 2 of 2",
    ]

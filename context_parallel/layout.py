"""Which tokens of a sequence each rank holds.

All that treats tokens one by one, which is all but attention, runs on a rank's part as it would on the whole. So the
order of tokens is chosen once, outside of attention, and positions and labels go with their tokens.

- contiguous: rank r of n has the r-th of n parts. Under a causal mask rank 0 has n times less to do than the last.
- zigzag: the sequence is in 2n chunks, and rank r has chunks r and 2n-1-r: an early one, which sees little, and a late
  one, which sees much. Each pair of ranks then costs the same: half of a block.

Tokens that fill a sequence up stand at its end, where the causal mask hides them from all others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionBlock:
    """The part of a rank's queries that sees anything of another rank's keys, and what it sees: all of these keys.

    Attributes:
        first_query: Those before see nothing.
        keys: How many keys are seen, counted from the first.
        causal: Instead, each query sees the keys up to its own place.
    """

    first_query: int
    keys: int
    causal: bool = False

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of a rank's queries and of another's keys and values, (batch, heads, tokens, features)."""
        return q[:, :, self.first_query :], k[:, :, : self.keys], v[:, :, : self.keys]


@dataclass(frozen=True)
class SequenceLayout:
    """Attributes:
    size: Ranks.
    zigzag: See above.
    """

    size: int
    zigzag: bool = False

    @property
    def chunks(self) -> int:
        """Into which a sequence is cut: its length is a multiple of this."""
        return 2 * self.size if self.zigzag else self.size

    def of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in their order."""
        return (rank, self.chunks - 1 - rank) if self.zigzag else (rank,)

    def missing(self, length: int) -> int:
        """How many tokens fill a sequence up."""
        return -length % self.chunks

    def part(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """What a rank has of `whole`, which is in the order of the sequence along `dim`. A new tensor."""
        chunks = whole.chunk(self.chunks, dim)
        return torch.cat([chunks[chunk] for chunk in self.of(rank)], dim)

    def whole(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """All ranks' parts in the order of the sequence."""
        chunks: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            numbers = self.of(rank)
            chunks |= dict(zip(numbers, part.chunk(len(numbers), dim), strict=True))
        return torch.cat([chunks[number] for number in range(self.chunks)], dim)

    def block(self, rank: int, source: int, length: int) -> AttentionBlock | None:
        """What the queries of `rank` see of the keys of `source` under the causal mask; None: nothing.

        Args:
            length: Tokens of each rank.
        """
        if rank == source:
            return AttentionBlock(0, length, causal=True)
        query_chunks, key_chunks = self.of(rank), self.of(source)
        blind = sum(chunk < key_chunks[0] for chunk in query_chunks)
        visible = sum(chunk < query_chunks[-1] for chunk in key_chunks)
        unit = length // len(query_chunks)
        return AttentionBlock(blind * unit, visible * unit) if visible else None

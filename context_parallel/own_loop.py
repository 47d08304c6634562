"""Context parallelism in a model and a training loop of your own (docs/own-loop.md)."""

import torch
import torch.distributed as dist
from torch import Tensor

from context_parallel.attention import Context
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UnsupportedError, UserError
from ddp_lab.runtime.mesh import timeout_of
from ddp_lab.runtime.settings.mesh import CONTEXT_PARALLEL, ZIGZAG


class OwnContext(Context):
    """The ranks that have a part each of the same samples.

    Attributes:
        size, rank: How many they are, and this one's place among them.
        data_size, data_rank: The same of ranks that see different samples.
    """

    def __init__(self, group: dist.ProcessGroup, way: str) -> None:
        super().__init__(group, way)
        self.size, self.rank = self.ring.size, self.ring.rank
        self.data_size, self.data_rank = dist.get_world_size() // self.size, dist.get_rank() // self.size

    def positions(self, length: int, device: torch.device | str) -> Tensor:
        """The places of this rank's tokens in sequences of `length`, (1, tokens of this rank)."""
        return self.part(torch.arange(length, device=device)[None])

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Stands where `torch.nn.functional.scaled_dot_product_attention` stood: causal attention of this rank's
        queries to all ranks' keys. Collective over the ranks of cp.

        Shapes: queries and outputs (samples, heads, tokens of this rank, features), keys and values (samples,
        key-value heads, tokens of this rank, features).

        Args:
            documents: The number of each token's document in whole sequences, (samples, tokens): tokens see their own
                document alone. Those that fill a sequence up are hidden by their place.

        Raises:
            UnsupportedError: other masks, or dropout but by `ulysses`; or ranks that do not divide heads.
        """
        if attn_mask is not None or not is_causal:
            raise UnsupportedError(
                "context parallelism: attention must have is_causal=True and no attn_mask, or documents"
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise UnsupportedError("context parallelism: keys have fewer heads than queries; say enable_gqa=True")
        numbers = None if documents is None else self.filled(documents, -1)
        return self.attend(query, key, value, numbers, query.shape[-1] ** -0.5 if scale is None else scale, dropout_p)


def context_parallel(size: int, way: str = ZIGZAG) -> OwnContext:
    """Of each `size` neighbouring ranks, those among which this one is: they share the tokens of their samples.
    Collective over all ranks.

    Args:
        way: `ring`, `zigzag`, `ulysses` or `pytorch_cp` (docs/how-it-works/context_parallel.md).

    Raises:
        UserError: there is no such way, or `size` does not divide the ranks.
    """
    ranks = dist.get_world_size()
    if way not in CONTEXT_PARALLEL:
        raise UserError(unknown_name("way of context parallelism", way, CONTEXT_PARALLEL))
    if size < 1 or ranks % size:
        raise UserError(f"context parallelism over {size} ranks: must be a number that divides the {ranks} ranks")
    everyone = dist.group.WORLD
    assert everyone is not None, "a process group was joined, or there would be no ranks"
    group, _ = dist.new_subgroups(size, timeout=timeout_of(everyone))
    assert isinstance(group, dist.ProcessGroup), "each rank is in one of them"
    return OwnContext(group, way)

"""What the parts of one parallelized model share on a rank, and the hooks before and after parallel regions."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.strategy.modules import with_first
from tensor_parallel.operators import Copy
from tensor_parallel.randomness import OwnRandomNumbers
from tensor_parallel.sequence import Tokens


class TensorRanks:
    """Attributes:
    tokens: With sequence parallelism; else None.
    random: Draws different numbers on each rank within a region.
    gathers_logits: Whether the caller wants whole logits, because it computes the loss itself.
    tokens_in_batch: Of the latest micro-batch: its token ids, or its rows where it has none.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sequence_parallel: bool) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.tokens = Tokens(group) if sequence_parallel else None
        self.random = OwnRandomNumbers(self.rank, device)
        self.gathers_logits = True
        self.tokens_in_batch = 0

    @property
    def active_tokens(self) -> Tokens | None:
        """What cuts the tokens of this forward pass, if they are cut."""
        return self.tokens if self.tokens is not None and self.tokens.is_active else None

    def enter(self, hidden: Tensor, is_whole: bool = False) -> Tensor:
        """f: in front of what each rank computes for itself. `is_whole`: all ranks have all tokens."""
        hidden = as_factor(hidden)  # as the products would later, but half as many bytes are sent
        tokens = self.active_tokens
        if tokens is None or is_whole:
            return Copy.apply(hidden, self.group)
        return tokens.gather(hidden)

    @staticmethod
    def _tokens_of(batch: Tensor) -> int:
        return batch.shape[0] if batch.is_floating_point() else batch.numel()

    # Hooks -----------------------------------------------------------------------------------------------------------

    def begin_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """In front of the whole model. Generation cuts sequences in ways of its own, so its tokens stay whole."""
        self.gathers_logits = kwargs.get("labels") is None
        if self.tokens is not None:
            self.tokens.is_active = not self.gathers_logits or torch.is_grad_enabled()
            self.tokens.is_merged = False
        if torch.is_grad_enabled():
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            self.tokens_in_batch = 0 if first is None else self._tokens_of(first)
        self.random.end()

    def begin_random(self, module: nn.Module, args: Any) -> None:
        if module.training and not self.active_tokens:
            self.random.begin()

    def end_random(self, *_: Any) -> None:
        if not self.active_tokens:
            self.random.end()

    def split(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """In front of the first block."""
        tokens = self.active_tokens
        if tokens is None:
            return None
        if module.training:
            self.random.begin()
        return with_first(args, kwargs, tokens.split)

    def merge(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """In front of what all ranks compute alike."""
        tokens = self.active_tokens
        self.random.end()
        return None if tokens is None else with_first(args, kwargs, tokens.merge)

    def merge_after(self, module: nn.Module, args: Any, hidden: Tensor) -> Tensor | None:
        """Behind the last module whose tokens are cut."""
        tokens = self.active_tokens
        self.random.end()
        return None if tokens is None else tokens.merge(hidden)

    def enter_head(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.random.end()
        is_whole = self.tokens is not None and self.tokens.is_merged
        return with_first(args, kwargs, partial(self.enter, is_whole=is_whole))


def as_factor(hidden: Tensor) -> Tensor:
    """In the precision of products."""
    kind = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else hidden

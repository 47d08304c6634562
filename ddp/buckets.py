"""Buckets of gradients: flat buffers into which `parameter.grad` is a view, and how parameters are put into them."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten

from ddp_lab.strategy.replicated import bytes_of, is_own

DEFAULT_CAP_MB = 25.0
"""PyTorch DDP has the same."""
FEWEST_BUCKETS, LEAST_CAP_MB = 10, 1.0
"""By default a model has at least so many buckets: the last one, which nothing hides, is then small. But no bucket is
smaller than 1 MiB, the size of PyTorch DDP's first one, since each costs the latency of a collective."""
MOST_WAITING = 2**20
"""Bytes of gradients that wait for one common copy. Waiting gradients take memory twice, and may leave the cache."""


class Bucket:
    """A flat buffer of gradients that are all-reduced together. The first gradients allocate it.

    Args:
        parameters: Of one dtype and device; their gradients lie in the buffer in this order.

    Attributes:
        flat: The buffer, (elements,). It has no elements while no parameter has a gradient.
        moves_at: Parameters at whose gradients `collect` is due before the bucket is complete.
        views: For each parameter its place in the buffer, in its shape. None while there is no buffer.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self._empty = parameters, parameters[0].detach().new_empty(0)
        self.flat = self._empty
        self.views: Sequence[Tensor] = ()
        self._numel = sum(parameter.numel() for parameter in parameters)
        self.moves_at = moves_at(parameters, MOST_WAITING)
        self.work: Any = None
        self._abandoned: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new step: all gradients are still to come. The buffer is freed unless gradients are left in it."""
        if self.work is not None:  # of a step that was abandoned: the all-reduce may go on in the old buffer
            self._abandoned.append((self.work, self.flat))
        if self.views and all(parameter.grad is None for parameter in self.parameters):
            self.flat, self.views = self._empty, ()
        self.missing, self.work = len(self.parameters), None

    def wait(self) -> None:
        """Wait for the all-reduce of the bucket, and so for those that came before it."""
        self.work.wait()
        self.work = None
        self._abandoned.clear()

    @torch.no_grad()
    def collect(self) -> None:
        """Make each `.grad` a view into this bucket with the same values. One copy moves all gradients that are still
        outside. A gradient that fills the bucket becomes its buffer, without a copy."""
        views: Sequence[Tensor | None] = self.views or [None] * len(self.parameters)
        new = [slot for slot, p in enumerate(self.parameters) if p.grad is not None and p.grad is not views[slot]]
        gradients = [gradient for slot in new if (gradient := self.parameters[slot].grad) is not None]
        if len(gradients) == len(self.parameters) and not self.views:
            is_whole = len(gradients) == 1 and is_own(gradients[0])
            self.flat = gradients[0].view(-1) if is_whole else flatten([*gradients, self._empty])
            self.views = unflatten(self.flat, self.parameters)
        elif gradients:
            torch._foreach_copy_([self.allocated()[slot] for slot in new], gradients)
        for slot in new:
            self.parameters[slot].grad = self.views[slot]

    def complete(self) -> None:
        """Collect gradients, and put zeros where this rank made none in this step."""
        self.collect()
        for parameter, view in zip(self.parameters, self.allocated(), strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def allocated(self) -> Sequence[Tensor]:
        """The views, of a new buffer if there is none."""
        if not self.views:
            self.flat = self._empty.new_empty(self._numel)
            self.views = unflatten(self.flat, self.parameters)
        return self.views


def moves_at(parameters: Sequence[Tensor], max_bytes: int) -> frozenset[Tensor]:
    """The parameters at whose gradients, if these come in order, the waiting ones have reached `max_bytes`."""
    places, waiting = [], 0
    for parameter in parameters:
        waiting += parameter.nbytes
        if waiting >= max_bytes:
            places.append(parameter)
            waiting = 0
    return frozenset(places)


def usual_cap_bytes(parameters: Iterable[nn.Parameter]) -> float:
    """How large a bucket may be by default."""
    return min(DEFAULT_CAP_MB * 2**20, max(LEAST_CAP_MB * 2**20, bytes_of(parameters) / FEWEST_BUCKETS))


def fill_buckets(
    parameters: Iterable[nn.Parameter],
    cap_bytes: float,
    group_of: Callable[[nn.Parameter], Hashable] = lambda _: None,
) -> list[list[nn.Parameter]]:
    """Fill buckets with `parameters` in reversed order, a new one where dtype changes or `cap_bytes` would be passed.

    A parameter larger than `cap_bytes` gets a bucket of its own. Those of different groups share none; buckets are in
    the order in which backward completes them.
    """
    filled: dict[Hashable, list[nn.Parameter]] = {}  # the latest bucket of each group
    buckets: list[list[nn.Parameter]] = []
    places: dict[nn.Parameter, int] = {}
    for place, parameter in enumerate(reversed(list(parameters))):
        places[parameter] = place
        bucket = filled.get(group := group_of(parameter))
        fits = bucket and bucket[0].dtype == parameter.dtype and bucket[0].device == parameter.device
        if bucket and fits and bytes_of(bucket) + bytes_of([parameter]) <= cap_bytes:
            bucket.append(parameter)
        else:
            filled[group] = [parameter]
            buckets.append(filled[group])
    return sorted(buckets, key=lambda bucket: places[bucket[-1]])

"""Buckets of gradients: flat buffers into which `parameter.grad` is a view, and how parameters are put into them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.strategy.replicated import bytes_of, is_own

DEFAULT_CAP_MB = 25.0
"""PyTorch DDP's, too."""
FEWEST_BUCKETS = 10
"""Of a model, where its user sets no size: the last one, which nothing hides, is then small beside the rest."""
MOST_WAITING = 2**20
"""Bytes of gradients that wait to be moved together. What waits is held twice, and may leave the processor's cache."""


class Bucket:
    """A flat buffer of gradients that are all-reduced together. It is made when the first of them come into it.

    Args:
        parameters: Of one dtype and device; their gradients lie in the buffer in this order.

    Attributes:
        flat: The buffer, (elements,). It has no elements while no parameter has a gradient.
        views: For each parameter its place in the buffer, in its shape. None while there is no buffer.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self._nothing = parameters, parameters[0].detach().new_empty(0)
        self.flat = self._nothing
        self.views: list[Tensor] = []
        self.work: Any = None
        self._abandoned: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Begin a new step: all gradients are still to come. The buffer is freed unless gradients are left in it."""
        if self.work is not None:  # of a step that was abandoned: the all-reduce may go on in the old buffer
            self._abandoned.append((self.work, self.flat))
        if all(parameter.grad is None for parameter in self.parameters):
            self.flat, self.views = self._nothing, []
        self.missing, self.work, self._waiting = len(self.parameters), None, 0

    def wait(self) -> None:
        """Wait for the all-reduce of the bucket, and so for those that came before it."""
        self.work.wait()
        self.work = None
        self._abandoned.clear()

    def receive(self, parameter: Tensor) -> None:
        """Backward has made or added up the gradient of `parameter`. Small ones wait, to be moved here together."""
        self._waiting += parameter.nbytes
        if not self.views and len(self.parameters) == 1 and is_own(parameter.grad):
            assert parameter.grad is not None
            self.flat, self.views = parameter.grad.view(-1), [parameter.grad]  # it is the bucket: nothing is copied
        elif self._waiting >= MOST_WAITING:
            self.collect()

    @torch.no_grad()
    def collect(self) -> None:
        """Make `.grad` of each parameter that has one the view into this bucket, with the same values: by one copy for
        all that are not there yet."""
        self._waiting = 0
        found = ((slot, parameter.grad) for slot, parameter in enumerate(self.parameters))
        new = {slot: g for slot, g in found if g is not None and not (self.views and g is self.views[slot])}
        if new:
            self.made()
            torch._foreach_copy_([self.views[slot] for slot in new], list(new.values()))
        for slot in new:
            self.parameters[slot].grad = self.views[slot]

    def complete(self) -> None:
        """Collect what is there, and put zeros where this rank made no gradient in this step."""
        self.collect()
        for parameter, view in zip(self.parameters, self.made(), strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    def made(self) -> list[Tensor]:
        """The views, of a new buffer if there is none."""
        if not self.views:
            self.flat = self._nothing.new_empty(sum(parameter.numel() for parameter in self.parameters))
            pieces = self.flat.split([parameter.numel() for parameter in self.parameters])
            self.views = [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]
        return self.views


def usual_cap_bytes(parameters: Iterable[nn.Parameter]) -> float:
    """How large a bucket may be where the user does not say."""
    return min(DEFAULT_CAP_MB * 2**20, bytes_of(parameters) / FEWEST_BUCKETS)


def fill_buckets(parameters: Iterable[nn.Parameter], cap_bytes: float) -> list[list[nn.Parameter]]:
    """Fill buckets with `parameters` in reversed order, a new one where dtype changes or `cap_bytes` would be passed.

    A parameter larger than `cap_bytes` gets a bucket of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    for parameter in reversed(list(parameters)):
        fits = buckets and buckets[-1][0].dtype == parameter.dtype and buckets[-1][0].device == parameter.device
        if fits and bytes_of(buckets[-1]) + bytes_of([parameter]) <= cap_bytes:
            buckets[-1].append(parameter)
        else:
            buckets.append([parameter])
    return buckets

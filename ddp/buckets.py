"""Buckets of gradients: flat buffers into which `parameter.grad` is a view, and how parameters are put into them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ddp_lab.strategy.replicated import bytes_of

DEFAULT_CAP_MB = 25.0
"""PyTorch DDP's, too."""
FEWEST_BUCKETS = 10
"""Of a model, where its user sets no size: the last one, which nothing hides, is then small beside the rest."""


class Bucket:
    """A flat buffer of gradients that are all-reduced together.

    Args:
        parameters: Of one dtype and device; their gradients lie in the buffer in this order.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.work: Any = None
        self._abandoned: list[Any] = []
        self._allocate()
        self.reset()

    def _allocate(self) -> None:
        first = self.parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([p.numel() for p in self.parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, self.parameters, strict=True)]

    def reset(self) -> None:
        """Begin a new step: all gradients are still to come."""
        if self.work is not None:  # of a step that was abandoned: the all-reduce may go on in the old buffer
            self._abandoned.append((self.work, self.flat))
            self._allocate()
        self.missing = len(self.parameters)
        self.work = None

    def wait(self) -> None:
        """Wait for the all-reduce of the bucket, and so for those that came before it."""
        self.work.wait()
        self.work = None
        self._abandoned.clear()

    @torch.no_grad()
    def collect(self) -> None:
        """Make `.grad` of each parameter that has one the view into this bucket, with the same values: by one copy for
        all that are not there yet."""
        triples = ((p, p.grad, view) for p, view in zip(self.parameters, self.views, strict=True))
        new = [(p, gradient, view) for p, gradient, view in triples if gradient is not None and gradient is not view]
        if new:
            torch._foreach_copy_([view for _, _, view in new], [gradient for _, gradient, _ in new])
        for parameter, _, view in new:
            parameter.grad = view

    def complete(self) -> None:
        """Collect what is there, and put zeros where this rank made no gradient in this step."""
        self.collect()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()


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

"""Watches this rank's own gradients as backward makes them, before any other rank's are mixed in."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class GradientWatch:
    """Which parameters received a gradient in a step, and since when one of them is not finite.

    A gradient is summed in the hook that autograd runs when it is complete, while it is still in cache: a sum is not
    finite where one of its terms is not. Of gradients that are added up over micro-batches, only the last state is
    summed. Sums stay on the device until `first_nonfinite_round` asks for them.

    Args:
        parameters: The trainable ones, in the order of `received`. The watch must be made before a strategy adds its
            own hooks, so that it sees each gradient before communication changes it.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self.begin_step()
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))

    def begin_step(self) -> None:
        """Forget the last step."""
        self._round = -1
        self._inspects = False
        self._last_round = [-1] * len(self._parameters)
        self._sums: list[Tensor] = []
        self._rounds_of_sums: list[int] = []

    def begin_round(self, inspect: bool) -> None:
        """The backward pass of another micro-batch follows. `inspect`: no later one on this rank adds to it."""
        self._round += 1
        self._inspects = inspect

    def received(self) -> list[bool]:
        """Whether each parameter got a gradient in this step, on this rank."""
        return [last >= 0 for last in self._last_round]

    def received_in_last_round(self) -> list[bool]:
        """Whether each parameter got a gradient in the latest backward pass, on this rank."""
        return [last == self._round for last in self._last_round]

    def first_nonfinite_round(self) -> int:
        """The earliest inspected backward pass of this step that left a gradient that is not finite; -1 for none."""
        if not self._sums:
            return -1
        finite = torch.stack(self._sums).isfinite().tolist()
        return min((when for when, good in zip(self._rounds_of_sums, finite, strict=True) if not good), default=-1)

    def inspect_leftovers(self) -> None:
        """Look at gradients that the latest backward pass did not touch; call it before they are reduced."""
        for index, last in enumerate(self._last_round):
            if 0 <= last < self._round:
                self._inspect(index, last)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            self._last_round[index] = self._round
            if self._inspects:
                self._inspect(index, self._round)

        return on_gradient

    def _inspect(self, index: int, when: int) -> None:
        gradient = self._parameters[index].grad
        if gradient is not None:
            self._sums.append(gradient.sum(dtype=torch.float32))
            self._rounds_of_sums.append(when)

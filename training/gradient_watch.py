"""Watches this rank's own gradients as backward makes them, before any other rank's are mixed in."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class GradientWatch:
    """Which parameters received a gradient, and whether any of it is not finite.

    A gradient is summed in the hook that autograd runs when it is complete, while it is still in cache: a sum is
    not finite where one of its terms is not. Sums stay on the device until `first_nonfinite_round` asks
    for them.

    Args:
        parameters: The trainable ones, in the order of `received`. The watch must be made before a strategy adds its
            own hooks, so that it sees each gradient before communication changes it.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self.reset()
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(index))

    def reset(self) -> None:
        """Forget the last step."""
        self._round = -1
        self._checking = True
        self._last_round = [-1] * len(self._parameters)
        self._sums: list[tuple[int, Tensor]] = []

    def begin_round(self, check: bool) -> None:
        """A backward pass follows. `check`: sum its gradients now, since no later pass on this rank adds to them."""
        self._round += 1
        self._checking = check

    def received(self) -> list[bool]:
        """Whether each parameter got a gradient in this step, on this rank."""
        return [last >= 0 for last in self._last_round]

    def received_in_last_round(self) -> list[bool]:
        """Whether each parameter got a gradient in the latest backward pass, on this rank."""
        return [last == self._round for last in self._last_round]

    def first_nonfinite_round(self) -> int:
        """The earliest backward pass of this step that left a gradient that is not finite; -1 if all are finite."""
        checked_last = self._checking
        for index, last in enumerate(self._last_round):
            if last >= 0 and not (checked_last and last == self._round):
                self._check(index, last)
        if not self._sums:
            return -1
        finite = torch.stack([total for _, total in self._sums]).isfinite().tolist()
        return min((when for (when, _), good in zip(self._sums, finite, strict=True) if not good), default=-1)

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def on_gradient(_: Tensor) -> None:
            self._last_round[index] = self._round
            if self._checking:
                self._check(index, self._round)

        return on_gradient

    def _check(self, index: int, when: int) -> None:
        gradient = self._parameters[index].grad
        if gradient is not None:
            self._sums.append((when, gradient.sum(dtype=torch.float32)))

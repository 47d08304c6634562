"""Watches the gradients that backward makes on this rank, before they are reduced with those of other ranks."""

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ddp_lab.runtime.errors import OneRankError


class GradientWatch:
    """Which parameters received a gradient in a step, and on request the first backward pass that made a bad one.

    Args:
        parameters: The trainable ones by name, in the order of `received`. Make the watch before a strategy adds its
            own hooks, so that it sees each gradient before communication changes it.

    Attributes:
        inspects: Look at the values of each gradient. This reads every gradient once more, so it is on only while the
            step is repeated to find the rank that made a gradient that is not finite.
        takes_one: Refuse a second gradient of a parameter in this backward pass, because the first one may be reduced
            already. In a pipeline the last backward pass of a stage may come in two: of inputs, and of weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self.inspects = self.takes_one = False
        self._lengths = {parameter.numel() for parameter in self._parameters}
        self._index = {parameter: index for index, parameter in enumerate(self._parameters)}
        self._then: list[Callable[[Tensor], object] | None] = [None] * len(self._parameters)
        self.begin_step()
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(hook_of(weakref.ref(self), index))

    def then(self, parameter: Tensor, call: Callable[[Tensor], object]) -> None:
        """Run `call(parameter)` when backward has added up a gradient, for as long as this watch exists."""
        self._then[self._index[parameter]] = call

    def begin_step(self) -> None:
        """Forget the step before."""
        self._round = -1
        self._last_round = [-1] * len(self._parameters)
        self._taken: set[int] = set()
        self._index_at: dict[int, int] = {}  # by the address of a parameter's gradient
        self.first_nonfinite_round = -1

    def begin_round(self, continues: bool = False) -> None:
        """The backward pass of the next micro-batch follows; or, if it `continues`, the rest of one."""
        self._round += 1
        if not continues:
            self._taken.clear()

    def received(self) -> list[bool]:
        """Whether each parameter got a gradient in this step, on this rank."""
        return [last >= 0 for last in self._last_round]

    def unexplained(self, parameters: Iterable[Tensor]) -> set[int]:
        """The numbers of the `parameters` that have a gradient, or whose leaf has, although no backward pass of this
        step has made one."""
        if -1 not in self._last_round:
            return set()
        each = enumerate(zip(self._last_round, self._parameters, parameters, strict=True))
        return {i for i, (last, leaf, p) in each if last < 0 and not (leaf.grad is None and p.grad is None)}

    def explain(self, numbers: Iterable[int]) -> None:
        """The loop itself has set these gradients."""
        for number in numbers:
            self._last_round[number] = self._round

    def received_in_last_round(self) -> list[bool]:
        """Whether each parameter got a gradient in the latest backward pass, on this rank."""
        return [last == self._round for last in self._last_round]

    def number_at(self, tensor: Tensor) -> int:
        """The number, from 1, of the parameter whose gradient is in `tensor`; 0 if it is the gradient of none.

        Fast for a gradient that backward has made. One that a strategy has put in its place is searched for.
        """
        address = tensor.data_ptr()
        if not address or tensor.numel() not in self._lengths:
            return 0
        found = self._index_at.get(address)
        if found is None or self._address(found) != address:
            found = next((index for index in range(len(self._parameters)) if self._address(index) == address), -1)
        return found + 1

    def _address(self, index: int) -> int:
        gradient = self._parameters[index].grad
        return gradient.data_ptr() if gradient is not None else 0

    def on_gradient(self, index: int, parameter: Tensor) -> None:
        """Backward has added up a gradient of the parameter with this number."""
        gradient = parameter.grad
        if gradient is not None:  # PyTorch DDP runs the hooks also behind an output that the loss leaves out
            if self.takes_one:
                if index in self._taken:
                    raise second_gradient(self._names[index])
                self._taken.add(index)
            self._last_round[index] = self._round
            self._index_at[gradient.data_ptr()] = index
            if self.inspects and self.first_nonfinite_round < 0 and not gradient.isfinite().all():
                self.first_nonfinite_round = self._round
        if (call := self._then[index]) is not None:
            call(parameter)


def hook_of(held: "weakref.ref[GradientWatch]", index: int) -> Callable[[Tensor], None]:
    """The one hook of a parameter.

    C++ holds it, where no garbage collector looks. One that held a strategy would keep it and its process groups until
    the process ends.
    """

    def run(parameter: Tensor) -> None:
        if (watch := held()) is not None:
            watch.on_gradient(index, parameter)

    return run


def second_gradient(name: str) -> OneRankError:
    """What to say when the parameter `name` gets another gradient in a micro-batch."""
    return OneRankError(
        f"{name} received a second gradient in one micro-batch, when the first might be reduced already: add losses up "
        "for one backward pass, or give each its own micro_batch; checkpoint modules that run twice with "
        "use_reentrant=False; with --pipeline-schedule zb-h1, use no weight in a product and elsewhere"
    )


def given_gradient() -> OneRankError:
    """What to say where a loop has set a gradient itself, as by `torch.autograd.grad`, and nobody reduces it."""
    return OneRankError(
        "a gradient was set in micro_batch() and not made by backward(), which this strategy does not reduce; call "
        "backward(), or take one up to zero2 that is written by hand"
    )


def refuse_graph_of_backward() -> None:
    """For a hook on an output, where weights are freed before a backward pass through this one could read them.

    Raises:
        OneRankError: This backward pass makes a graph, too.
    """
    if torch.is_grad_enabled():
        raise OneRankError(
            "backward with create_graph=True needs weights that sharded parameters free too early; use zero1, zero2 or "
            "a replicated choice"
        )

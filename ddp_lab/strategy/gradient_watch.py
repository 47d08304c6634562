"""Watches the gradients that backward makes on this rank, before they are reduced with those of other ranks.

A hook in Python takes longer than the gradient of a small parameter. So the hook of most parameters is `list.append`,
which notes an arrival and runs no Python. At a few parameters, such as the last one of a bucket, a hook takes up all
gradients that have arrived since.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.errors import OneRankError, SequenceError

Call = Callable[[int, Tensor | None], bool | None]


class GradientWatch:
    """Which parameters received a gradient in a step, and on request the first backward pass that made a bad one.

    Args:
        parameters: The trainable ones by name, in the order of `received`. Make the watch before a strategy adds its
            own hooks, so that it sees each gradient before communication changes it.

    Attributes:
        takes_one: Refuse a second gradient of a parameter in this backward pass, because the first one may be reduced
            already. In a pipeline the last backward pass of a stage may come in two: of inputs, and of weights.
        inspects: Look at the values of each gradient. This reads every gradient once more, so it is on only while the
            step is repeated to find the rank that made a gradient that is not finite.
        first_nonfinite_round: The first backward pass that made one; -1 if none did.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = list(parameters.values())
        self._lengths = {parameter.numel() for parameter in self._parameters}
        self._calls: dict[int, Call] = {}  # by the parameter
        self._arrived: list[Tensor] = []
        self._handles = {id(p): p.register_post_accumulate_grad_hook(self._arrived.append) for p in self._parameters}
        weakref.finalize(self, remove_hooks, self._handles, self._arrived).atexit = False
        self.inspects = self.takes_one = False
        self.begin_step()

    def on_arrival(self, parameters: Sequence[Tensor], call: Call, at: Iterable[Tensor] = ()) -> None:
        """Run `call(count, trigger)` when `count` more of `parameters` have a gradient. It runs after each parameter in
        `at` (its `trigger`), at the end of backward (no trigger), and after the last one once `call` returned True."""
        self._calls |= {id(parameter): call for parameter in parameters}
        for parameter in at:
            self._look_behind(parameter)

    def look_at_each(self) -> None:
        """From now on take up every gradient as it comes, before anybody can change it."""
        for parameter in self._parameters:
            self._look_behind(parameter)

    def _look_behind(self, parameter: Tensor) -> None:
        self._handles[id(parameter)].remove()
        self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(look_of(weakref.ref(self)))

    def begin_step(self) -> None:
        """Forget the step before."""
        self._round = self.first_nonfinite_round = -1
        self._arrived.clear()
        self._received: set[int] = set()
        self._in_round: set[int] = set()
        self._taken_keys: set[int] = set()
        self._number_at: dict[int, int] = {}  # by the address of a parameter's gradient

    def begin_round(self, continues: bool = False) -> None:
        """The backward pass of the next micro-batch follows; or, if it `continues`, the rest of one."""
        self.look()
        self._round += 1
        self._in_round = set()
        if not continues:
            self._taken_keys.clear()

    def look(self, trigger: Tensor | None = None) -> None:
        """Take up the gradients that have come since the last look. `trigger`: the parameter whose hook looks."""
        arrived = self._arrived.copy()
        self._arrived.clear()
        keys = [*map(id, arrived)]
        if self.takes_one:
            if len(set(keys)) < len(keys) or not self._taken_keys.isdisjoint(keys):
                raise second_gradient(next(self._names[k] for k in keys if k in self._taken_keys or keys.count(k) > 1))
            self._taken_keys.update(keys)
        self._received.update(keys)
        self._in_round.update(keys)
        if (
            self.inspects
            and self.first_nonfinite_round < 0
            and not all(p.grad is None or p.grad.isfinite().all() for p in arrived)
        ):
            self.first_nonfinite_round = self._round
        calls = [*map(self._calls.get, keys)]
        latest = dict(zip(calls, arrived, strict=True))
        for call, count in Counter(calls).items():
            if call is not None and call(count, trigger) and latest[call] is not trigger:
                self._look_behind(latest[call])

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Those of `parameters` that have a gradient got one in this round, by who runs no hooks."""
        self._arrived += (parameter for parameter in parameters if parameter.grad is not None)
        self.look()

    def received(self) -> list[bool]:
        """Whether each parameter got a gradient in this step, on this rank."""
        if len(self._received) == len(self._parameters):
            return [True] * len(self._parameters)
        return [id(parameter) in self._received for parameter in self._parameters]

    def received_in_last_round(self) -> list[bool]:
        """Whether each parameter got a gradient in the latest backward pass, on this rank."""
        self.look()
        return [id(parameter) in self._in_round for parameter in self._parameters]

    def unexplained(self, parameters: Iterable[Tensor]) -> set[int]:
        """The numbers of the `parameters` that have a gradient, or whose leaf has, although no backward pass of this
        step has made one."""
        if len(self._received) == len(self._parameters):
            return set()
        parameters = list(parameters)
        if all(parameter.grad is None for parameter in (*self._parameters, *parameters)):
            return set()
        slots = enumerate(zip(self.received(), self._parameters, parameters, strict=True))
        return {i for i, (received, leaf, p) in slots if not received and not (leaf.grad is None and p.grad is None)}

    def explain(self, numbers: Iterable[int]) -> None:
        """The loop itself has set these gradients."""
        keys = [id(self._parameters[number]) for number in numbers]
        self._received.update(keys)
        self._in_round.update(keys)

    def number_at(self, tensor: Tensor) -> int:
        """The number, from 1, of the parameter whose gradient is in `tensor`; 0 if it is the gradient of none."""
        address = tensor.data_ptr()
        if not address or tensor.numel() not in self._lengths:
            return 0
        number = self._number_at.get(address, 0)
        gradient = self._parameters[number - 1].grad if number else None
        if gradient is None or gradient.data_ptr() != address:
            grads = ((p.grad, number) for number, p in enumerate(self._parameters, 1))
            self._number_at = {grad.data_ptr(): number for grad, number in grads if grad is not None}
            number = self._number_at.get(address, 0)
        return number


def look_of(reference: "weakref.ref[GradientWatch]") -> Callable[[Tensor], None]:
    """A hook of a parameter.

    C++ holds it, where no garbage collector looks. One that held a strategy would keep it and its process groups until
    the process ends.
    """

    def run(parameter: Tensor) -> None:
        watch = reference()
        if watch is not None and parameter.grad is not None:  # PyTorch DDP also runs it for what the loss leaves out
            watch._arrived.append(parameter)
            watch.look(trigger=parameter)

    return run


def remove_hooks(handles: dict[int, Any], arrived: list[Tensor]) -> None:
    """When the watch is gone."""
    for handle in handles.values():
        handle.remove()
    arrived.clear()


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
    """For a hook on an output, where weights are freed before a backward pass through this one could read them."""
    if torch.is_grad_enabled():
        raise OneRankError(
            "backward with create_graph=True needs weights that sharded parameters free too early; use zero1, zero2 or "
            "a replicated strategy"
        )


# Who watches the collectives of this process, if anyone does ----------------------------------------------------------


class Observer(Protocol):
    """Attributes:
    gradients: Tells gradients apart, by the numbers of their parameters.
    """

    gradients: GradientWatch | None

    def digest(self, group: dist.ProcessGroup, /) -> int: ...

    def compare(self, group: dist.ProcessGroup, among: dist.ProcessGroup, /) -> SequenceError | None: ...


_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """From now on `observer` watches; None: nobody."""
    global _observer
    _observer = observer


def follow_gradients(watch: GradientWatch) -> None:
    """Tell gradients apart by the numbers that `watch` gives to their parameters."""
    if _observer is not None:
        _observer.gradients = watch


def digest(group: dist.ProcessGroup) -> int:
    """What this rank compares with the others of `group`; 0 if nothing is recorded."""
    return _observer.digest(group) if _observer is not None else 0


def agree_on_sequence(group: dist.ProcessGroup, among: dist.ProcessGroup | None = None) -> SequenceError | None:
    """Compare what each rank has recorded, after digests of `group` differed. Collective.

    Args:
        among: All who have seen that. Default: `group`.

    Returns:
        On every rank, an error that says where the collectives differ; None if no recorded ones do.
    """
    assert _observer is not None, "digests differ, so collectives are recorded"
    return _observer.compare(group, among or group)

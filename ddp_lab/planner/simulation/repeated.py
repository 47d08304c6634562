"""Operators that ran before on tensors of the same form: their answer is made at once, without running them again.

A model's blocks are alike, and so are the steps and the choices of a plan: nearly every operator has run before. What
an operator on tensors without data answers depends on nothing but their forms, and so does what it costs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs.calls import tensors_in
from ddp_lab.pretended.device import begin, extent

CPU = torch.device("cpu")
aten = torch.ops.aten
ABSOLUTE = frozenset((aten.as_strided, aten.as_strided_, aten.set_, aten.resize_))
"""Operators that place their answer in a storage, not in a tensor."""
CONSTANTS = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that an operator has made.

    Attributes:
        of: The tensor among the inputs whose storage it shares; None if it has one of its own.
        offset: Bytes from where that tensor begins; 0 without one.
        needed: Bytes from there to its end.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    of: int | None
    needed: int


@dataclass(frozen=True, slots=True)
class InputTensor:
    """The tensor at this place among the inputs."""

    of: int


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """What an operator answers. `call` is None if it touches no data."""

    answer: Any
    call: OperatorCall | None


@cache
def namespace_of(func: Any) -> str:
    return str(func.namespace)


recorded: dict[Any, RecordedCall] = {}
"""By `key_of`. It is as true of other simulations in this process."""


def form_of(values: Iterable[Any], inputs: list[Tensor], form: list[Any]) -> bool:
    """Append to `form` what `values`, arguments of an operator, are to its answer, and to `inputs` the tensors among
    them. Answers with whether that is all that the answer may depend on."""
    is_all = True
    for value in values:
        kind = type(value)
        if kind is FakeTensor or kind is Tensor:
            inputs.append(value)
            form += (kind, value.dtype, value.shape, value.stride())
            is_all = is_all and (kind is Tensor or value._fake_device == CPU)
        elif kind is list or kind is tuple:
            form.append(len(value))
            is_all = form_of(value, inputs, form) and is_all
        elif kind in CONSTANTS:
            form += (kind, value)
        else:
            is_all = False
            inputs += tensors_in((value,))
    return is_all


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[Tensor]) -> Any:
    """By what the answer of a call of `func` is known; its tensors are appended to `inputs`. None if the answer may
    depend on data."""
    form: list[Any] = [id(func)]  # it exists as long as torch
    is_all = form_of(args, inputs, form)
    if kwargs:
        form += kwargs
        is_all = form_of(kwargs.values(), inputs, form) and is_all
    if not is_all or namespace_of(func) != "aten" or len(inputs) > len(set(map(id, inputs))):
        return None
    kinds = {*map(type, inputs)}
    if Tensor in kinds and (FakeTensor not in kinds or func._schema.is_mutable):
        return None
    if func.overloadpacket in ABSOLUTE:
        form += [tensor.storage_offset() for tensor in inputs]
    return tuple(form)


def pattern_of(answer: Any, inputs: Sequence[Tensor]) -> Any:
    """How to make `answer` again from tensors like `inputs`; a ValueError if it holds data, or tensors that share a
    storage of their own."""
    places = {tensor.untyped_storage()._cdata: place for place, tensor in enumerate(inputs)}
    return part_of_pattern(answer, inputs, places, set())


def part_of_pattern(part: Any, inputs: Sequence[Tensor], places: Mapping[int, int], storages: set[int]) -> Any:
    """See `pattern_of`. No closure that calls itself: it would hold the inputs until a garbage collection."""
    if isinstance(part, Tensor):
        for place, tensor in enumerate(inputs):
            if part is tensor:
                return InputTensor(place)
        storage = part.untyped_storage()
        if type(part) is not FakeTensor or part._fake_device != CPU or storage._cdata in storages:
            raise ValueError("not of known form")
        of = places.get(storage._cdata)
        if of is None:
            storages.add(storage._cdata)
            return NewTensor(tuple(part.shape), part.stride(), int(part.storage_offset()), part.dtype, None, 0)
        offset = begin(part) - begin(inputs[of])
        return NewTensor(tuple(part.shape), part.stride(), offset, part.dtype, of, offset + extent(part))
    if type(part) in (list, tuple):
        return type(part)(part_of_pattern(item, inputs, places, storages) for item in part)
    if type(part) not in CONSTANTS:
        raise ValueError("not of known form")
    return part


class Maker:
    """Makes tensors without data, as `FakeTensorMode` does, but at once."""

    def __init__(self, mode: FakeTensorMode) -> None:
        with torch._C._DisableTorchDispatch():
            self._attributes = dict(vars(FakeTensor(mode, torch.empty(0, device="meta"), CPU)))

    def answer(self, pattern: Any, inputs: Sequence[Tensor]) -> Any:
        """The answer of an operator of this pattern. `NotImplemented` if a storage among its inputs is too small."""
        kind = type(pattern)
        if kind is NewTensor:
            return self._tensor(pattern, inputs)
        if kind is InputTensor:
            return inputs[pattern.of]
        if kind is tuple or kind is list:
            parts = [self.answer(part, inputs) for part in pattern]
            return NotImplemented if any(part is NotImplemented for part in parts) else kind(parts)
        return pattern

    def _tensor(self, pattern: NewTensor, inputs: Sequence[Tensor]) -> Any:
        with torch._C._DisableTorchDispatch():
            if pattern.of is None:
                plain = torch.empty_strided(pattern.shape, pattern.stride, dtype=pattern.dtype, device="meta")
            else:
                storage, first = inputs[pattern.of].untyped_storage(), begin(inputs[pattern.of])
                offset, remainder = divmod(first + pattern.offset, pattern.dtype.itemsize)
                if remainder or storage.nbytes() < first + pattern.needed:
                    return NotImplemented
                plain = torch.empty((), dtype=pattern.dtype, device="meta")
                plain.set_(storage, offset, pattern.shape, pattern.stride)
            tensor = Tensor._make_subclass(FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=CPU)
            torch._C._set_throw_on_mutable_data_ptr(tensor)
        vars(tensor).update(self._attributes)
        return tensor

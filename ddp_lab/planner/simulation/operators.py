"""Operators on tensors without data: how long they take and what they allocate.

A rank's batch holds its data. So do tensors made from literals (`torch.tensor([...])`), integers that count something,
and all that is computed from these alone. So ranks really agree on counts, and a model sees which tokens are padding.
Whatever is computed from a parameter holds no data.

This file depends on interfaces of torch that are not stable: `FakeTensorMode`, `TorchDispatchMode`.
"""

import dataclasses
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ddp_lab.planner.contracts import OperatorCall, OperatorCosts
from ddp_lab.planner.costs.calls import operator_call, tensors_in, touches_data
from ddp_lab.planner.costs.cluster import Host
from ddp_lab.planner.simulation.clock import Clock, Flight
from ddp_lab.planner.simulation.memory import MemoryTracker
from ddp_lab.planner.simulation.network import CannotSimulate, StepObserver, holds_data
from ddp_lab.planner.simulation.repeated import Maker, RecordedCall, form_of, key_of, namespace_of, pattern_of, recorded
from ddp_lab.pretended.device import resizes_seen

aten = torch.ops.aten
MOST_REAL = 2**22
"""Elements. A larger tensor is not computed, though it could be."""
PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
small: set[tuple[Any, ...]] = set()
"""Forms of operators and data whose answers have fewer: these need no simulation first."""
COUNTING = frozenset((aten.empty, aten.zeros, aten.ones, aten.full, aten.arange))
"""Operators that make new tensors. If these are integers, they hold data."""
ON_CUDA = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (
        "aten._scaled_dot_product_flash_attention_backward.default",
        "aten._scaled_dot_product_efficient_attention_backward.default",
    ),
}
"""The operators of attention on CUDA: in half precision without a mask, and otherwise (`sdp_utils.cpp`)."""
PLANNER = str(Path(__file__).parent.parent)
UNSIMULATED = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


class PretendedDevice(TorchDispatchMode):
    """Within this mode, above a `FakeTensorMode`, operators take their time on `clock`.

    Args:
        is_cuda: Whether the device is a GPU. Operators on tensors that hold data run on its host and take no time.
        host: What operators on offloaded tensors take, where the device is a GPU.
        observer: Gets each operator.
        guards: `ddp_lab.planner.simulation.network.Network.guards`: whoever touches these storages waits.

    Attributes:
        without_costs: Operators of which nothing is known, with the number of calls.
        phases: The current phases of the step (`ddp_lab.runtime.watch.phases`), the innermost last.
        is_building: Whether the model is being made. Its parameters hold no data, whatever they are made from.
    """

    def __init__(
        self,
        clock: Clock,
        costs: OperatorCosts,
        memory: MemoryTracker,
        is_cuda: bool,
        observer: StepObserver,
        guards: dict[int, Flight],
        host: Host,
    ) -> None:
        super().__init__()
        self._host = host
        self._clock, self._costs, self._memory = clock, costs, memory
        self._is_cuda, self._observer, self._guards = is_cuda, observer, guards
        self.without_costs: dict[str, int] = {}
        self.phases: list[str] = []
        self.is_building = False
        self.maker: Maker

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch's compiler, which is never at work here, is to be kept from each operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs, namespace = kwargs or {}, namespace_of(func)
        if namespace == "prim":
            return func(*args, **kwargs)
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a DTensor, say, calls the operators on this rank's part itself
        if namespace == "profiler":
            return self._follow_phase(func, args, kwargs)
        inputs: list[Tensor] = []
        key = key_of(func, args, kwargs, inputs)
        if self._guards:
            self._respect_collectives(inputs)
        before = recorded.get(key) if key else None
        answer = self.maker.answer(before.answer, inputs) if before else NotImplemented
        if before and answer is not NotImplemented:
            call, outputs = before.call, [answer] if type(answer) is FakeTensor else tensors_in((answer,))
        else:
            answer = self._run(func, inputs, args, kwargs)
            outputs = tensors_in((answer,))
            on_host = bool(outputs or inputs) and all(map(holds_data, outputs or inputs))
            if on_host and self._is_cuda:
                return answer
            call = operator_call(func, args, kwargs, answer) if touches_data(func) else None
            if key and key == key_of(func, args, kwargs, []) and (outputs or func._schema.is_mutable):
                with suppress(ValueError):
                    recorded[key] = RecordedCall(pattern_of(answer, inputs), call)
        if call:
            self._charge(call, kwargs, [*inputs, *outputs])
        self._memory.note(outputs, "activations" if {*self.phases[-1:]} & {"forward", "backward"} else "other")
        return answer

    # Running it -------------------------------------------------------------------------------------------------------

    def _run(self, func: Any, inputs: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        if inputs and all(map(holds_data, inputs)) and not (self.is_building and func is aten.lift_fresh.default):
            return self._run_on_data(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return self._answer(args[0])
        if func is aten.allclose.default or func is aten.equal.default:
            self._refuse_to_branch()
            return True
        answer = func(*args, **kwargs)
        if func.overloadpacket in COUNTING and not answer.is_floating_point() and answer.numel() <= MOST_REAL:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return answer

    def _run_on_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.lift_fresh.default:
            return args[0]
        form: list[Any] = [id(func)]
        is_known = form_of((*args, *kwargs.items()), [], form) and tuple(form) in small
        if not (is_known or func._schema.is_mutable or func is aten._local_scalar_dense.default):
            try:
                answer = func(*args, **kwargs)
                if any(tensor.numel() > MOST_REAL for tensor in tensors_in((answer,))):
                    return answer
                small.add(tuple(form))
            except UNSIMULATED:
                pass  # it can be run on data alone
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _answer(self, tensor: Tensor) -> Any:
        """The value that a strategy reads: all is well (a gradient is finite, a loss is some number)."""
        self._refuse_to_branch()
        return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1

    def _refuse_to_branch(self) -> None:
        if "forward" in self.phases:
            raise CannotSimulate(
                f"the model reads a value that depends on its weights ({place_of_call()}), and what it does next may "
                "depend on it; such a model can only be measured"
            )

    def _follow_phase(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.profiler._record_function_enter_new.default:
            self.phases.append(args[0])
        elif self.phases:
            self.phases.pop()
        self._memory.part = self.phases[0] if self.phases else ""
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _respect_collectives(self, inputs: Sequence[Tensor]) -> None:
        for tensor in inputs:
            flight = self._guards.pop(tensor.untyped_storage()._cdata, None)
            if flight is not None:
                self._clock.wait(flight)

    # Charging it ------------------------------------------------------------------------------------------------------

    def _charge(self, call: OperatorCall, kwargs: Any, tensors: Sequence[Tensor]) -> None:
        if self._is_cuda and call.name in ON_CUDA:
            flash, efficient = ON_CUDA[call.name]
            is_flash = call.dtypes[0] in ("bfloat16", "float16") and kwargs.get("attn_mask") is None
            call = dataclasses.replace(call, name=flash if is_flash else efficient)
        seconds = self._seconds(call, tensors)
        if seconds is None:
            self.without_costs[call.name] = self.without_costs.get(call.name, 0) + 1
        elif seconds > 0:
            start = self._clock.now_s
            self._clock.compute(seconds)
            self._observer.computed.append((call, self.phases[0] if self.phases else "", start, self._clock.now_s))

    def _seconds(self, call: OperatorCall, tensors: Sequence[Tensor]) -> float | None:
        looks = self._is_cuda and self._memory.has_host
        on_host = [self._memory.is_on_host(tensor) for tensor in tensors] if looks else [False]
        if not any(on_host):
            return self._costs.seconds(call)
        return call.bytes_moved / self._host.bytes_per_s if all(on_host) else self._host.copy_seconds(call.bytes_moved)


def place_of_call() -> str:
    """The innermost line of the call stack that is neither in torch nor in the planner."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.startswith(PLANNER):
            return f"{frame.filename}:{frame.lineno}"
    return "in torch"


def address(tensor: Tensor) -> int:
    """Address of a tensor without data: the same for two tensors that begin at the same place, else different."""
    return (tensor.untyped_storage()._cdata << 16) + tensor.storage_offset() * tensor.element_size()


@contextmanager
def without_data(device: PretendedDevice, memory: MemoryTracker, pretends_cuda: bool) -> Iterator[None]:
    """Within this context tensors hold no data but have addresses, and `memory` sees storages change size.
    `pretends_cuda`: take the defaults that optimizers have for parameters on CUDA."""
    plain_pointer = torch.UntypedStorage.data_ptr

    def pointer(storage: Any) -> int:
        return storage._cdata if storage.device.type == "meta" else plain_pointer(storage)

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(resizes_seen(memory.resized))
        stack.enter_context(patch(torch.UntypedStorage, "data_ptr", pointer))
        stack.enter_context(patch(FakeTensor, "data_ptr", address, create=True))
        if pretends_cuda:
            optimizer, foreach = import_module("torch.optim.optimizer"), torch.utils._foreach_utils
            devices = [*foreach._get_foreach_kernels_supported_devices(), "cpu"]
            stack.enter_context(patch(optimizer, "_get_foreach_kernels_supported_devices", lambda: devices))
            types = [*optimizer._foreach_supported_types, FakeTensor]
            stack.enter_context(patch(optimizer, "_foreach_supported_types", types))
        device.maker = Maker(stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True)))
        stack.enter_context(device)
        yield

"""Bytes that the simulated rank holds, by component, from the allocations that its code really makes.

Every storage is noted when an operator first answers with a tensor in it, follows `resize_`, and is removed when it
is freed. Its component is decided when it is made (by the phase of the step) and again when more is known: a strategy
says which tensors are parameters, gradients and optimizer states; any other tensor of a collective is a communication
buffer.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from torch import Tensor, UntypedStorage

from ddp_lab.planner.contracts import COMPONENTS, MODEL_STATES, MemoryCurve
from ddp_lab.planner.simulation.network import holds_data
from ddp_lab.pretended.device import Storages

HOST = "host"
"""Instead of a component: the tensor is in host memory, though it holds no data, and does not count."""
CUDA_BLOCK = 512
"""Bytes; the CUDA caching allocator rounds every request up to a multiple (`kMinBlockSize`)."""


@dataclass(eq=False)
class Allocation:
    """A storage that is alive."""

    nbytes: int
    component: str
    rounded: int


class MemoryTracker:
    """See the module's docstring.

    Args:
        is_cuda: Whether the rank's device is a GPU. Tensors that hold data lie on its host, and do not count.

    Attributes:
        has_host: Whether any tensor was ever assigned to `HOST`.
        part: Of the step, as of `MemoryCurve.peaks`.
    """

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda, self._block = is_cuda, CUDA_BLOCK if is_cuda else 1
        self._allocations = Storages[Allocation](self._forget)
        self._bytes = dict.fromkeys(COMPONENTS, 0)
        self._total = 0
        self._is_recording = self.has_host = False
        self.part: Hashable = ""

    def note(self, tensors: Iterable[Tensor], component: str, anywhere: bool = False) -> None:
        """Count those storages of `tensors` as `component` that are not counted yet. `anywhere`: on the host,
        too."""
        for tensor in tensors:
            if self._allocations.of(tensor) is None and (anywhere or not (self._is_cuda and holds_data(tensor))):
                storage = tensor.untyped_storage()
                allocation = Allocation(storage.nbytes(), component, self._rounded(storage.nbytes()))
                self._allocations.add(storage, allocation)
                self._change(component, allocation.rounded)

    def assign(self, tensors: Iterable[Tensor], component: str, unless: Iterable[str] = ()) -> None:
        """Count the storages of `tensors` as `component` from now on, except those that count as one of `unless`."""
        for tensor in tensors:
            allocation = self._allocations.of(tensor)
            if allocation is None:
                self.note([tensor], component)
            elif allocation.component not in (component, HOST, *unless):
                size = allocation.rounded
                self._change(allocation.component, -size)
                allocation.component = component
                self._change(component, size)
            self.has_host = self.has_host or component == HOST

    def are_states(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of `tensors` count as states of the model."""
        allocations = map(self._allocations.of, tensors)
        return all(allocation is not None and allocation.component in MODEL_STATES for allocation in allocations)

    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether it has been assigned to `HOST`."""
        allocation = self._allocations.of(tensor)
        return allocation is not None and allocation.component == HOST

    def resized(self, storage: UntypedStorage, before: int) -> None:
        """A storage has changed its size; `before`: the bytes that it had."""
        if allocation := self._allocations.get(storage._cdata):
            allocation.nbytes, rounded = storage.nbytes(), self._rounded(storage.nbytes())
            change, allocation.rounded = rounded - allocation.rounded, rounded
            self._change(allocation.component, change)

    def component_bytes(self, component: str) -> int:
        """As requested, not rounded."""
        return sum(allocation.nbytes for allocation in self._allocations.values() if allocation.component == component)

    def rename(self, component: str, to: str) -> None:
        """Count as `to` what counts as `component` now."""
        for allocation in self._allocations.values():
            if allocation.component == component:
                allocation.component = to
        self._change(to, self._bytes[component])
        self._change(component, -self._bytes[component])

    def start(self) -> None:
        """The curve begins here."""
        self._is_recording = True
        self._highest: dict[Hashable, int] = {}
        self._peaks: dict[Hashable, dict[str, int]] = {}
        self._mark()

    def stop(self) -> MemoryCurve:
        """The curve since `start`."""
        self._is_recording = False
        highest = max(self._highest, key=self._highest.__getitem__)
        return MemoryCurve(dict(self._bytes), self._peaks[highest], self._peaks)

    def _forget(self, allocation: Allocation) -> None:
        self._change(allocation.component, -allocation.rounded)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._block) * self._block

    def _change(self, component: str, size: int) -> None:
        if not size or component == HOST:
            return
        self._bytes[component] += size
        self._total += size
        if self._is_recording:
            self._mark()

    def _mark(self) -> None:
        if self._total > self._highest.get(self.part, -1):
            self._highest[self.part], self._peaks[self.part] = self._total, dict(self._bytes)

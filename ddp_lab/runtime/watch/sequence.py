"""Records every collective of this rank, and makes a digest of them that ranks compare.

If ranks issue collectives in different orders, Gloo mixes those of equal size without an error, and hangs or crashes in
others. So each process group gets a hook (`ProcessGroup.register_pre_hook`, which sees the reducer of PyTorch DDP too).
The hook writes each collective into the flight recorder. It also adds kind, elements, dtype and root to a rolling
digest, and for an all-reduced gradient the number of its parameter, because two gradients often have the same size.
In a profile, it says what was issued and in which group, since events of Gloo do not: by a mark, an event of no length
within the `c10d::` operator, such as `issued all_reduce #17 of 1000 float32 in ranks 0,2, tp`.
Ranks that see different samples compare digests in the exchange at the end of every step (`ddp_lab.strategy.exchange`),
which costs 8 bytes; ranks that see the same ones, in that at the beginning of the next. If digests differ, the ranks
compare what they have recorded.

A collective is completed once `Work.wait` has returned. Where that only orders streams, as on NCCL, `on_device.py`
follows it further.

Strategies do not know of this. A process has one `CollectiveRecorder` or none; without one the digest is always 0.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._profiler import _RecordFunctionFast as RecordFunction

from ddp_lab.collectives.calls import COMPLETED, ISSUED
from ddp_lab.collectives.kinds import ENDS, UNEVEN, kind_of
from ddp_lab.collectives.ranks import Ranks, group_name
from ddp_lab.runtime.errors import SequenceError
from ddp_lab.runtime.groups import description, gather_objects
from ddp_lab.runtime.link.delivery import PacedWork
from ddp_lab.runtime.watch.cause import ADVICE, NUMBERS, RankNames, find_mismatch
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.on_device import DeviceCollectives, only_orders_streams
from ddp_lab.runtime.watch.phases import current_step, waited, waiting
from ddp_lab.strategy.gradient_watch import GradientWatch, observe

HOOK_ID = 7_318_211
"""Any number that nobody else uses for hooks."""
DIGEST_BITS = 48
"""Digests are exchanged in fp64, which holds so many bits exactly."""

WAITED_FOR: tuple[type[dist.Work], ...] = (dist.Work, PacedWork)
"""Classes that have a `wait` of their own."""
MAKERS = ("_new_group_with_tag", "_register_pg_in_world")
"""Of `distributed_c10d`: after the one a new group is complete, after the other one that was split from another. So are
a mesh's groups made on NCCL."""
SIZED_BY_OUTPUT = frozenset(("all_gather", "scatter"))
"""Kinds whose outputs have the same size on every rank. Their inputs may be missing, or only a part of the whole."""


class CollectiveRecorder:
    """Writes the collectives of this process into `flight`. Use it through `recorded_collectives`."""

    def __init__(
        self, flight: FlightRecorder, on_device: DeviceCollectives, on_abort: Callable[[], None], names: RankNames
    ) -> None:
        self._flight, self._on_device, self._on_abort, self._names = flight, on_device, on_abort, names
        self._groups: list[tuple[dist.ProcessGroup, Ranks]] = []  # with its ranks
        self._hooks = ExitStack()  # removes them
        self._digests: dict[str, int] = defaultdict(int)  # by name of a group
        self._seqs: dict[str, int] = defaultdict(int)
        self._issuing: dict[str, int] = {}  # number of the collective that a group is issuing now
        self._open: WeakKeyDictionary[dist.Work, int] = WeakKeyDictionary()  # numbers of those that are not completed
        self._latest: dist.Work | None = None
        self.gradients: GradientWatch | None = None

    def follow(self, group: dist.ProcessGroup) -> None:
        """Record the collectives of `group` too, if they are not yet."""
        if any(group is followed for followed, _ in self._groups):
            return
        members, purpose = Ranks(dist.get_process_group_ranks(group)), description(group)
        self._groups.append((group, members))
        number = sum((members, purpose) == (ranks, description(group)) for group, ranks in self._groups)
        timeouts: dict[str, float] = {}
        for device in group._device_types:
            backend = group._get_backend(device)
            if only_orders_streams(backend, device):
                timeouts[device.type] = backend.options._timeout.total_seconds()
            if backend.supports_abort_hooks:
                backend.register_abort_hook(HOOK_ID, self._on_abort)
                self._hooks.callback(backend.unregister_abort_hook, HOOK_ID)
        before = self._before(group.group_name, group_name(members, purpose, number), timeouts)
        group.register_pre_hook(HOOK_ID, before)
        group.register_post_hook(HOOK_ID, self._after(group.group_name))
        self._hooks.callback(group.unregister_pre_hook, HOOK_ID)
        self._hooks.callback(group.unregister_post_hook, HOOK_ID)

    def stop(self) -> None:
        """Remove all hooks and references to groups, which would delay the end of these groups."""
        self._hooks.close()
        self._groups.clear()
        self._on_device.clear()
        self._latest = self.gradients = None

    def digest(self, group: dist.ProcessGroup) -> int:
        """Of all collectives so far in groups with the same ranks as `group`."""
        return sum(self._digests[name] for name in self._alike(group)) % 2**DIGEST_BITS

    def _alike(self, group: dist.ProcessGroup) -> list[str]:
        """Names of the groups with the same ranks."""
        members = tuple(dist.get_process_group_ranks(group))
        return [group.group_name for group, ranks in self._groups if ranks == members]

    def compare(self, group: dist.ProcessGroup, among: dist.ProcessGroup) -> SequenceError | None:
        """See `gradient_watch.agree_on_sequence`."""
        states = gather_objects(self._flight.state(), among)
        self._digests.update(dict.fromkeys(self._alike(group), 0))  # on all its ranks alike
        members = dist.get_process_group_ranks(among)
        mismatch = find_mismatch(dict(zip(members, states, strict=True)), self._names)
        if mismatch is None:
            return None
        error = SequenceError(f"step {current_step()}: {mismatch.text}; {ADVICE}; no parameter is updated yet")
        error.rank, call = next(iter(mismatch.calls.items()))
        error.collective = str(call)
        return error

    def _before(self, name: str, label: str, timeouts: Mapping[str, float]) -> Callable[[Any], None]:
        # The hook runs for every collective, so what does not change between calls is looked up once.
        flight, seqs, digests, issuing = self._flight, self._seqs, self._digests, self._issuing

        def hook(call: Any) -> None:
            inputs = call.input_tensors
            tensors = inputs or call.output_tensors
            kind, dtype, base = described(call.name, tensors[0].dtype if tensors else None)
            if not kind:
                return
            elements = sum([t.numel() for t in (call.output_tensors if kind in SIZED_BY_OUTPUT else inputs)])
            parameter = 0
            if kind == "all_reduce" and len(inputs) == 1 and self.gradients is not None:
                parameter = self.gradients.number_at(inputs[0])
            seqs[name] = seq = seqs[name] + 1
            with RecordFunction(f"issued {kind} #{seq} of {elements} {dtype} in {label}"):
                pass
            issuing[name] = number = flight.add(seq, kind, elements, dtype, label, call.root, parameter)
            if tensors and (timeout_s := timeouts.get(tensors[0].device.type)) is not None:
                queue = name if kind not in ENDS else None
                self._on_device.issue(number, queue, tensors[0].device, timeout_s)
            if kind not in UNEVEN:
                value = base + 1_000_003 * elements + 10_007 * (call.root + 1) + 101 * parameter
                digests[name] = (digests[name] * 6_364_136_223_846_793_005 + value) % 2**DIGEST_BITS

        return hook

    def _after(self, name: str) -> Callable[[Any], None]:
        def hook(call: Any) -> None:
            number = self._issuing.pop(name, None)
            if number is None:
                return
            if call.work is None:
                self._on_device.ordered(number)
                return
            waited["issued"] += 1
            self._on_device.issued(number, call.work)
            self._latest = call.work  # while Python holds it, the caller of the collective gets this same object
            self._open[call.work] = number

        return hook

    def wait(self, plain: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """`Work.wait`, recorded. If it raises, the record still shows the collective that the rank waited for."""
        number = self._open.pop(work, None)
        if number is None:
            return plain(work, *args, **kwargs)
        self._flight.page.waiting = number
        with waiting("collectives"):
            answer = plain(work, *args, **kwargs)
        waited["awaited"] += 1
        self._flight.page.waiting = -1
        if work is self._latest:
            self._latest = None  # it keeps its outputs alive
        self._on_device.ordered(number)
        self._flight.set_state(number, COMPLETED, before=ISSUED)
        return answer


@cache
def described(name: Any, dtype: torch.dtype | None) -> tuple[str, str, int]:
    """Kind, dtype, and a number for both. The kind is empty for a call that sends nothing."""
    kind = kind_of(name.name)
    dtype_name = str(dtype).removeprefix("torch.") if dtype is not None else ""
    return kind, dtype_name, zlib.crc32(f"{kind} {dtype_name}".encode())


@contextmanager
def recorded_collectives(
    flight: FlightRecorder,
    on_device: DeviceCollectives | None = None,
    on_abort: Callable[[], None] = lambda: None,
    names: RankNames = NUMBERS,
) -> Iterator[None]:
    """Within this context, the collectives of all process groups, new ones too, are recorded in `flight`. The default
    process group must exist.

    The owner of `on_device` calls `look`. A backend calls `on_abort` before it ends the process because a collective
    failed or timed out.
    """
    recorder = CollectiveRecorder(flight, on_device or DeviceCollectives(flight), on_abort, names)

    def recording(plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda work, *args, **kwargs: recorder.wait(plain, work, *args, **kwargs)

    def following(plain: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            before = set(c10d._world.pg_group_ranks)
            answer = plain(*args, **kwargs)
            for group in set(c10d._world.pg_group_ranks) - before:
                if isinstance(group, dist.ProcessGroup):  # ranks that are no members get a placeholder
                    recorder.follow(group)
            return answer

        return make

    assert dist.group.WORLD is not None, "join the process group first"
    with ExitStack() as stack:
        stack.callback(observe, None)
        observe(recorder)
        stack.callback(recorder.stop)
        recorder.follow(dist.group.WORLD)
        for kind in WAITED_FOR:
            stack.enter_context(mock.patch.object(kind, "wait", recording(kind.wait)))
        for name in MAKERS:
            stack.enter_context(mock.patch.object(c10d, name, following(getattr(c10d, name))))
        yield

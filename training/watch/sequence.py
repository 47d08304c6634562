"""Every collective of this rank, in order: noted on its board, and folded into a number that ranks compare.

Gloo mixes collectives of equal size without a word when ranks issue them in different order, and hangs or dies on
others. So each process group is given a hook (`ProcessGroup.register_pre_hook`, which sees the reducer of PyTorch DDP
too) that folds kind, elements, dtype and root of each collective into a rolling digest, and for an all-reduced gradient
the number of its parameter, since the sizes of two gradients are often equal. Ranks compare digests in the exchange
that ends every step (`communication.agreement`), which costs 8 bytes; where they differ, they show each other what they
issued.

Strategies know nothing of this: there is one recorder a process, or none, and without one the digest is always 0.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from training.errors import SequenceError
from training.watch.board import Board, Entry, Place
from training.watch.gradient_watch import GradientWatch
from training.watch.phases import current_step

HOOK_ID = 7_318_211
"""Any number that no one else takes for hooks of their own."""
DIGEST_BITS = 48
"""So that a digest is exact in fp64, in which it is exchanged."""

KINDS = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "all_reduce",
    "BROADCAST": "broadcast",
    "REDUCE": "reduce",
    "ALLGATHER": "all_gather",
    "ALLGATHER_BASE": "all_gather",
    "ALLGATHER_COALESCED": "all_gather",
    "ALLGATHER_INTO_TENSOR_COALESCED": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "REDUCE_SCATTER_BASE": "reduce_scatter",
    "REDUCE_SCATTER_TENSOR_COALESCED": "reduce_scatter",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
    "SCATTER": "scatter",
    "GATHER": "gather",
    "BARRIER": "barrier",
    "SEND": "send",
    "RECV": "recv",
}
"""By the name of `torch._C._distributed_c10d.HookOpName`."""
OUTPUT_COUNTS = frozenset(("all_gather", "scatter"))
"""Kinds of which every rank has outputs of equal size, but perhaps no inputs, or some that are no whole."""
UNEVEN = frozenset(("all_to_all", "send", "recv"))
"""Kinds in which ranks may issue different sizes, or nothing at all."""
MOST_OPEN = 4096
ADVICE = "ranks must issue the same collectives in the same order"


class CollectiveRecorder:
    """Notes the collectives of this process on `board`. Used through `recorded_collectives`."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._groups: list[tuple[dist.ProcessGroup, tuple[int, ...], str]] = []
        self._digests: dict[str, int] = defaultdict(int)
        self._counts: dict[str, int] = defaultdict(int)
        self._open: dict[int, int] = {}  # by id of a collective's handle: its number on the board
        self._issued: dict[str, int] = {}  # by group: number on the board of the collective that is being issued
        self._latest: dist.Work | None = None
        self.gradients: GradientWatch | None = None

    def follow(self, group: dist.ProcessGroup) -> None:
        """Note the collectives of `group`, too."""
        name, members = group.group_name, tuple(dist.get_process_group_ranks(group))
        label = group_label(members)
        if alike := sum(members == others for _, others, _ in self._groups):
            label += f" ({alike + 1})"
        self._groups.append((group, members, name))
        group.register_pre_hook(HOOK_ID, self._before(name, label.encode()))
        group.register_post_hook(HOOK_ID, self._after(name))

    def forget_groups(self) -> None:
        """Take all hooks away, and drop the groups, whose end they would delay."""
        for group, _, _ in self._groups:
            group.unregister_pre_hook(HOOK_ID)
            group.unregister_post_hook(HOOK_ID)
        self._groups.clear()
        self._latest = self.gradients = None

    def digest(self, group: dist.ProcessGroup) -> int:
        """Of all collectives so far in groups of the same ranks as `group`."""
        members = tuple(dist.get_process_group_ranks(group))
        total = sum(self._digests[name] for _, others, name in self._groups if others == members)
        return total % 2**DIGEST_BITS

    def reset(self) -> None:
        """Begin the digests anew, on all ranks alike."""
        self._digests.clear()

    def entries(self) -> tuple[Entry, ...]:
        return self._board.place().entries

    def _before(self, name: str, label: bytes) -> Callable[[Any], None]:
        # What does not change between calls is bound here: this runs for every collective.
        board, counts, digests, issued = self._board, self._counts, self._digests, self._issued
        known: dict[tuple[Any, torch.dtype | None], tuple[str, bytes, bytes, int]] = {}

        def hook(call: Any) -> None:
            inputs = call.input_tensors
            tensors = inputs or call.output_tensors
            key = (call.name, tensors[0].dtype if tensors else None)
            found = known.get(key)
            if found is None:
                found = known[key] = described(*key)
            kind, kind_text, dtype_text, base = found
            if not kind:
                return
            elements = sum([t.numel() for t in (call.output_tensors if kind in OUTPUT_COUNTS else inputs)])
            identity = self._identity(inputs[0]) if kind == "all_reduce" and len(inputs) == 1 else 0
            counts[name] = seq = counts[name] + 1
            issued[name] = board.add(seq, kind_text, elements, dtype_text, label, call.root, identity)
            if kind not in UNEVEN:
                value = base + 1_000_003 * elements + 10_007 * (call.root + 1) + 101 * identity
                digests[name] = (digests[name] * 6_364_136_223_846_793_005 + value) % 2**DIGEST_BITS

        return hook

    def _after(self, name: str) -> Callable[[Any], None]:
        def hook(call: Any) -> None:
            number = self._issued.pop(name, None)
            if number is None or call.work is None:
                return
            self._latest = call.work  # while Python holds it, its caller gets this same object, and it keeps its id
            self._open[id(call.work)] = number
            if len(self._open) > MOST_OPEN:  # those that C++ awaits, as DDP does, are never taken out
                for key in list(self._open)[: MOST_OPEN // 2]:
                    del self._open[key]

        return hook

    def _identity(self, tensor: torch.Tensor) -> int:
        return self.gradients.number_at(tensor) if self.gradients is not None else 0

    def wait(self, plain: Callable[..., Any], work: Any, *args: Any, **kwargs: Any) -> Any:
        """`Work.wait`, with what is awaited noted on the board. An error leaves it there: that is where it happened."""
        number = self._open.pop(id(work), None)
        if number is None:
            return plain(work, *args, **kwargs)
        self._board.set_waiting(number)
        answer = plain(work, *args, **kwargs)
        self._board.set_waiting(-1)
        self._board.complete(number)
        return answer


def group_label(ranks: Sequence[int]) -> str:
    """The same text on all ranks of a group, another for other ranks, of at most 19 characters (a board has 24)."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    label = "ranks " + ",".join(("," if run[-1] - run[0] == 1 else "-").join(map(str, run)) for run in runs)
    return label if len(label) <= 19 else f"{len(ranks)} ranks {zlib.crc32(repr(tuple(ranks)).encode()):08x}"


def described(name: Any, dtype: torch.dtype | None) -> tuple[str, bytes, bytes, int]:
    """Kind, its text and the dtype's for the board, and a number for both; an empty kind for what sends nothing."""
    kind = KINDS.get(name.name, "")
    dtype_name = str(dtype).removeprefix("torch.") if dtype is not None else ""
    return kind, kind.encode(), dtype_name.encode(), zlib.crc32(f"{kind} {dtype_name}".encode())


_recorder: CollectiveRecorder | None = None


def recorder() -> CollectiveRecorder | None:
    return _recorder


@contextmanager
def recorded_collectives(board: Board) -> Iterator[CollectiveRecorder]:
    """Within this context, all collectives of all groups, those to come among them, are noted on `board`.

    The default process group must exist.
    """
    global _recorder
    found = _recorder = CollectiveRecorder(board)
    plain_wait, plain_new = dist.Work.wait, c10d._new_group_with_tag

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        return found.wait(plain_wait, work, *args, **kwargs)

    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = plain_new(*args, **kwargs)
        if isinstance(group, dist.ProcessGroup):  # on other ranks it is a mark for those that are no members
            found.follow(group)
        return group

    assert dist.group.WORLD is not None, "join the process group first"
    found.follow(dist.group.WORLD)
    dist.Work.wait = wait  # type: ignore[method-assign, assignment]
    c10d._new_group_with_tag = new_group
    try:
        yield found
    finally:
        dist.Work.wait = plain_wait  # type: ignore[method-assign]
        c10d._new_group_with_tag = plain_new
        found.forget_groups()
        _recorder = None


def digest(group: dist.ProcessGroup) -> int:
    """What this rank compares with the others of `group`; 0 where nothing is recorded."""
    return _recorder.digest(group) if _recorder is not None else 0


def follow_gradients(watch: GradientWatch) -> None:
    """Tell gradients apart by the numbers that `watch` gives them."""
    if _recorder is not None:
        _recorder.gradients = watch


def agree_on_sequence(group: dist.ProcessGroup) -> SequenceError | None:
    """Compare what each rank has issued, after digests differed. Collective.

    Returns:
        An error that says where the ranks part, on every rank alike; None if what differs cannot be told to be wrong.
    """
    found = recorder()
    assert found is not None, "digests differ, so collectives are recorded"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, found.entries(), group=group)
    found.reset()
    members = dist.get_process_group_ranks(group)
    by_rank = dict(zip(members, everyone, strict=True))
    parting = first_difference(by_rank)
    if parting is None:
        return None
    error = SequenceError(f"step {current_step()}: {difference(by_rank)}; {ADVICE}; no parameter is updated yet")
    error.rank, entry = next(iter(parting.items()))
    error.collective = str(entry)
    return error


def difference(entries: Mapping[int, Sequence[Entry]]) -> str | None:
    """Where ranks issued different collectives first, by rank; None if nowhere, as far as their entries overlap."""
    parting = first_difference(entries)
    if parting is None:
        return None
    seq = next(iter(parting.values())).seq
    parts: dict[str, list[int]] = defaultdict(list)
    for rank, entry in parting.items():
        parts[detail(entry)].append(rank)
    said = "; ".join(f"rank {', '.join(map(str, ranks))} {text}" for text, ranks in parts.items())
    return f"collective #{seq} differs between ranks: {said}"


def deadlock(places: Mapping[int, Place]) -> str | None:
    """Where ranks wait for each other for ever, in collectives of different groups; None if they do not.

    That is so if each of them waits for a collective that another of them has not issued: none will issue anything
    more. Ranks that issue the same collectives in the same order are never in that state.
    """
    issued = {rank: latest_of_groups(place.entries) for rank, place in places.items()}
    parts = []
    for rank, place in places.items():
        awaited = place.waits_for
        if awaited is None:
            return None
        missing = [other for other, latest in issued.items() if latest.get(awaited.group, awaited.seq) < awaited.seq]
        if not missing:
            return None
        others = ", ".join(map(str, missing))
        parts.append(f"rank {rank} waits in {awaited} ({awaited.group}), which rank {others} has not issued")
    return f"collective differs between ranks: {'; '.join(parts)}" if len(parts) > 1 else None


def latest_of_groups(entries: Sequence[Entry]) -> dict[str, int]:
    """By group, the number of the collective that was issued last."""
    latest: dict[str, int] = {}
    for entry in entries:
        latest[entry.group] = max(entry.seq, latest.get(entry.group, 0))
    return latest


def detail(entry: Entry) -> str:
    text = f"{entry.kind} of {entry.elements} {entry.dtype or 'elements'}"
    if entry.root >= 0:
        text += f" from or to rank {entry.root}"
    return text + (f" (gradient of trainable parameter {entry.identity - 1})" if entry.identity else "")


def first_difference(entries: Mapping[int, Sequence[Entry]]) -> dict[int, Entry] | None:
    """By rank, the first collective of a group that is not the same on all ranks that have issued it."""
    by_group: dict[str, dict[int, dict[int, Entry]]] = defaultdict(lambda: defaultdict(dict))
    for rank, issued in entries.items():
        for entry in issued:
            by_group[entry.group][entry.seq][rank] = entry
    found = [
        (min(entry.time_s for entry in same.values()), same)
        for sequence in by_group.values()
        for same in sequence.values()
        if any(differ(one, other) for one in same.values() for other in same.values())
    ]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def differ(one: Entry, other: Entry) -> bool:
    if one.kind != other.kind:
        return True
    if one.kind in UNEVEN:
        return False
    if (one.elements, one.dtype, one.root) != (other.elements, other.dtype, other.root):
        return True
    return bool(one.identity and other.identity and one.identity != other.identity)

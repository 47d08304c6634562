"""What ranks know of each other: boards that outlive their process, the collective sequence, and the first cause."""

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from scripts.sweep_state import SweepState
from tests.dying import keep_a_board_and_wait
from tests.ranks import RankPool
from training.errors import SequenceError, UserError
from training.watch.board import Board, Entry, Place
from training.watch.cause import Seen, Statement, first_cause
from training.watch.gradient_watch import GradientWatch
from training.watch.sequence import (
    agree_on_sequence,
    deadlock,
    difference,
    digest,
    follow_gradients,
    group_label,
    recorded_collectives,
)
from training.watch.watcher import kind_of, text_of

# Boards --------------------------------------------------------------------------------------------------------------


def test_a_board_outlives_its_process() -> None:
    context = multiprocessing.get_context("spawn")
    paths = context.Queue()
    process = context.Process(target=keep_a_board_and_wait, args=(paths,))
    process.start()
    try:
        board = Board.open(Path(paths.get(timeout=60)))
        assert not board.is_abandoned()
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(timeout=60)
        assert board.is_abandoned() and board.statement() is None and not board.is_finished()
        place = board.place()
    finally:
        process.kill()
    assert str(place) == "in step 7 during backward, in broadcast #2 of 4 int64" and place.rank == 3
    assert [entry.state for entry in place.entries] == ["completed", "issued"]
    assert Place.from_dict(place.to_dict()) == place


def test_a_ring_keeps_the_latest() -> None:
    board = Board.make(rank=0)
    for seq in range(1, 5001):
        board.add(seq, b"all_reduce", seq, b"float32", b"ranks 0,1", -1, 0)
    sequence = [entry.seq for entry in board.place().entries]
    assert sequence == list(range(5000 - 2047, 5001))
    board.state({"kind": "failed", "text": "x" * 100_000, "time_s": 0.0, "traceback": "y"})
    statement = board.statement()
    assert statement is not None and statement["text"] == "x" * 2000  # cut, but there
    board.close()


# The sequence --------------------------------------------------------------------------------------------------------


def exchange(order: str) -> str | None:
    """All-reduce two gradients of equal size; on rank 1 in another order, or spoiled, as `order` says."""
    parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    board = Board.make(dist.get_rank())
    with recorded_collectives(board):
        watch = GradientWatch(parameters)
        follow_gradients(watch)
        sum((parameter * 2).sum() for parameter in parameters).backward()
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if dist.get_rank() == 1 and order == "swapped":
            gradients.reverse()
        if dist.get_rank() == 1 and order == "unknown":  # a copy, of which nobody can tell whose gradient it is
            gradients = [gradient.clone() for gradient in gradients]
        for gradient in gradients:
            dist.all_reduce(gradient)
        pair = dist.new_group([0, 1])  # made later, and followed all the same
        work = dist.broadcast(torch.zeros(3), src=0, group=pair, async_op=True)
        assert work is not None
        work.wait()
        both = [0.0, 0.0]
        dist.all_gather_object(both, digest(dist.group.WORLD))
        problem = agree_on_sequence(dist.group.WORLD) if both[0] != both[1] else None
        again: list[Any] = [None, None]
        dist.all_gather_object(again, digest(dist.group.WORLD))
        entries = board.place().entries
    board.close()
    dist.destroy_process_group(pair)
    assert [entry.kind for entry in entries[:2]] == ["all_reduce"] * 2
    (broadcast,) = [entry for entry in entries if entry.kind == "broadcast" and entry.elements == 3]
    assert broadcast.state == "completed" and broadcast.group == "ranks 0,1 (2)" and broadcast.seq == 1
    assert both[0] == both[1] or problem is not None or again[0] == again[1], "digests begin anew"
    assert problem is None or isinstance(problem, SequenceError)
    return str(problem) if problem else None


@pytest.mark.parametrize("order", ["same", "swapped", "unknown"])
def test_the_order_of_equal_gradients(ranks: RankPool, order: str) -> None:
    answers = ranks.run(2, exchange, order)
    assert answers[0] == answers[1]
    if order == "swapped":
        assert (
            "#1 differs between ranks: rank 0 all_reduce of 8 float32 (gradient of trainable parameter 0); "
            in answers[0]
        )
        assert "rank 1 all_reduce of 8 float32 (gradient of trainable parameter 1)" in answers[0]
    else:
        assert answers[0] is None


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=40, unique=True), st.integers(0, 2))
def test_groups_of_other_ranks_have_other_names(ranks: list[int], which: int) -> None:
    label = group_label(sorted(ranks))
    assert len(label) <= 19 and label == group_label(sorted(ranks))
    assert label != group_label(sorted({*ranks, 4001 + which}))
    assert [group_label(some) for some in ((0, 1), range(16), (3,), (0, 1, 2, 5, 7, 8))] == [
        "ranks 0,1",
        "ranks 0-15",
        "ranks 3",
        "ranks 0-2,5,7,8",
    ]


def entry(seq: int, kind: str = "all_reduce", elements: int = 10, dtype: str = "float32", **changes: Any) -> Entry:
    values = {"group": "ranks 0,1", "root": -1, "identity": 0, "state": "completed", "time_s": float(seq)}
    return Entry(**{"seq": seq, "kind": kind, "elements": elements, "dtype": dtype, **values, **changes})


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (entry(2), False),
        (entry(2, state="issued", time_s=9.0), False),
        (entry(2, kind="broadcast", root=0), True),
        (entry(2, elements=11), True),
        (entry(2, dtype="float64"), True),
        (entry(2, identity=5), False),  # of the other, nobody knows
        (entry(2, group="ranks 1,2", elements=11), False),
    ],
)
def test_where_sequences_part(other: Entry, differs: bool) -> None:
    found = difference({0: [entry(1), entry(2), entry(3)], 1: [entry(1), other]})
    assert (found is not None) == differs
    assert not differs or (found is not None and "#2 differs" in found)


def test_sizes_of_all_to_all_may_differ() -> None:
    one, other = (entry(1, kind="all_to_all", elements=size) for size in (3, 5))
    assert difference({0: [one], 1: [other]}) is None


# The cause -----------------------------------------------------------------------------------------------------------


def place(rank: int, *entries: Entry, waits: bool = False, phase: str = "backward") -> Place:
    return Place(rank, 7, phase, entries, entries[-1] if waits else None, since_s=100.0 + rank, beat_s=0.0)


def said(kind: str, text: str = "it broke", time_s: float = 1.0) -> Statement:
    return Statement(kind, text, time_s, "trace")


def test_a_killed_rank_comes_before_its_victims() -> None:
    seen = {
        0: Seen(place(0, entry(1), waits=True), said("connection", "Connection closed by peer")),
        1: Seen(place(1, entry(1)), None, is_gone=True),
        2: Seen(place(2, entry(1)), said("signal", "SIGTERM")),
    }
    ending = first_cause(seen)
    assert (ending.how, ending.rank, ending.step, ending.phase) == ("killed", 1, 7, "backward")
    assert (
        ending.message is not None and "rank 1 was killed" in ending.message and "after all_reduce #1" in ending.message
    )
    assert "want of memory" in str(first_cause(seen, out_of_memory=True).message)


def test_the_first_failure_comes_before_later_ones() -> None:
    seen = {
        0: Seen(place(0), said("failed", "KeyError: 2", time_s=5.0)),
        1: Seen(place(1), said("failed", "ValueError: 1", time_s=4.0)),
        2: Seen(place(2), said("noticed", time_s=4.1)),
    }
    ending = first_cause(seen)
    assert (ending.how, ending.rank, ending.traceback) == ("failed", 1, "trace")
    assert ending.message == "rank 1 failed in step 7 during backward: ValueError: 1"


def test_a_crash_in_collectives_that_differ_is_a_mismatch() -> None:
    """Gloo ends a process with SIGABRT where sizes differ: that rank is a victim."""
    seen = {
        0: Seen(place(0, entry(1), entry(2)), said("signal", "SIGTERM")),
        1: Seen(place(1, entry(1), entry(2, elements=11)), None, is_gone=True, crash="Fatal Python error: Aborted"),
    }
    ending = first_cause(seen)
    assert ending.how == "mismatched" and "#2 differs between ranks" in str(ending.message)
    assert ending.collective == "all_reduce #2 of 10 float32"


def test_the_rank_that_does_not_come_is_named() -> None:
    seen = {
        0: Seen(place(0, entry(1), entry(2), waits=True), said("timeout")),
        1: Seen(place(1, entry(1), phase="forward"), said("noticed")),
        2: Seen(place(2, entry(1), entry(2), waits=True), said("noticed")),
    }
    ending = first_cause(seen)
    assert (ending.how, ending.rank, ending.phase) == ("hung", 1, "forward")
    assert ending.collective == "missing in all_reduce #2 of 10 float32"
    assert "rank 1 hangs in step 7 during forward" in str(ending.message)


def test_of_several_killed_ranks_the_first_is_named_even_where_others_failed() -> None:
    seen = {
        0: Seen(place(0), said("failed", "OSError: no peer")),
        1: Seen(place(2), None, is_gone=True),
        2: Seen(place(1), None, is_gone=True),  # the last sign of it is older
    }
    ending = first_cause(seen)
    assert (ending.how, ending.rank) == ("killed", 2) and "ranks 1, 2; first rank 2 was killed" in str(ending.message)


def test_ranks_that_are_told_to_stop_in_different_places_do_not_differ() -> None:
    """One had issued what the other had not yet: with signals, that is no mismatch."""
    seen = {
        0: Seen(place(0, entry(1), entry(2)), said("signal", "SIGTERM")),
        1: Seen(place(1, entry(1), entry(2, elements=11)), said("signal", "SIGTERM")),
    }
    assert first_cause(seen).how == "interrupted"


def test_of_those_that_do_not_come_the_one_that_is_behind_is_named() -> None:
    seen = {
        0: Seen(place(0, entry(1), entry(2)), said("noticed")),  # it is past that collective
        1: Seen(place(1, entry(1), entry(2), waits=True), said("timeout")),
        2: Seen(place(2, entry(1)), said("noticed")),
    }
    ending = first_cause(seen)
    assert (ending.how, ending.rank) == ("hung", 2) and str(ending.message).startswith("rank 2 hangs")


def test_ranks_that_wait_for_each_other_in_different_groups() -> None:
    """Nothing differs within a group, and no timeout has passed, but nobody will ever go on."""
    second = entry(5, group="ranks 0,1 (2)")
    seen = {
        0: Seen(place(0, entry(1), entry(4, group="ranks 0,1 (2)"), second, waits=True), said("mismatch")),
        1: Seen(place(1, entry(4, group="ranks 0,1 (2)"), entry(1), entry(2), waits=True), said("noticed")),
    }
    ending = first_cause(seen)
    assert ending.how == "mismatched" and ending.step == 7
    assert "rank 0 waits in all_reduce #5 of 10 float32 (ranks 0,1 (2)), which rank 1 has not issued" in str(
        ending.message
    )
    places = {rank: one.place for rank, one in seen.items() if one.place is not None}
    assert deadlock(places) is not None
    busy = {**places, 1: replace(places[1], waits_for=None)}
    assert deadlock(busy) is None, "rank 1 may yet issue it"
    issued = {**places, 1: replace(places[1], entries=(*places[1].entries, second))}
    assert deadlock(issued) is None, "rank 0 goes on in a moment"


def test_ranks_whose_torchrun_has_gone() -> None:
    seen = {rank: Seen(place(rank), said("orphaned", "torchrun has gone", 1.0 + rank)) for rank in (0, 1)}
    ending = first_cause(seen)
    assert ending.how == "interrupted" and str(ending.message).startswith("torchrun has gone, so the ranks ended")


@pytest.mark.parametrize(("signalled", "expected"), [((0, 1), "stopped by SIGINT in"), ((1,), "rank 1 was stopped by")])
def test_signals_are_interruptions(signalled: tuple[int, ...], expected: str) -> None:
    seen = {rank: Seen(place(rank), said("signal" if rank in signalled else "noticed", "SIGINT")) for rank in (0, 1)}
    ending = first_cause(seen)
    assert ending.how == "interrupted" and str(ending.message).startswith(expected)


def test_a_node_that_cannot_be_reached() -> None:
    seen = {0: Seen(place(0, entry(1), waits=True), said("connection")), 1: Seen(None, None)}
    ending = first_cause(seen)
    assert (ending.how, ending.rank) == ("lost", 1) and "rank 1 cannot be reached" in str(ending.message)


def test_exceptions_of_collectives_are_told_from_others() -> None:
    assert kind_of(ValueError("timed out"), in_collective=False) == "failed"
    assert kind_of(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), False) == "connection"
    assert kind_of(RuntimeError("Timed out waiting 6000ms for recv operation"), True) == "timeout"
    assert kind_of(RuntimeError("op.preamble.length <= op.nbytes"), True) == "collective"
    assert "--global-batch-size" in text_of(MemoryError())


# An interrupted sweep ------------------------------------------------------------------------------------------------


def test_a_sweep_goes_on_only_with_the_same_settings(tmp_path: Path) -> None:
    first = SweepState(tmp_path, "ddp", {"ranks": 2, "flags": ["--seed", "1"]})
    with pytest.raises(UserError, match="no interrupted sweep"):
        first.go_on()
    first.add("simple_ddp")
    second = SweepState(tmp_path, "ddp", {"ranks": 2, "flags": ["--seed", "1"]})
    second.go_on()
    assert second.finished == ["simple_ddp"]
    for settings in ({"ranks": 4, "flags": ["--seed", "1"]}, {"ranks": 2, "flags": []}):
        with pytest.raises(UserError, match="give the same"):
            SweepState(tmp_path, "ddp", settings).go_on()
    second.close()
    with pytest.raises(UserError, match="no interrupted sweep"):
        second.go_on()
    (tmp_path / "profile" / "ddp.sweep.json").write_text("[1")
    with pytest.raises(UserError, match="cannot be read"):
        second.go_on()

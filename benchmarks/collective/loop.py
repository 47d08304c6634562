"""The order in which collectives, dtypes and sizes are measured, and how one of them is measured."""

import argparse
import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.collective.operations import DTYPES, OPERATIONS, Call
from benchmarks.collective.sizes import Measured, available_memory, size_text
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import OneRankError

if TYPE_CHECKING:
    from benchmarks.collective.results import Results

FEWEST_CALLS, MOST_CALLS = 3, 1000
MOST_COPIES = 64
"""Of a tensor, for --spread: small tensors stay in caches in training, too."""
IN_A_ROW_S, MOST_IN_A_ROW = 1e-3, 20
"""On CUDA, calls follow each other for so long: a single small one would show how long Python takes to launch it."""
WARMUP_SHARE = 0.2
"""Of --seconds-per-size, for warm-up calls beyond the first two."""
USABLE = 0.9
"""Of the free memory; other things grow meanwhile."""


class RanksLostError(OneRankError):
    """Another rank is gone, or does not answer."""


class Skipped(Exception):
    """A size that cannot be measured here; all ranks know."""


def measure_all(options: argparse.Namespace, ranks: Ranks, results: "Results | None") -> None:
    """Measure what the command line names. Collective.

    Args:
        results: Takes what was measured; on rank 0 alone.

    Raises:
        RanksLostError: another rank has gone.
    """
    bench = Bench(options, ranks)
    for collective, type_name in itertools.product(options.collectives, options.dtypes):
        if collective == "barrier":
            if type_name != options.dtypes[0]:
                continue
            type_name = ""
        if results:
            results.begin(collective, type_name)
        for size, count in sizes_of(collective, type_name, options.sizes, ranks):
            what = f"{collective} {type_name} of {size_text(size)}"
            try:
                measured = bench.measure(collective, type_name, size, count)
            except Skipped as reason:
                if results:
                    results.skip(f"{what} on {ranks.world_size} ranks: {reason}")
                continue
            except RuntimeError as error:
                raise RanksLostError(
                    f"rank {ranks.rank} lost another one at {what}: {first_line(error)}; what was measured until then "
                    "is in the files"
                ) from None
            if results:
                results.add(measured)
        if results:
            results.end(collective, type_name)


def sizes_of(collective: str, type_name: str, sizes: list[int], ranks: Ranks) -> list[tuple[int, int]]:
    """Bytes and elements of each size: a whole number of elements, and of parts where a tensor is divided."""
    if not type_name:
        return [(0, 0)]
    item, unit = DTYPES[type_name].itemsize, ranks.world_size if OPERATIONS[collective].is_divided else 1
    counts = dict.fromkeys(max(size // item // unit, 1) * unit for size in sizes)
    return [(count * item, count) for count in counts]


class Bench:
    """Measures one collective at one size. Every method is collective."""

    def __init__(self, options: argparse.Namespace, ranks: Ranks) -> None:
        self._options, self._ranks = options, ranks
        self._control = dist.new_group(backend="gloo")  # over CPU, so that clocks and barriers do not queue on a GPU

    def measure(self, collective: str, type_name: str, size: int, count: int) -> Measured:
        """

        Raises:
            Skipped: too large for some rank's memory, or not supported by the backend; on every rank.
            RuntimeError: another rank is lost.
        """
        operation = OPERATIONS[collective]
        dtype = DTYPES[type_name] if type_name else torch.float32
        copies = self._copies(size)
        self._require_memory(int(size * operation.memory * copies))
        counted = count // self._ranks.world_size if operation.is_divided else count
        seconds, wrong = self._time(lambda: operation.make(count, dtype, self._ranks), copies)
        return Measured(collective, type_name, operation.redop, size, counted, seconds, wrong if size else None)

    def _copies(self, size: int) -> int:
        """The number of tensors that calls use in turn."""
        return min(-(-self._options.spread // max(size, 1)), MOST_COPIES) if self._options.spread else 1

    def _time(self, make: Callable[[], Call], copies: int) -> tuple[list[float], int]:
        """Seconds of each timed call, on its slowest rank; wrong elements of a checked call, over all ranks.

        Args:
            copies: Of the call, each on tensors of its own.
        """
        made: list[Call] = []

        def prepare() -> None:
            made.extend(make() for _ in range(copies))
            for call in made:
                call.clear()
            made[0].fill()

        self._require_success(prepare)
        call, turns = made[0], itertools.cycle(made)
        self._require_success(call.run)
        call.clear()
        budget = self._options.seconds_per_size
        (estimate,) = self._slowest([self._timed(turns, in_a_row=1)])
        for _ in range(min(self._options.warmup - 2, int(WARMUP_SHARE * budget / estimate))):
            call.run()
        call.fill()
        call.run()
        wrong = torch.tensor(call.count_wrong())
        dist.all_reduce(wrong, group=self._control)
        call.clear()
        in_a_row = self._options.in_a_row or self._calls_in_a_row(estimate)
        affordable = int(budget / estimate / in_a_row)
        calls = self._options.iterations or min(max(affordable, FEWEST_CALLS), MOST_CALLS)
        return self._slowest([self._timed(turns, in_a_row) for _ in range(calls)]), int(wrong)

    def _calls_in_a_row(self, estimate: float) -> int:
        """The default, for calls of about `estimate` seconds."""
        if self._ranks.device.type != "cuda":
            return 1
        return min(max(int(IN_A_ROW_S / estimate), 1), MOST_IN_A_ROW)

    def _timed(self, turns: Iterator[Call], in_a_row: int) -> float:
        """Seconds of a call on this rank, from a start that all ranks share; the mean of those in a row, if several."""
        self._synchronize()
        dist.barrier(group=self._control)
        start = time.perf_counter()
        for _ in range(in_a_row):
            next(turns).run()
        self._synchronize()
        return (time.perf_counter() - start) / in_a_row

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)

    def _slowest(self, seconds: list[float]) -> list[float]:
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._control)
        return times.tolist()

    def _require_memory(self, needed: int) -> None:
        room = torch.tensor(min(room_of_rank(self._ranks), torch.iinfo(torch.int64).max))
        dist.all_reduce(room, dist.ReduceOp.MIN, group=self._control)
        if needed > int(room):
            raise Skipped(f"needs {size_text(needed)} a rank, and one has only {size_text(int(room))}")

    def _require_success(self, action: Callable[[], object]) -> None:
        """Run `action`, which may fail on all ranks alike, such as for lack of memory or of support."""
        own = None
        try:
            action()
            self._synchronize()
        except RuntimeError as error:
            own = first_line(error)
        problems: list[str | None] = [None] * self._ranks.world_size
        dist.all_gather_object(problems, own, group=self._control)
        for rank, problem in enumerate(problems):
            if problem:
                raise Skipped(f"rank {rank}: {problem}")


def room_of_rank(ranks: Ranks) -> int:
    """Bytes that this rank may take, if all ranks of its node, or of its GPU, take as many."""
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world_size))
    if ranks.device.type == "cuda":
        sharing = -(-on_node // torch.cuda.device_count())
        return int(USABLE * torch.cuda.mem_get_info(ranks.device)[0] / sharing)
    available = available_memory()
    return torch.iinfo(torch.int64).max if available is None else int(USABLE * available / on_node)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

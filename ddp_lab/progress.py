"""What long work says of itself on standard error: a bar that moves on a terminal, lines elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MOST_LINES = 20
"""Where there is no bar, about this many lines tell of the way."""
STILL_S = 30.0
"""After so long without a line, one says that the work goes on."""
UNKNOWN = 100
"""What a total is taken for that is not known."""


@contextmanager
def long_work(doing: str, total: int | None = None, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Say what is begun. Yields a function to call when one more of `total` things is done, with a line on it, or an
    empty one to move the bar alone.

    Args:
        total: None if it is not known.
        shown: False on ranks that stay silent.
    """
    from rich import progress
    from rich.console import Console

    console, begun, done = Console(stderr=True, highlight=False), time.monotonic(), 0
    if not shown:
        yield lambda said: None
    elif console.is_terminal:
        columns: list[progress.ProgressColumn] = [progress.TextColumn("{task.description}", markup=False)]
        columns += [progress.BarColumn(24), progress.TimeElapsedColumn()]
        if total is not None:
            columns += [progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
        period_s = 3600  # of what is done, for the estimate: some things take minutes
        with progress.Progress(
            *columns, console=console, transient=True, refresh_per_second=2, speed_estimate_period=period_s
        ) as bar:
            task = bar.add_task(doing, total=total)

            def advance(said: str) -> None:
                if said:
                    console.print(said, markup=False, soft_wrap=True)
                bar.advance(task)

            yield advance
    else:
        print(doing, file=sys.stderr, flush=True)
        every = max(1, (total or UNKNOWN) // MOST_LINES)
        has_ended, lines = threading.Event(), 0

        def say_still() -> None:
            before = 0
            while not has_ended.wait(STILL_S):
                if lines == before:
                    of = f", {done} of {total} done" if total else ""
                    print(f"{doing}: {time.monotonic() - begun:.0f} s so far{of}", file=sys.stderr, flush=True)
                before = lines

        def print_line(said: str) -> None:
            nonlocal done, lines
            done += 1
            if said and (done in (1, total) or done % every == 0):
                lines += 1
                left_s = (time.monotonic() - begun) / done * ((total or done) - done)
                to_go = f" of {total}" * bool(total) + f", about {left_s:.0f} s to go" * bool(total and done < total)
                print(f"{done}{to_go}: {said}", file=sys.stderr, flush=True)

        saying = threading.Thread(target=say_still, name="still", daemon=True)
        saying.start()
        try:
            yield print_line
        finally:
            has_ended.set()
            saying.join()

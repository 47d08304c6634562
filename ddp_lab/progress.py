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
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console, begun, finished = Console(stderr=True, highlight=False), time.monotonic(), 0
    if not shown:
        yield lambda line: None
    elif console.is_terminal:
        columns = Progress.get_default_columns()
        period_s = 3600  # of what is done, for the estimate: some things take minutes
        with Progress(*columns, console=console, transient=True, speed_estimate_period=period_s) as bar:
            task = bar.add_task(escape(doing), total=total)

            def advance(line: str) -> None:
                if line:
                    console.print(line, markup=False, soft_wrap=True)
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
                    of = f", {finished} of {total} done" if total else ""
                    print(f"{doing}: {time.monotonic() - begun:.0f} s so far{of}", file=sys.stderr, flush=True)
                before = lines

        def print_line(line: str) -> None:
            nonlocal finished, lines
            finished += 1
            if line and (finished in (1, total) or finished % every == 0):
                lines += 1
                left_s = (time.monotonic() - begun) / finished * ((total or finished) - finished)
                to_go = f" of {total}" * bool(total) + f", about {left_s:.0f} s to go" * bool(
                    total and finished < total
                )
                print(f"{finished}{to_go}: {line}", file=sys.stderr, flush=True)

        saying = threading.Thread(target=say_still, name="still", daemon=True)
        saying.start()
        try:
            yield print_line
        finally:
            has_ended.set()
            saying.join()

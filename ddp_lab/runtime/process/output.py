"""Standard output and standard error that may be closed, full, or gone with their terminal or the reader of a pipe.
Imports nothing heavy."""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class Output(io.FileIO):
    """A standard stream of this process. Once it cannot be written, what follows is dropped: no `print` raises an
    OSError.

    Args:
        goes_on: Whether the program then goes on, after a line on standard error. If not, it ends with code 1, and
            without that line where a pipe's reader has seen enough, as `head` does.
    """

    def __init__(self, descriptor: int, goes_on: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._goes_on = goes_on

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self._goes_on or error.errno != errno.EPIPE:
                then = "; the run goes on without" if self._goes_on else ""
                line = f"{'warning' if then else 'error'}: cannot write to standard output: {error.strerror}{then}\n"
                with suppress(OSError):
                    os.write(2, line.encode())
            if not self._goes_on:
                raise SystemExit(1) from None
            return len(data)


def guard_output(goes_on: bool) -> None:
    """Let `Output` write what this process and its forks print, whose characters a terminal may lack."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file or socket would get its number
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = guarded(sys.stdout, 1, goes_on), guarded(sys.stderr, 2, True)


def guarded(stream: TextIO | None, descriptor: int, goes_on: bool) -> TextIO:
    """In place of `stream`, which is None if it is closed."""
    raw, by_line = io.BufferedWriter(Output(descriptor, goes_on)), True
    if isinstance(stream, io.TextIOWrapper):
        by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(raw, getattr(stream, "encoding", None), "backslashreplace", line_buffering=by_line)

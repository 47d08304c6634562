"""The bytes of a file of any size: unpacked, and of a long one the beginning and the end."""

import bz2
import gzip
import io
import lzma
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, cast

from ddp_lab.doctor.reading.texts import InputError, count_of

HEAD_BYTES = 16 * 2**20
"""Kept of the beginning of a file, where versions and settings are."""
TAIL_BYTES = 240 * 2**20
"""Kept of its end, where errors are."""
HEAD_LINES, TAIL_LINES = 500_000, 3_000_000
"""The most lines of both, to a chunk."""
MOST_UNPACKED_BYTES = 4 * 2**30
"""Read of a compressed file, so that a small file cannot keep the doctor busy for hours."""
_CHUNK = 2**20

_UNPACKERS: dict[bytes, Callable[[BinaryIO], object]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


@dataclass(frozen=True)
class Content:
    """What was read. `left_out`: bytes and lines between `head` and `tail`. `problem`: why the end is missing."""

    head: bytes
    tail: bytes = b""
    left_out: tuple[int, int] = (0, 0)
    problem: str = ""

    @property
    def note(self) -> str:
        """What was left out, for the user; empty if nothing was."""
        size, lines = self.left_out
        parts = [f"{size / 2**20:,.0f} MiB in its middle ({count_of(lines, 'line')}) left out"] if size else []
        return ", ".join([*parts, *([self.problem] if self.problem else [])])


def read_content(file: BinaryIO) -> Content:
    """Read a file, a pipe, or what gzip, bzip2 or xz have packed."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, file))
    magic = buffered.peek(6)[:6]
    unpack = next((unpack for start, unpack in _UNPACKERS.items() if magic.startswith(start)), None)
    return (
        _bounded(cast(io.BufferedReader, unpack(buffered)), MOST_UNPACKED_BYTES) if unpack else _bounded(buffered, None)
    )


def _bounded(file: io.BufferedReader, most: int | None) -> Content:
    chunks: deque[tuple[bytes, int]] = deque()
    head, kept, total, problem = bytearray(), 0, 0, ""
    head_lines = kept_lines = left_bytes = left_lines = 0
    while True:
        try:
            chunk = file.read1(_CHUNK)  # as much as there is, so that a cut packed file loses nothing
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            if not total:
                raise InputError(f"it cannot be unpacked: {error}") from None
            problem = f"not whole: {error}"
            break
        if not chunk:
            break
        total += len(chunk)
        lines = chunk.count(b"\n")
        if not chunks and len(head) < HEAD_BYTES and head_lines < HEAD_LINES:
            head += chunk
            head_lines += lines
        else:
            chunks.append((chunk, lines))
            kept, kept_lines = kept + len(chunk), kept_lines + lines
        while len(chunks) > 1 and (kept - len(chunks[0][0]) >= TAIL_BYTES or kept_lines > TAIL_LINES):
            gone, lines = chunks.popleft()
            kept, kept_lines = kept - len(gone), kept_lines - lines
            left_bytes, left_lines = left_bytes + len(gone), left_lines + lines
        if most is not None and total >= most:
            problem = f"only its first {most / 2**30:g} GiB unpacked; unpack it, and give the end"
            break
    return Content(bytes(head), b"".join(chunk for chunk, _ in chunks), (left_bytes, left_lines), problem)

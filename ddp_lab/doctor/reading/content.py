"""The bytes of a file of any size: unpacked, and of a long one the beginning and the end."""

from collections import deque
from dataclasses import dataclass
from typing import BinaryIO

from ddp_lab.doctor.reading.texts import count_of
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import NOT_WHOLE, most_bytes, unpacked

HEAD_BYTES = 8 * 2**20
"""Kept of the beginning of a file, where versions and settings are."""
TAIL_BYTES = 56 * 2**20
"""Kept of its end, where errors are. A log of this size takes seconds."""
HEAD_LINES, TAIL_LINES = 100_000, 600_000
"""The most lines of both, to a chunk."""
_CHUNK = 2**16


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


def read_content(name: str, packed: BinaryIO) -> Content:
    """Read a file, a pipe, or what gzip, bzip2, xz or zstd have packed, up to the limit of what is unpacked.

    Raises:
        UserError: nothing of it can be unpacked. Begins with `name`.
    """
    file, is_packed = unpacked(packed)
    most = most_bytes() if is_packed else None
    chunks: deque[tuple[bytes, int]] = deque()
    head, tail_bytes, total, problem = bytearray(), 0, 0, ""
    head_lines = tail_lines = left_bytes = left_lines = 0
    read = getattr(file, "read1", file.read)  # as much as there is, so that a cut packed file loses nothing
    while True:
        try:
            chunk = read(_CHUNK)
        except NOT_WHOLE as error:
            if not total:
                raise UserError(f"{name}: it cannot be unpacked: {error}") from None
            problem = f"not whole: {error}"
            break
        if not chunk:
            break
        total += len(chunk)
        lines = chunk.count(b"\n") + chunk.count(b"\r")  # a progress bar's too, which become lines
        if not chunks and len(head) < HEAD_BYTES and head_lines < HEAD_LINES:
            head += chunk
            head_lines += lines
        else:
            chunks.append((chunk, lines))
            tail_bytes, tail_lines = tail_bytes + len(chunk), tail_lines + lines
        while len(chunks) > 1 and (tail_bytes - len(chunks[0][0]) >= TAIL_BYTES or tail_lines > TAIL_LINES):
            gone, lines = chunks.popleft()
            tail_bytes, tail_lines = tail_bytes - len(gone), tail_lines - lines
            left_bytes, left_lines = left_bytes + len(gone), left_lines + gone.count(b"\n")
        if most is not None and total >= most:
            problem = f"only its first {most / 2**20:,.0f} MiB unpacked; give more by --most-gib, or the end of it"
            break
    return Content(bytes(head), b"".join(chunk for chunk, _ in chunks), (left_bytes, left_lines), problem)

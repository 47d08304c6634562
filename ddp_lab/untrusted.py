"""Files that anyone may have made: unpacked as a stream, never more than a limit, and held against a layout."""

import argparse
import bz2
import gzip
import io
import lzma
import os
import re
import tomllib
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args, get_type_hints

import msgspec

from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UserError

LIMIT, MOST_GIB = "DDP_LAB_MOST_GIB", 2.0
"""The limit is in the environment, which the processes that read ranks inherit; and its default."""
NOT_WHOLE = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What a stream raises whose file cannot be read, or is cut short or damaged."""
MOST_SETTINGS_MIB, DEEPEST = 8, 50
"""Of a file of settings: its size, and how many tables or lists may be in each other."""
_CHUNK = 2**20


def _zstd(file: BinaryIO) -> Any:
    import pyarrow  # Python unpacks zstd from 3.14 on

    return pyarrow.CompressedInputStream(file, "zstd")


_UNPACKERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _zstd,
}


class _SetLimit(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, options: Any, gib: Any, option: str | None = None) -> None:
        if not 0 < gib < float("inf"):
            parser.error(f"{option} {gib:g}: must be a number above 0")
        os.environ[LIMIT] = str(gib)


def add_limit(parser: argparse.ArgumentParser) -> None:
    """The flag that lifts the limit of this process and of those that it starts."""
    parser.add_argument(
        "--most-gib",
        type=float,
        action=_SetLimit,
        metavar="GIB",
        help=f"read files of up to this size, unpacked, in GiB (default: {MOST_GIB:g})",
    )


def most_bytes() -> int:
    """The limit: of a trace, or of what a log's file unpacks to."""
    return int(float(os.environ.get(LIMIT, MOST_GIB)) * 2**30)


def unpacked(file: BinaryIO) -> tuple[BinaryIO, bool]:
    """What gzip, bzip2, xz or zstd have packed, as a stream, and whether it is packed. The content decides."""
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, file))
    magic = buffered.peek(6)[:6]
    unpack = next((unpack for start, unpack in _UNPACKERS.items() if magic.startswith(start)), None)
    return (unpack(buffered), True) if unpack else (buffered, False)


def json_bytes(path: Path, share: float = 1.0) -> bytearray:
    """The content of a JSON file, unpacked; empty if there is only white space.

    Args:
        share: Of the limit.

    Raises:
        UserError: it cannot be read, is cut short, larger than the limit, or begins like no JSON.
    """
    content, size, most = bytearray(), 0, most_bytes() * share
    try:
        with path.open("rb") as file:
            stream, _ = unpacked(file)
            while chunk := stream.read(_CHUNK):
                size += len(chunk)
                start = b"" if content else chunk.lstrip()[:1]
                if start not in (b"", b"{", b"["):
                    raise UserError(f"{path}: not valid JSON, by its first byte")
                if size > most:
                    now, gib = most / 2**30, most_bytes() / 2**30
                    raise UserError(f"{path}: more than {now:.3g} GiB unpacked; if so, give --most-gib above {gib:g}")
                if content or start:
                    content += chunk
    except NOT_WHOLE as error:
        why = getattr(error, "strerror", None)
        reason = f"cannot be read: {why}" if why else "is cut short or damaged"
        raise UserError(f"{path}: {reason}") from None
    return content


def settings_in(path: Path, flag: str, parse: Callable[[str], Any] = tomllib.loads) -> Any:
    """The content of a file of settings that `flag` names, of TOML or what else `parse` reads.

    Raises:
        UserError: it cannot be read, is no such file, or larger or deeper than the limits.
    """
    kind = "TOML" if parse is tomllib.loads else "JSON"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_SETTINGS_MIB * 2**20 + 1)
        if len(data) > MOST_SETTINGS_MIB * 2**20:
            raise UserError(
                f"{flag} {path}: more than {MOST_SETTINGS_MIB} MiB, too much for settings; give another file"
            )
        content = parse(data.decode())
        level = [content]
        for _ in range(DEEPEST):
            within = [
                node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)
            ]
            level = [node for inner in within for node in inner]
        if level:
            raise RecursionError
    except OSError as error:
        raise UserError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not even text
        raise UserError(f"{flag} {path}: not a {kind} file: {error}") from None
    except RecursionError:
        raise UserError(
            f"{flag} {path}: more than {DEEPEST} tables or lists in each other; give another file"
        ) from None
    return content


def _fields(kind: Any) -> list[str]:
    """The names of all fields in a layout."""
    names = list(getattr(kind, "__struct_fields__", ()))
    parts = get_type_hints(kind).values() if names else get_args(kind)
    return names + [name for part in parts for name in _fields(part)]


def fitted(content: Any, kind: Any, path: object, noun: str) -> Any:
    """`content` by the layout `kind`, a type of msgspec.

    Raises:
        UserError: it does not fit. Names the file, what it should be, and the field.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `")
        if unknown := re.search("unknown field `(.*)`", problem):
            problem = unknown_name("field", unknown[1], _fields(kind))
        where = f"{place.strip('$.`')}: " if place else ""
        raise UserError(f"{path}: a damaged {noun}: {where}{problem}") from None

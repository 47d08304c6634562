"""The files of a checkpoint: written so that they survive a crash, and read so that nothing in them is trusted.

Tensors are in the safetensors format, read by its own library: a JSON header and bytes, never a pickle. It is written
here, because saving must not hold Python's lock while the training thread needs it, and a checksum of what is written
is to be had without reading it again.
"""

import contextlib
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.checkpoint.direct import DirectFile
from training.checkpoint.ranges import IncompleteError, cover
from training.errors import UserError

DTYPES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors calls them, largest elements first: in this order all data is aligned."""
READ_BYTES = 1 << 22
"""So much at a time is read for a checksum."""


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest says of a file: size in bytes, and the CRC-32 (zlib's) of all of them."""

    bytes: int
    crc32: int


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, so that it is still there after a power failure.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make names that were made or changed in a folder survive a power failure.

    Raises:
        OSError: the file system failed to.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileInfo:
    """Write dense tensors (of any device, one at a time brought to the CPU) as safetensors, and wait for the disk.

    Raises:
        OSError: it cannot be written.
    """
    order = sorted(tensors, key=lambda key: list(DTYPES).index(tensors[key].dtype))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key in order:
        start, end = end, end + tensors[key].nbytes
        header[key] = {
            "dtype": DTYPES[tensors[key].dtype],
            "shape": list(tensors[key].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with DirectFile(path) as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for key in order:
            flat = tensors[key].detach().cpu().contiguous().view(-1)
            if flat.numel():
                file.write(memoryview(flat.view(torch.uint8).numpy()))
        file.finish()
        return FileInfo(file.size, file.crc32)


def problem_of(path: Path, info: FileInfo) -> str | None:
    """What is wrong with a file of which the manifest says `info`, if anything is."""
    try:
        if path.is_symlink() or not path.is_file():
            return f"{path.name} is {'a symbolic link' if path.is_symlink() else 'missing'}"
        if path.stat().st_size != info.bytes:
            return f"{path.name} has {path.stat().st_size} bytes instead of {info.bytes}"
        checksum = 0
        with path.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                checksum = zlib.crc32(chunk, checksum)
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    return None if checksum == info.crc32 else f"{path.name} is damaged: its checksum differs"


class TensorFiles:
    """The tensors of several safetensors files, which store ranges of flat tensors under `<key>/<first element>`.

    Raises:
        UserError: a file is none, though its checksum was right.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        self._places: dict[str, list[tuple[Any, str]]] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = self._files[path.name] = safe_open(str(path), "pt")
                for stored in file.keys():  # noqa: SIM118 - it is no dict
                    key, _, start = stored.rpartition("/")
                    if start.isdecimal():
                        shape = file.get_slice(stored).get_shape()
                        if len(shape) != 1:
                            raise UserError(f"{path}: {stored} has {len(shape)} dimensions instead of one")
                        self._ranges.setdefault(key, []).append((int(start), int(start) + shape[0]))
                        self._places.setdefault(key, []).append((file, stored))
            except (SafetensorError, OSError, ValueError) as error:
                raise UserError(f"{path} is no safetensors file: {error}") from error

    @property
    def keys(self) -> list[str]:
        """Of all tensors of which ranges are stored."""
        return list(self._ranges)

    def read(self, key: str, start: int, end: int) -> Tensor:
        """Elements `start` to `end` of a tensor, (end - start,) on CPU; only they are read.

        Raises:
            UserError: some of them are not stored.
        """
        try:
            parts = cover(self._ranges.get(key, []), start, end)
        except IncompleteError as error:
            raise UserError(f"{key}: {error}") from error
        found = []
        for index, first, last in parts:
            file, stored = self._places[key][index]
            found.append(file.get_slice(stored)[first:last])
        if not found:  # no element is asked for, but the dtype
            if key not in self._places:
                raise UserError(f"{key}: not stored")
            file, stored = self._places[key][0]
            return file.get_slice(stored)[0:0]
        return torch.cat(found) if len(found) > 1 else found[0]

    def of_file(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Whole tensors that one file holds beside ranges, and its metadata; nothing of a file that is not here."""
        file = self._files.get(name)
        if file is None:
            return {}, {}
        keys = [key for key in file.keys() if not key.rpartition("/")[2].isdecimal()]  # noqa: SIM118
        return {key: file.get_tensor(key) for key in keys}, file.metadata() or {}

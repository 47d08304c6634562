"""The files of a checkpoint. They are written so that they survive a crash, and nothing that is read is trusted.

Tensors are in the safetensors format: a JSON header and bytes, never a pickle. The safetensors library reads them. They
are written here instead, for two reasons: saving must not hold Python's lock while the training thread needs it, and
the checksum of a file is computed without reading the file again.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.account import cover

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
"""The names of safetensors. Large elements come first, so that all data is aligned in this order."""
READ_BYTES = 1 << 22
"""A file is read in parts of this size for its checksum."""
NAMES = {short: str(dtype).removeprefix("torch.") for dtype, short in DTYPES.items()}
"""Torch's names of dtypes, by those of safetensors."""


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the manifest says of a file: its size in bytes, and the CRC-32 (zlib's) of all of them."""

    bytes: int
    crc32: int


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileInfo:
    """Write dense tensors as safetensors, and wait for the disk. Tensors on a GPU are copied to the CPU one by one."""
    order = sorted(tensors, key=lambda key: list(DTYPES).index(tensors[key].dtype))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key in order:
        start, end = end, end + tensors[key].nbytes
        shape = list(tensors[key].shape)
        header[key] = {"dtype": DTYPES[tensors[key].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    content = len(text).to_bytes(8, "little") + text
    checksum = zlib.crc32(content)
    with path.open("wb") as file:
        file.write(content)
        for key in order:
            dense = tensors[key].detach().cpu().contiguous()
            flat = dense.as_strided([dense.numel()], [1])  # view(-1) may leave a single element a stride of 0
            if flat.numel():
                data = memoryview(flat.view(torch.uint8).numpy())
                file.write(data)
                checksum = zlib.crc32(data, checksum)
        file.flush()
        os.fsync(file.fileno())
    return FileInfo(len(content) + end, checksum)


def problem_of(path: Path, info: FileInfo) -> str | None:
    """What is wrong with a file that the manifest describes by `info`; None if nothing is."""
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


class Stored(NamedTuple):
    """Elements `start` to `end` of a tensor, and what reads them. `dtype`: torch's name of it."""

    start: int
    end: int
    dtype: str
    elements: Any


class TensorFiles:
    """The tensors of several safetensors files. Each file stores ranges of flat tensors as `<key>/<first element>`."""

    def __init__(self, paths: list[Path]) -> None:
        self.stored: dict[str, list[Stored]] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = self._files[path.name] = safe_open(str(path), "pt")
                for stored in file.keys():  # noqa: SIM118 - it is no dict
                    key, _, start = stored.rpartition("/")
                    if start.isdecimal():
                        elements = file.get_slice(stored)
                        shape, dtype = elements.get_shape(), elements.get_dtype()
                        if len(shape) != 1:
                            raise UserError(f"{path}: {stored} has {len(shape)} dimensions instead of one")
                        part = Stored(int(start), int(start) + shape[0], NAMES.get(dtype, dtype), elements)
                        self.stored.setdefault(key, []).append(part)
            except (SafetensorError, OSError, ValueError) as error:
                raise UserError(f"{path} is no safetensors file: {error}") from error

    def read(self, key: str, start: int, end: int) -> Tensor:
        """Elements `start` to `end` of a tensor, (end - start,) on CPU. Only these are read from the files."""
        if key not in self.stored:
            raise UserError(f"{key}: not stored")
        try:
            parts = cover([(part.start, part.end) for part in self.stored[key]], start, end)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error
        stored = self.stored[key]
        pieces = [stored[index].elements[first:last] for index, first, last in parts] or [stored[0].elements[0:0]]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def of_file(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The whole tensors that one file stores beside ranges, and its metadata. Both are empty if it is not there."""
        file = self._files.get(name)
        if file is None:
            return {}, {}
        keys = [key for key in file.keys() if not key.rpartition("/")[2].isdecimal()]  # noqa: SIM118
        return {key: file.get_tensor(key) for key in keys}, file.metadata() or {}

"""What is slow to make of text, kept for later runs by what it was made of: tokenizers and tokens.

A file of the cache is one array and its checksum, in numpy's format, and is never unpickled. It is written whole or not
at all, under the hash of all that it depends on, so runs that write at once write the same. One that is damaged is made
anew. Any of them may be deleted.
"""

import hashlib
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tokenize import TokenError

import numpy as np

VERSION = 1
"""Of what is kept; another one finds nothing."""
READS = ("datasets", "tokenizers", "transformers")
"""Packages that may make something else of a text in another version."""
CHECKSUM = 4  # bytes


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddp-lab"


def kept(key: Iterable[str | bytes] | None, make: Callable[[], np.ndarray]) -> tuple[np.ndarray, Path | None]:
    """What `make` returns, from the cache if an earlier run has left it there.

    Args:
        key: All that the result depends on, but for the versions of `READS`. None: nothing is kept.

    Returns:
        An array of shape (values,) and `make`'s dtype, int32 or uint8; and the file of which it is the memory map.
    """
    if key is None:
        return make(), None
    digest = hashlib.blake2b(digest_size=20)
    for part in (str(VERSION), *map(version, READS), *key):
        encoded = part.encode() if isinstance(part, str) else part
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    path = cache_folder() / f"{digest.hexdigest()}.npy"
    if (found := _read(path)) is not None:
        return found, path
    made = np.ascontiguousarray(make())
    with suppress(OSError):  # the run needs no cache
        _write(path, made)
    return made, None


def kept_text(key: Iterable[str | bytes] | None, make: Callable[[], str]) -> str:
    """`kept`, of a text."""
    return bytes(kept(key, lambda: np.frombuffer(make().encode(), dtype=np.uint8))[0]).decode()


def _read(path: Path) -> np.ndarray | None:
    """None if there is no such file, or if it is damaged."""
    try:
        stored = np.lib.format.open_memmap(path, mode="r")  # which takes no pickles
    except (OSError, ValueError, EOFError, TokenError):
        return None
    if stored.ndim != 1 or stored.dtype not in (np.int32, np.uint8) or stored.nbytes < CHECKSUM:
        return None
    values = stored[: -CHECKSUM // stored.itemsize]
    is_whole = zlib.crc32(values).to_bytes(CHECKSUM, "little") == stored[len(values) :].tobytes()
    return np.asarray(values) if is_whole else None


def _write(path: Path, made: np.ndarray) -> None:
    checksum = np.frombuffer(zlib.crc32(made).to_bytes(CHECKSUM, "little"), made.dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, np.concatenate([made, checksum]), allow_pickle=False)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def contents(path: Path) -> Iterator[str | bytes]:
    """Names (of a single file, only how it ends) and hashes of the files that `path` is or holds.

    Raises:
        OSError: one cannot be read.
    """
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as opened:
                yield from (f"{file.relative_to(path)}{path.suffix}", hashlib.file_digest(opened, "blake2b").digest())

"""Files that are written whole or not at all, whenever the process is killed."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddp_lab.runtime.errors import UserError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a file beside `path` to write into. At the end it is on disk and gets the name; after an error it goes.

    Once others can see `path`, nothing here touches its folder.

    Raises:
        OSError: it cannot be written.
    """
    target = path.resolve()  # a link stays one
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power failure.

    Raises:
        OSError: the file system failed to do so.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` whole or not at all. What is no file, such as `/dev/stdout`, gets it as it is.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_text(text)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as temporary:
            temporary.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`write_text`, of indented JSON."""
    write_text(path, to_json(content))


def to_json(content: dict[str, Any]) -> str:
    """Indented JSON, with each list of plain values on one line."""
    text = json.dumps(content, indent=2, allow_nan=False)
    return re.sub(r"\[\n[^\[\]{}]*\]", lambda match: re.sub(r"\n\s*", " ", match[0]), text) + "\n"

"""Errors that end a run, whether every rank raises them, and how `torchrun` learns of them. Imports nothing heavy."""

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MOST_LISTED = 12


class AgreedError(Exception):
    """Raised on every rank, or on one rank that reports for all. It is printed as one line, and no rank looks for a
    cause.

    Attributes:
        rank: The rank where it began, if it is a single one.
        collective: The collective in which it shows, if there is one.
        traceback: Of what the user's code has raised.
        is_said: Whether rank 0 has printed it.
    """

    rank: int | None = None
    collective: str | None = None
    traceback: str | None = None
    is_said: bool = False


class UserError(AgreedError):
    """Something that the user can put right.

    The message says what is wrong, where, and what to do. Entrypoints print it as one line, without a traceback.
    """


def require(holds: bool, flag: str, value: object, requirement: str) -> None:
    """Refuse a setting that does not hold: says which flag has which value, and what it must be."""
    if not holds:
        raise UserError(f"{flag} {value}".rstrip() + f": must be {requirement}")


class UnsupportedError(UserError, ValueError):
    """A module or a batch that a strategy cannot train, found before any parameter changes."""


class OneRankError(UserError):
    """Raised on one rank while the others wait for it. That rank prints it, whichever it is, and ends the others."""


class NonFiniteError(AgreedError, RuntimeError):
    """The loss or a gradient is NaN or infinite. Raised on every rank, before the optimizer step."""


class SequenceError(AgreedError, RuntimeError):
    """Ranks issued different collectives. Raised on every rank, before the optimizer step."""


OWN_MODULE = "own_workload"
"""The name under which the file of a user's own workload is imported."""


def place_in_own_file(error: BaseException) -> str:
    """` (line 3 of mine.py)`, the last line of the user's workload file that `error` went through; or nothing."""
    if isinstance(error, SyntaxError):
        file, lines = error.filename, [error.lineno]
    else:
        file = getattr(sys.modules.get(OWN_MODULE), "__file__", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" (line {lines[-1]} of {Path(file).name})" if file and lines else ""


def printable(text: str) -> str:
    """`text` as every file and message takes it: what is not UTF-8, such as bytes of a file's name, is escaped."""
    return text.encode(errors="backslashreplace").decode()


def words_of(error: BaseException) -> str:
    """What an exception says, though its `__str__` may raise."""
    try:
        return printable(str(error)).strip()
    except Exception as problem:
        return f"(its text cannot be read: {type(problem).__name__} in __str__)"


def traceback_of(error: BaseException) -> str:
    return printable("".join(traceback.format_exception(error)))


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""`torchrun` sets this variable for each rank: <log folder>/attempt_<n>/<local rank>/error.json."""
EARLIER_S = 2
"""`torchrun` takes the failure with the earliest time, in whole seconds, as the root cause. A rank that was killed has
no file, and its time is when `torchrun` noticed it. Our files know the cause, so their times are this much earlier."""


def tell_torchrun(line: str, time_s: float | None = None) -> None:
    """Write `line` where `torchrun` looks for the reason of a failure, so that its summary shows it. `time_s`: when the
    failure began, in seconds since the epoch; default: now.

    The first line that a rank writes stays. Does nothing without `torchrun`. The format is that of
    `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`, which would add a traceback and import torch.
    """
    path = os.environ.get(ERROR_FILE)
    if not path or Path(path).exists():
        return
    timestamp = str(int((time_s or time.time()) - EARLIER_S))
    message = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": timestamp}}
    with suppress(OSError):  # the summary then lacks the line, which the terminal still shows
        Path(path).write_text(json.dumps({"message": message}))


LEAVE_S = 2.0
"""How long ranks wait for each other to leave."""


def leave_as_one(line: str, code: int, fails: bool) -> None:
    """Leave with the other ranks of this node after a mistake that each of them finds. Under `torchrun` this ends the
    process, so that its summary has one failure in place of one for each rank; without it, nothing is done.

    One rank of the node `fails`: it leaves with `code` once the others have left, whom `torchrun` would stop. They
    leave with 0 if it has left its error file, else with `code`.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    if fails:
        tell_torchrun(line)
    own_file, deadline = Path(path), time.monotonic() + LEAVE_S
    other_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    sys.stdout.flush()
    sys.stderr.flush()
    if not fails:
        with suppress(OSError):
            own_file.with_name("left").touch()
    while time.monotonic() < deadline:
        if fails and len(list(own_file.parent.parent.glob("*/left"))) >= other_ranks:
            break
        if not fails and any(file != own_file for file in own_file.parent.parent.glob(f"*/{own_file.name}")):
            os._exit(0)
        time.sleep(0.02)
    tell_torchrun(line)
    os._exit(code)


def speaks_for_node() -> bool:
    """Whether this process prints a mistake that every rank finds by itself.

    Under `torchrun` it is the first rank of the node that gets here: `torchrun` stops the others as soon as one has
    failed, perhaps rank 0 before it could print. Elsewhere it is rank 0.
    """
    path = os.environ.get(ERROR_FILE)
    if path:
        try:
            (Path(path).parent.parent / "said").touch(exist_ok=False)
            return True
        except FileExistsError:
            return False
        except OSError:
            pass
    return os.environ.get("RANK", "0") == "0"


def listed(things: Sequence[object]) -> str:
    """`a`; `a and b`; `a, b and c`; of many, the first few and how many more."""
    if len(things) > MOST_LISTED:
        return f"{', '.join(map(str, things[:MOST_LISTED]))} and {len(things) - MOST_LISTED} more"
    names = [str(thing) for thing in things]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

"""What a first difference means: causes are rows of `causes.toml`, each with the tests that must hold."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from ddp_lab.parity.causes import backward, forward
from ddp_lab.parity.causes.look import Look, Words
from ddp_lab.parity.comparison import Comparison
from ddp_lab.parity.store import BUFFER, PARAMETER


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attributes:
    where: Kinds of the first difference, or of what else a step has (`_places`).
    test: Functions of `forward` and `backward`. All must hold.
    says: Names the cause, its place and its size.
    usually: The usual mistake behind it, and what to do.
    """

    name: str
    where: list[str]
    says: str
    usually: str
    test: list[str] = []


TESTS = vars(forward) | vars(backward)
TABLE = msgspec.toml.decode(
    Path(__file__).with_name("causes.toml").read_bytes(), type=dict[Literal["cause"], list[Cause]]
)["cause"]


def cause_of(comparison: Comparison) -> Cause | None:
    """The first cause whose tests hold, with its sentences filled in. None: nothing differs, or no cause is known."""
    for where, step in _places(comparison):
        look = Look(comparison, step)
        for cause in TABLE:
            if where in cause.where and (words := _words(cause, look)) is not None:
                says, usually = (text.format(**look.words() | words) for text in (cause.says, cause.usually))
                return msgspec.structs.replace(cause, says=says, usually=usually)
    return None


def _places(comparison: Comparison) -> Iterator[tuple[str, int]]:
    """Where to look, with the step. Data come before all that is computed from them."""
    first = comparison.first
    for step in comparison.steps:
        kind = first.kind if first is not None and step == first.step else ""
        yield "samples", step
        if kind in ("", PARAMETER, BUFFER):
            yield "which gradients", step
        if first is None:
            yield "told", step
        elif kind:
            yield "precision", step  # limits are the coarser one's
            yield kind, step
            return


def _words(cause: Cause, look: Look) -> Words | None:
    """Values for the braces of a cause's sentences. None: a test does not hold."""
    words: Words = {}
    for name in cause.test:
        holds = TESTS[name](look)
        if not holds:
            return None
        words |= holds if isinstance(holds, dict) else {}
    return words

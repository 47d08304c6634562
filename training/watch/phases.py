"""The part of a run that this rank is in: marked in its profile, and on its board, where others find it if it dies."""

from contextlib import nullcontext
from typing import Any

from torch.profiler import record_function

from training.watch.board import BETWEEN, Board

_board: Board | None = None
_step, _phase = -1, "starting"


def show_phases_on(board: Board | None) -> None:
    """From now on `board` shows each phase; None: nobody does."""
    global _board, _step, _phase
    _board, _step, _phase = board, -1, "starting"


def begin_step(step: int) -> None:
    """An optimizer step begins; `step` were done before it."""
    _show(step, BETWEEN)


def current_step() -> int:
    """Optimizer steps done before the one under way."""
    return _step


def between_steps(name: str) -> None:
    """What the run does outside optimizer steps begins, such as evaluation."""
    _show(-1, name)


def _show(step: int, name: str) -> None:
    global _step, _phase
    _step, _phase = step, name
    if _board is not None:
        _board.set_place(step, name)


class phase:
    """A part of an optimizer step, of this name in the profile. An error leaves it on the board: there it happened."""

    def __init__(self, name: str, in_profile: bool = True) -> None:
        self._name = name
        self._mark = record_function(name) if in_profile else nullcontext()

    def __enter__(self) -> None:
        self._before = _phase
        _show(_step, self._name)
        self._mark.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._mark.__exit__(kind, *rest)
        if kind is None:
            _show(_step, self._before)

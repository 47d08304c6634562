"""The phase that this rank is in. It shows in the rank's profile and in its flight recorder."""

from contextlib import nullcontext
from typing import Any, Protocol

from torch.profiler import record_function

LOOP = "training loop"
"""The phase between the named parts of a step."""


class Recorder(Protocol):
    """A flight recorder (`ddp_lab.runtime.watch.flight_recorder`)."""

    def set_phase(self, step: int, phase: str, /) -> None: ...


_recorder: Recorder | None = None
_step, _phase = -1, "starting"


def record_phases_in(recorder: Recorder | None) -> None:
    """From now on, write each phase into `recorder`; None: nowhere."""
    global _recorder, _step, _phase
    _recorder, _step, _phase = recorder, -1, "starting"


def begin_step(step: int) -> None:
    """An optimizer step begins, after `step` earlier ones."""
    _enter(step, LOOP)


def current_step() -> int:
    """Optimizer steps done before the current one; -1 outside training."""
    return _step


def between_steps(name: str) -> None:
    """The run begins something outside its optimizer steps, such as evaluation."""
    _enter(-1, name)


def _enter(step: int, name: str) -> None:
    global _step, _phase
    _step, _phase = step, name
    if _recorder is not None:
        _recorder.set_phase(step, name)


class phase:
    """Context manager for a part of an optimizer step. After an error, the recorder keeps the phase that failed.

    Elsewhere, as in an evaluation, the recorder keeps what the run is at.
    """

    def __init__(self, name: str, in_profile: bool = True) -> None:
        self._name = name
        self._mark = record_function(name) if in_profile else nullcontext()

    def __enter__(self) -> None:
        self._before = _phase
        if _step >= 0:  # outside of steps, what the run is at says more
            _enter(_step, self._name)
        self._mark.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._mark.__exit__(kind, *rest)
        if kind is None and _step >= 0:
            _enter(_step, self._before)

"""The file that lets an interrupted sweep continue: its settings, and the choices that are finished."""

import json
from pathlib import Path
from typing import Any

import msgspec

from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import json_bytes


class Kept(msgspec.Struct):
    settings: dict[str, Any]
    finished: list[str]


class SweepState:
    """Kept in `profile/<family>.sweep.json` from the start of a sweep until it has reported on all choices.

    Args:
        settings: What must be the same when the sweep continues.
    """

    def __init__(self, output_dir: Path, family: str, settings: dict[str, Any]) -> None:
        self._path = output_dir / "profile" / f"{family}.sweep.json"
        self._settings = settings
        self.finished: list[str] = []

    def go_on(self) -> None:
        """Read `finished` of the interrupted sweep.

        Raises:
            UserError: there is no such sweep, or it had other settings.
        """
        if not self._path.exists():
            raise UserError(f"--resume: no interrupted sweep ({self._path} is not there); leave out --resume")
        try:
            kept = msgspec.json.decode(json_bytes(self._path, 1 / 1000), type=Kept)
        except (UserError, ValueError, RecursionError) as error:
            raise UserError(f"--resume: {self._path} cannot be read ({error}); leave out --resume") from None
        for name, value in self._settings.items():
            if kept.settings.get(name) != value:
                raise UserError(
                    f"--resume: the interrupted sweep had {name} {shown(kept.settings.get(name))}, this one has "
                    f"{shown(value)}; give the same, or leave out --resume"
                )
        self.finished = kept.finished

    def write(self) -> None:
        """Write the file.

        Raises:
            UserError: it cannot be written.
        """
        from ddp_lab.runtime.records.record import write_text  # imports torch

        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error
        content = {"settings": self._settings, "finished": self.finished}
        write_text(self._path, json.dumps(content, indent=2) + "\n")

    def add(self, choice: str) -> None:
        """Note that a choice has been trained.

        Raises:
            UserError: it cannot be written.
        """
        self.finished.append(choice)
        self.write()

    def close(self) -> None:
        """Remove the file: all choices are trained and reported on."""
        self._path.unlink(missing_ok=True)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)

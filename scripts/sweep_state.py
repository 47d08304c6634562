"""What an interrupted sweep leaves, so that it can go on: its settings, and the choices that are done."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.errors import UserError


class SweepState:
    """Kept in `profile/<family>.sweep.json` from the beginning of a sweep until it has reported on all choices.

    Args:
        settings: What must be the same when the sweep goes on.
    """

    def __init__(self, output_dir: Path, family: str, settings: dict[str, Any]) -> None:
        self._path = output_dir / "profile" / f"{family}.sweep.json"
        self._settings = settings
        self.finished: list[str] = []

    def go_on(self) -> None:
        """Take up `finished` from the sweep that was interrupted.

        Raises:
            UserError: there is none, or it had other settings.
        """
        try:
            kept = json.loads(self._path.read_text())
            settings, finished = dict(kept["settings"]), [str(choice) for choice in kept["finished"]]
        except FileNotFoundError:
            raise UserError(f"--resume: no interrupted sweep ({self._path} is not there); leave out --resume") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"--resume: {self._path} cannot be read ({error}); leave out --resume") from None
        for name, value in self._settings.items():
            if settings.get(name) != value:
                raise UserError(
                    f"--resume: the interrupted sweep had {name} {shown(settings.get(name))}, this one has "
                    f"{shown(value)}; give the same, or leave out --resume"
                )
        self.finished = finished

    def begin(self) -> None:
        """From now on there is something to go on with.

        Raises:
            UserError: that cannot be kept.
        """
        self._write()

    def add(self, choice: str) -> None:
        """A choice has been trained.

        Raises:
            UserError: that cannot be kept.
        """
        self.finished.append(choice)
        self._write()

    def close(self) -> None:
        """All is trained and reported on: nothing is left to go on with."""
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"settings": self._settings, "finished": self.finished}, indent=2) + "\n")
            temporary.replace(self._path)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)

"""The file that lets an interrupted sweep continue, and tells comparisons which runs were its passes."""

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec

from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import json_bytes
from ddp_lab.writing import write_text


class Kept(msgspec.Struct):
    settings: dict[str, Any]
    is_whole: bool
    runs: dict[str, dict[int, str]]
    planned: int = 0
    command: str = ""


class SweepState:
    """Kept in `profile/<family>.sweep.json` until the next sweep of the family begins.

    Args:
        settings: What must be the same when the sweep continues.
        command: What the user typed, without `--resume`.

    Attributes:
        runs: The ids of those that are finished, by label and number of the pass, from 1.
        planned: How many they are when all are finished; 0 if that is not known yet.
    """

    def __init__(self, output_dir: Path, family: str, settings: dict[str, Any], command: str = "") -> None:
        self._path = output_dir / "profile" / f"{family}.sweep.json"
        self._settings, self._command, self.planned = settings, command, 0
        place = [] if output_dir == Path() else ["--output-dir", str(output_dir)]
        self._comparing = shlex.join(["ddp-lab", "compare", family, *place])
        self.runs: dict[str, dict[int, str]] = {}

    @property
    def done(self) -> str:
        """How far it is, such as `2 of 14 runs`."""
        return f"{sum(map(len, self.runs.values()))} of {self.planned} runs"

    def kept(self) -> str:
        """What an interrupted sweep leaves, and how to see it, as the beginning of a sentence; empty if nothing."""
        return f"{self.done} are kept; see them: {self._comparing}; " if self.runs else ""

    def unfinished(self) -> str:
        """Read `runs` of the latest sweep; say how far it got and how to finish it, if it is not whole.

        Raises:
            UserError: the file cannot be read.
        """
        kept = self.read()
        if kept is None or kept.is_whole or not self.runs or not self.planned:
            return ""
        number = max((number for passes in self.runs.values() for number in passes), default=0)
        place = f"{self.done}, pass {number} of {kept.settings.get('passes', 1)}"
        return f"The latest sweep is not finished: {place}; finish with: {self._command} --resume"

    def read(self) -> Kept | None:
        """Read `runs` of the latest sweep, if there is one, and return all that it has kept.

        Raises:
            UserError: the file cannot be read.
        """
        if not self._path.exists():
            return None
        try:
            kept = msgspec.json.decode(json_bytes(self._path, 1 / 1000), type=Kept)
        except (UserError, ValueError, RecursionError) as error:
            raise UserError(f"{self._path} cannot be read ({error}); remove it and sweep anew") from None
        self.runs, self.planned, self._command = kept.runs, kept.planned, kept.command
        return kept

    def go_on(self) -> None:
        """Read `runs` of the interrupted sweep.

        Raises:
            UserError: there is no such sweep, or it had other settings.
        """
        kept = self.read()
        if kept is None or kept.is_whole:
            raise UserError(f"--resume: no interrupted sweep (by {self._path}); leave out --resume")
        for name, value in self._settings.items():
            if kept.settings.get(name) != value:
                raise UserError(
                    f"--resume: the interrupted sweep had {name} {shown(kept.settings.get(name))}, this one has "
                    f"{shown(value)}; give the same, or leave out --resume"
                )

    def write(self, is_whole: bool = False) -> None:
        """Write the file.

        Args:
            is_whole: All choices are trained and reported on, so that there is nothing to continue.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}") from error
        content = msgspec.to_builtins(Kept(self._settings, is_whole, self.runs, self.planned, self._command))
        write_text(self._path, json.dumps(content, indent=2) + "\n")

    def add(self, label: str, number: int) -> None:
        """Note that a choice has been trained in a pass: its newest run.

        Raises:
            UserError: it cannot be written.
        """
        records = (self._path.parent / label).glob("*.run.json")
        run_id = max((path.name for path in records), default="").removesuffix(".run.json")
        self.runs.setdefault(label, {})[number] = run_id
        self.write()


def shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)

"""Patches that plant one fault each: how they are read and applied."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


class Mutant(NamedTuple):
    """A fault of one hunk.

    Attributes:
        fault: What is wrong, and who would notice.
        tests: Arguments of pytest: those tests that should notice first.
        path: Of the file, from the root of the checkout.
        old, new: Lines of it, without the fault and with it.
    """

    name: str
    fault: str
    tests: Sequence[str]
    path: str
    old: str
    new: str

    @classmethod
    def read(cls, file: Path) -> "Mutant":
        """
        Raises:
            ValueError: it is not a sentence, a line of tests, and a unified diff of one hunk.
        """
        head, *hunks = re.split(r"^@@ .*\n", file.read_text(), flags=re.MULTILINE)
        match = re.fullmatch(r"# (.+\.)\n# tests: (.+)\n--- a/(.+)\n\+\+\+ b/\3\n", head)
        if match is None or len(hunks) != 1:
            raise ValueError(f"{file.name}: write a sentence, a line of tests, and a unified diff of one hunk")
        lines = hunks[0].splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
        return cls(file.stem, match[1], shlex.split(match[2]), match[3], old, new)

    def applied(self, source: str) -> str:
        """`source` with the fault.

        Raises:
            ValueError: the lines are not there, or several times.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its lines are {count} times in {self.path}; make the patch again")
        return source.replace(self.old, self.new)


def all_mutants() -> list[Mutant]:
    return [Mutant.read(file) for file in sorted(FOLDER.glob("*.patch"))]

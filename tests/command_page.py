"""What docs/command-line.md says of each command."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"


def section(command):
    return PAGE.read_text().split(f"\n## `{command}`")[1].split("\n## ")[0]


def flags_in(text):
    """The flags in the first columns of its tables."""
    return re.findall(r"^\| `(--[^`]+)` \|", text, re.MULTILINE)

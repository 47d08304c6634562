"""The page that a user sends: what was found, part by part."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_lab.gpu_check.parts import Machine, Verdict

TELLING = ("error", "Error", "CSAN detected")
FIRST, LAST = 8, 25
"""Lines of a log that the page shows: the first of those that tell, and the last of all."""


def page(machine: Machine, verdicts: Mapping[str, Verdict], minutes: float) -> str:
    """All verdicts as Markdown, with the tables behind them."""
    found = machine.found.get("environment", {})
    parts = [
        "# GPU check",
        f"{machine.named}. {len(verdicts)} parts in {minutes:.0f} minutes; torch {found.get('torch', '?')}. "
        "Logs and tables are in the folder of this page.",
        table([{"part": name, "verdict": one.how, "": one.line} for name, one in verdicts.items()]),
    ]
    for name, one in verdicts.items():
        if one.rows or one.texts:
            parts.append(f"## {name}")
        if one.rows:
            parts.append(table(one.rows))
        for heading, text in one.texts.items():
            parts += [f"{heading}:", *indented(text)]
    return "\n\n".join(parts) + "\n"


def indented(text: str) -> list[str]:
    """A block that is shown as it is, whatever is in it."""
    return ["\n".join(f"    {line}" for line in text.splitlines())] if text.strip() else ["(empty)"]


def gist(log: Path) -> str:
    """What a reader from afar needs of a log."""
    lines = [line.rstrip()[:300] for line in log.read_text(errors="replace").splitlines()]
    told = [line for line in lines[:-LAST] if any(word in line for word in TELLING)][:FIRST]
    return "\n".join([*told, *["..."] * bool(told), *lines[-LAST:]])


def table(rows: Sequence[Mapping[str, str]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines
    )

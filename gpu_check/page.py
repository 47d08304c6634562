"""The page that a user sends: what was found, part by part."""

from collections.abc import Mapping, Sequence

from gpu_check.parts import Machine, Verdict


def page(machine: Machine, verdicts: Mapping[str, Verdict], minutes: float) -> str:
    """All verdicts as Markdown, with the tables behind them."""
    found = machine.found.get("environment", {})
    parts = [
        "# GPU check",
        f"{len(verdicts)} parts on {machine.ranks} ranks in {minutes:.0f} minutes; torch {found.get('torch', '?')}. "
        "Logs and tables are in the folder of this page.",
        table([{"part": name, "verdict": one.how, "": one.line} for name, one in verdicts.items()]),
    ]
    for name, one in verdicts.items():
        if one.rows:
            parts += [f"## {name}", table(one.rows)]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Mapping[str, str]]) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([row.get(column, "") for column in columns] for row in rows)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines
    )

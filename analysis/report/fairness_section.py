"""The first part of a comparison: what its runs differ in besides what is compared."""

from collections.abc import Mapping, Sequence

from analysis.columns import Column
from analysis.fairness import SETTINGS, Difference, bent
from analysis.report.page import Section, cell, titled

SETTING = Column("setting", "", "what the runs differ in")
VALUES = Column("values, and whose they are", "", "from the run records")
BENDS = Column("do not compare", "", "figures that depend on the setting")


def fairness_section(differences: Sequence[Difference], what: str) -> Section:
    """What the runs differ in besides `what`, in a heading that nobody overlooks if it is anything."""
    if not differences:
        return Section(
            f"What differs besides the {what}",
            f"Nothing. The run records agree, as far as they say, in {', '.join(SETTINGS)}.",
        )
    rows = [
        [cell("", text, column) for text, column in zip(row, (SETTING, VALUES, BENDS), strict=True)]
        for row in ((found.name, found.listed, ", ".join(found.bends)) for found in differences)
    ]
    text = f"Do not lay it to the {what} where these figures differ: {', '.join(bent(differences))}."
    heading = f"Warning: these runs differ in more than their {what}"
    return Section(heading, text, table=titled("differences", (SETTING, VALUES, BENDS), rows))


def audit_lines(failed_checks: Mapping[str, Sequence[str]]) -> list[str]:
    """A warning for each run of whose audit checks fail: their subjects by name of the run."""
    return [
        f"Warning: {name} does not do what its own formula and configuration say: {', '.join(subjects)} "
        f"(audit.csv and summary.html in its folder)."
        for name, subjects in failed_checks.items()
        if subjects
    ]

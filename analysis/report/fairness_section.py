"""The first part of a comparison: what its runs differ in besides what is compared."""

from collections.abc import Mapping, Sequence

from analysis.columns import Column
from analysis.comparison.fairness import SETTINGS, Difference, bent
from analysis.report.page import Section, cell, titled

SETTING = Column("setting", "", "what the runs differ in")
VALUES = Column("values, and whose they are", "", "from the run records")
BENDS = Column("do not compare", "", "figures that depend on the setting")


def banner(differences: Sequence[Difference], what: str) -> str:
    """What nobody must overlook; empty where the runs differ in nothing else."""
    if not differences:
        return ""
    listed = "; ".join(f"{found.name} ({found.listed})" for found in differences)
    figures = ", ".join(bent(differences))
    return f"These runs differ in more than their {what}: {listed}. So these figures do not compare: {figures}."


def fairness_section(differences: Sequence[Difference], what: str) -> Section:
    """What the runs differ in besides `what`."""
    heading = f"What differs besides the {what}"
    if not differences:
        return Section(
            heading,
            f"Nothing. The run records agree, as far as they say, in {', '.join(SETTINGS)}.",
        )
    rows = [
        [cell("", text, column) for text, column in zip(row, (SETTING, VALUES, BENDS), strict=True)]
        for row in ((found.name, found.listed, ", ".join(found.bends)) for found in differences)
    ]
    text = f"Do not lay it to the {what} where these figures differ: {', '.join(bent(differences))}."
    return Section(heading, text, table=titled("differences", (SETTING, VALUES, BENDS), rows))


def audit_lines(failed_checks: Mapping[str, Sequence[str]]) -> list[str]:
    """A warning for each run of whose audit checks fail: their subjects by name of the run."""
    return [
        f"Warning: {name} does not do what its own formula and configuration say: {', '.join(subjects)} "
        f"(audit.csv and summary.html in its folder)."
        for name, subjects in failed_checks.items()
        if subjects
    ]

"""The doctor on reports of real failures, judged against what their threads concluded.

    python benchmarks/doctor_reports.py            # the table, and every report with its verdict
    python benchmarks/doctor_reports.py --write    # also into docs/doctor-reports.md

Each report in tests/data/doctor/reports/ names its thread, the conclusion, a quoted part of the log, and the rules that
fit the conclusion: `right` ones name the cause, `partly` ones lead to it. They were chosen without a look at
what the doctor says. Rules were written with `build`; nobody looked at `held_out` before they were done.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec

from ddp_lab.doctor.complaints import unexplained
from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.reading.inputs import Inputs, take
from ddp_lab.runtime.cli import OneLineParser

REPORTS = ROOT / "tests" / "data" / "doctor" / "reports"
PAGE = ROOT / "docs" / "doctor-reports.md"
HALVES = {"build": "to build with", "held_out": "held out"}
GRADES = ("right", "partly", "silent", "wrong")
BEGIN, END = "<!-- begin: benchmarks/doctor_reports.py --write -->", "<!-- end -->"


class Report(msgspec.Struct, forbid_unknown_fields=True):
    """A public report of a failure. `log`: as quoted there, shortened. `right`, `partly`: names of rules."""

    source: str
    title: str
    log: str
    conclusion: str = ""
    cause: str = ""
    versions: str = ""
    certainty: str = ""
    right: list[str] = []
    partly: list[str] = []


class Judged(NamedTuple):
    """A report, the doctor's verdict (or `none`), how sure it is, its grade, and whether it quotes a complaint."""

    name: str
    report: Report
    verdict: str
    confidence: str
    grade: str
    quoted: bool


def read(half: str) -> list[tuple[str, Report]]:
    paths = sorted((REPORTS / half).glob("*.toml"))
    return [(path.stem, msgspec.toml.decode(path.read_bytes(), type=Report)) for path in paths]


def judge(name: str, report: Report) -> Judged:
    """Right, partly, silent or wrong. A symptom that does not lead to the cause is silent: it claims no cause."""
    inputs = Inputs()
    take(inputs, name, BytesIO(report.log.encode()))
    findings = diagnose(inputs.facts)
    quoted = bool(unexplained(inputs.facts, findings))
    if not findings:
        return Judged(name, report, "none", "", "silent", quoted)
    rule, others = findings[0].rule, {finding.rule.name for finding in findings[1:]}
    if rule.name in report.right:
        grade = "right"
    elif rule.name in report.partly or others & {*report.right, *report.partly}:
        grade = "partly"
    else:
        grade = "silent" if rule.kind == "symptom" else "wrong"
    return Judged(name, report, rule.name, rule.how_sure, grade, quoted)


def judged(half: str) -> list[Judged]:
    return [judge(name, report) for name, report in read(half)]


def table(found: dict[str, Sequence[Judged]], healthy: Sequence[Judged]) -> Iterator[str]:
    """A row for each half, and one for healthy logs, where any verdict is wrong."""
    yield f"| reports | number | {' | '.join(GRADES)} | right or partly | wrong and certain | silent, but quoted |"
    yield "|---|" + "---|" * (len(GRADES) + 4)
    for half, of_half in found.items():
        grades = Counter(each.grade for each in of_half)
        share = (grades["right"] + grades["partly"]) / len(of_half)
        certain = sum(each.grade == "wrong" and each.confidence == "certain" for each in of_half)
        quoted = sum(each.grade == "silent" and each.quoted for each in of_half)
        cells = [len(of_half), *(grades[grade] for grade in GRADES), f"{share:.0%}", certain, quoted]
        yield f"| {HALVES[half]} | {' | '.join(map(str, cells))} |"
    alarms = [each for each in healthy if each.verdict != "none"]
    certain = sum(each.confidence == "certain" for each in alarms)
    yield f"| healthy logs | {len(healthy)} | | | {len(healthy) - len(alarms)} | {len(alarms)} | | {certain} | |"


def every_report(found: dict[str, Sequence[Judged]]) -> Iterator[str]:
    yield "| report | what its thread concluded | verdict | how sure | grade |"
    yield "|---|---|---|---|---|"
    for half, of_half in found.items():
        for each in of_half:
            name, conclusion = f"{half} {each.name}", each.report.conclusion.replace("|", "/")
            cells = (f"[{name}]({each.report.source})", conclusion, each.verdict, each.confidence, each.grade)
            yield f"| {' | '.join(cells)} |"


def block() -> str:
    """What the page has between its marks."""
    found = {half: judged(half) for half in HALVES}
    return "\n".join([*table(found, judged("healthy")), "", *every_report(found)])


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    text = block()
    print(text)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

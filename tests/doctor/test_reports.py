"""The doctor on reports of real failures, judged against what their threads concluded.

Each report in tests/data/doctor/reports/ names its thread, the conclusion, a quoted part of the log, and the rules that
fit the conclusion: `right` ones name the cause, `partly` ones lead to it. They were chosen without a look at
what the doctor says. Rules were written with `build`; nobody looked at `held_out` before they were done.
"""

from collections import Counter
from io import BytesIO
from pathlib import Path

import msgspec

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.reading.inputs import Inputs, take
from ddp_lab.doctor.rulebook import all_rules
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "tests" / "data" / "doctor" / "reports"
HALVES = {"build": "to build with", "held_out": "held out"}
GRADES = ("right", "partly", "silent", "wrong")


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


def read(half):
    paths = sorted((REPORTS / half).glob("*.toml"))
    return [(path.stem, msgspec.toml.decode(path.read_bytes(), type=Report)) for path in paths]


def findings_of(name, report):
    inputs = Inputs()
    take(inputs, name, BytesIO(report.log.encode()))
    return list(diagnose(inputs.facts))


def grade(report, findings):
    """A symptom that does not lead to the cause is silent: it claims no cause."""
    names = [finding.rule.name for finding in findings]
    if names and names[0] in report.right:
        return "right"
    if {*names[:1]} & {*report.partly} or {*names[1:]} & {*report.right, *report.partly}:
        return "partly"
    return "silent" if not findings or findings[0].rule.kind == "symptom" else "wrong"


@each_row("half", HALVES)
def test_the_page_counts_what_the_doctor_says(half):
    grades = Counter(grade(report, findings_of(name, report)) for name, report in read(half))
    page = (ROOT / "docs" / "doctor-reports.md").read_text()
    counts = [grades.total(), *(grades[name] for name in GRADES)]
    assert f"\n| {HALVES[half]} | {' | '.join(map(str, counts))} |" in page.partition("## All readings today")[2]


@each_row("half", HALVES)
def test_reports_name_their_thread_and_rules(half):
    names = {rule.name for rule in all_rules()}
    for name, report in read(half):
        assert report.source.startswith("https://") and report.conclusion and report.log.strip(), name
        assert {*report.right, *report.partly} <= names and not {*report.right} & {*report.partly}, name


def test_no_false_alarm_in_healthy_logs():
    healthy = read("healthy")
    assert len(healthy) >= 30
    assert [name for name, report in healthy if findings_of(name, report)] == []


@each_row("half", HALVES)
def test_no_wrong_verdict_is_certain(half):
    for name, report in read(half):
        findings = findings_of(name, report)
        assert grade(report, findings) != "wrong" or findings[0].rule.how_sure != "certain", name

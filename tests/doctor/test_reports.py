"""The published table of real reports is what the doctor says now, and keeps what it promises."""

from benchmarks.doctor_reports import BEGIN, END, HALVES, PAGE, block, judged, read
from ddp_lab.doctor.rulebook import all_rules
from tests.tables import each_row


def test_the_page_is_what_the_doctor_says() -> None:
    assert PAGE.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0] == block(), (
        "run python benchmarks/doctor_reports.py --write"
    )


@each_row("half", HALVES)
def test_reports_name_their_thread_and_rules(half: str) -> None:
    names = {rule.name for rule in all_rules()}
    for name, report in read(half):
        assert report.source.startswith("https://") and report.conclusion and report.log.strip(), name
        assert {*report.right, *report.partly} <= names and not {*report.right} & {*report.partly}, name


def test_no_false_alarm_in_healthy_logs() -> None:
    healthy = judged("healthy")
    assert len(healthy) >= 30
    assert {one.name: one.verdict for one in healthy if one.verdict != "none"} == {}


@each_row("half", HALVES)
def test_no_wrong_verdict_is_certain(half: str) -> None:
    assert [one.name for one in judged(half) if one.grade == "wrong" and one.confidence == "certain"] == []

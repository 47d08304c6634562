"""The published table of real reports is what the doctor says now, and keeps what it promises."""

import pytest

from benchmarks.doctor_reports import BEGIN, END, HALVES, PAGE, Report, block, judge, judged, read
from ddp_lab.doctor.rulebook import all_rules


def test_the_page_is_what_the_doctor_says() -> None:
    assert PAGE.read_text().partition(f"{BEGIN}\n")[2].partition(f"\n{END}")[0] == block(), (
        "run python benchmarks/doctor_reports.py --write"
    )


@pytest.mark.parametrize("half", HALVES)
def test_reports_name_their_thread_and_rules(half: str) -> None:
    names = {rule.name for rule in all_rules()}
    for name, report in read(half):
        assert report.source.startswith("https://") and report.conclusion and report.log.strip(), name
        assert {*report.right, *report.partly} <= names and not {*report.right} & {*report.partly}, name


def test_no_false_alarm_in_healthy_logs() -> None:
    healthy = judged("healthy")
    assert len(healthy) >= 30
    assert {one.name: one.verdict for one in healthy if one.verdict != "none"} == {}


@pytest.mark.parametrize("half", HALVES)
def test_no_wrong_verdict_is_certain(half: str) -> None:
    assert [one.name for one in judged(half) if one.grade == "wrong" and one.confidence == "certain"] == []


@pytest.mark.parametrize(
    ("right", "partly", "grade"),
    [
        (["duplicate-gpu"], [], "right"),
        (["invalid-device"], ["duplicate-gpu"], "partly"),
        (["watchdog-timeout"], [], "partly"),  # found as well
        (["invalid-device"], [], "wrong"),
    ],
)
def test_grades(right: list[str], partly: list[str], grade: str) -> None:
    log = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 4000\nHeartbeat monitor timed out"
    assert judge("a", Report("https://x", "", log, right=right, partly=partly)).grade == grade


def test_a_symptom_is_silent_if_it_does_not_lead_to_the_cause() -> None:
    log = "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=BROADCAST, Timeout(ms)=1800) ran"
    assert judge("a", Report("https://x", "", log, right=["memlock"])).grade == "silent"
    assert judge("a", Report("https://x", "", "step 1", right=["memlock"])).grade == "silent"

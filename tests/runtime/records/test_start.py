"""Where the time until the first step is done goes."""

import pytest

from ddp_lab.runtime.records.progress import start_line
from ddp_lab.runtime.watch import phases


@pytest.mark.parametrize("resumes_at", [0, 7])
def test_the_start_by_phase(monkeypatch: pytest.MonkeyPatch, resumes_at: int) -> None:
    now = [100.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: now[0])
    phases.record_phases_in(None)

    def spend(seconds: float) -> None:
        now[0] += seconds

    spend(2)
    phases.between_steps(phases.READING)
    spend(1)
    with phases.during(phases.BUILDING):
        spend(4)
    spend(0.5)
    for step in range(resumes_at, resumes_at + 2):
        phases.begin_step(step)
        spend(3)
        with phases.phase("forward"):
            spend(8)
    phases.between_steps("evaluating")
    spend(16)
    phases.between_steps("finishing")
    expected = {"importing": 2, "reading data": 1.5, "building the model": 4, "first step": 11}
    assert phases.start_s == expected
    line = "zero3: start-up took 18.5 s: importing 2.0, reading data 1.5, building the model 4.0, first step 11.0"
    assert start_line("zero3", phases.start_s) == line
    phases.record_phases_in(None)


def test_a_process_knows_its_age() -> None:
    assert 0 < phases.process_age_s() < 24 * 3600

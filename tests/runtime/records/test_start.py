"""Where the time until the first step is done goes."""

import time

import pytest

from ddp_lab.runtime.records.progress import start_line
from ddp_lab.runtime.watch import phases


@pytest.mark.parametrize("resumes_at", [0, 7])
def test_the_start_by_phase(monkeypatch, resumes_at):
    now = [100.0]
    monkeypatch.setattr(phases.time, "monotonic", lambda: now[0])
    phases.record_phases_in(None)

    def spend(seconds):
        now[0] += seconds

    spend(2)
    phases.between_steps(phases.READING)
    spend(1)
    with phases.during(phases.BUILDING):
        spend(4)
    spend(0.5)
    assert phases.start_so_far() == {"importing": 2, "reading data": 1.5, "building the model": 4}
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
    assert start_line(phases.start_s).startswith("start-up took 18.5 s: ")
    phases.record_phases_in(None)


def test_long_phases_are_said_but_no_steps_after_the_first(monkeypatch, capsys):
    for name in ("SAY_AFTER_S", "SAY_EVERY_S", "LOOK_EVERY_S"):
        monkeypatch.setattr(phases, name, 0.01)
    phases.record_phases_in(None)
    with phases.long_phases_said("zero3"):
        time.sleep(0.1)
        for step in (0, 1):
            phases.begin_step(step)
            time.sleep(0.1)
        phases.between_steps("evaluating")
        time.sleep(0.1)
    phases.record_phases_in(None)
    lines = capsys.readouterr().out.splitlines()
    assert [*dict.fromkeys(lines)] == [f"zero3: {at}, 0 s so far" for at in ("importing", "first step", "evaluating")]


def test_a_save_is_no_part_of_the_step_around_it():
    entered = []
    phases.record_phases_in(lambda *phase: entered.append(phase))
    phases.begin_step(3)
    with phases.during("saving a checkpoint"):
        pass
    assert entered == [(3, phases.LOOP), (-1, "saving a checkpoint"), (3, phases.LOOP)]
    phases.record_phases_in(None)

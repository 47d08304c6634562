"""No verdict on a job that went on: frightening words, errors that were caught, runs and attempts in one log."""

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading.texts import to_text

STEPS = [f"step {step} loss {2.5 - step / 100:.3f}" for step in range(60)]


def verdicts(*lines: str) -> list[str]:
    facts = Facts(texts=[to_text("train.log", "\n".join(lines).encode())])
    return [f"{finding.rule.name} {finding.rule.confidence}" for finding in diagnose(facts)]


def test_a_caught_error_is_not_why_the_job_ended_later() -> None:
    ended = ["ValueError: checkpoint is not writable", "exitcode  : 1 (pid: 20)"]
    caught = ["RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "batch size 32 fits"]
    assert verdicts(*caught, *STEPS, *STEPS, *ended)[0] == "program-exception likely"
    early = [
        "ValueError: cannot identify image, replaced by a blank one",
        *STEPS,
        *STEPS,
        "KeyError: 'labels'",
        ended[1],
    ]
    facts = Facts(texts=[to_text("train.log", "\n".join(early).encode())])
    assert diagnose(facts)[0].details == ["It is KeyError: 'labels'."]


def test_a_scheduler_that_ends_a_job_hides_no_cause() -> None:
    limit = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
    assert verdicts("[rank2]: KeyError: 'labels'", limit)[0] == "program-exception likely"
    assert verdicts(*STEPS, limit) == ["job-ended-by-scheduler None"]

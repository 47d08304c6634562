"""Every rule fires on its own lines and is the verdict there; none fires on a log that only looks alike."""

import tomllib
from pathlib import Path

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading.texts import to_text
from ddp_lab.doctor.rulebook import all_rules
from tests.tables import each_row

CASES = Path(__file__).parents[1] / "data" / "doctor" / "cases"
MEASURED = {"slow-pair", "run-record", "rank-without-record", "stuck-together", "inspector-straggler"}
"""Rules that read no log: other tests give them what looks alike."""


def facts_of(*lines):
    """Of a log."""
    return Facts(texts=[to_text("train.log", "\n".join(lines).encode())])


def verdicts(*lines):
    return [finding.rule.name for finding in diagnose(facts_of(*lines))]


def logs(kind):
    """Rule and log of all cases. `fires`: the rule is the verdict. `silent`: it looks alike, and no rule applies."""
    cases = {path.stem: tomllib.loads(path.read_text()) for path in sorted(CASES.glob("*.toml"))}
    return [(rule, log) for rule, case in cases.items() for log in case.get(kind, [])]


@each_row(("rule", "log"), logs("fires"))
def test_a_rule_is_the_verdict_on_its_own_lines(rule, log):
    assert verdicts(log)[:1] == [rule]


@each_row(("rule", "log"), logs("silent"))
def test_what_looks_alike_does_not_fire(rule, log):
    assert rule not in verdicts(log)


def test_every_rule_has_a_look_alike():
    assert {rule for rule, _ in logs("silent")} == {rule.name for rule in all_rules()} - MEASURED


def test_a_rule_on_an_exception_says_which_rank_raised_it_and_where():
    at = '[rank1]:   File "/app/train.py", line 7, in main'
    raised = "[rank1]: RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert"
    results = diagnose(facts_of("[rank1]: Traceback (most recent call last):", at, raised))
    assert [finding.rule.name for finding in results] == ["dtensor-mixed"]
    assert results[0].details[0].startswith("Rank 1 raised ") and "/app/train.py:7 (main)" in results[0].details[0]


def test_an_exception_that_python_ignored_ended_nothing():
    removed = ["Exception ignored in: <function Adam.__del__ at 0x7f30>", "Traceback (most recent call last):"]
    removed += ['  File "/app/adam.py", line 91, in __del__', "AttributeError: 'Adam' object has no attribute 'id'"]
    log = ["Traceback (most recent call last):", '  File "/app/train.py", line 7, in main', "KeyError: 'labels'"]
    results = diagnose(facts_of(*log, *removed))
    assert results[0].details == ["It is KeyError: 'labels', in /app/train.py:7 (main)."]
    assert verdicts(*removed) == []


STEPS = [f"step {step} loss {2.5 - step / 100:.3f}" for step in range(120)]


def test_a_caught_error_is_not_why_the_job_ended_later_and_a_scheduler_hides_no_cause():
    caught = ["RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB", "batch size 32 fits", *STEPS]
    ended = ["ValueError: checkpoint is not writable", "exitcode  : 1 (pid: 20)"]
    assert verdicts(*caught, *ended)[0] == "program-exception"
    early = ["ValueError: cannot identify image, replaced by a blank one", *STEPS, "KeyError: 'labels'", ended[1]]
    results = diagnose(facts_of(*early))
    assert results[0].details == ["It is KeyError: 'labels'."]
    limit = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"
    assert verdicts("[rank2]: KeyError: 'labels'", limit)[0] == "program-exception"
    assert verdicts(*STEPS, limit) == ["job-ended-by-scheduler"]

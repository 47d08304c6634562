"""What is measured on GPUs: how it is asked for with any number of ranks, and judged by what would be measured."""

import ddp
from ddp_lab.gpu_check import proofs, speed
from ddp_lab.gpu_check.parts import PASS
from ddp_lab.runtime.data.batches import planned_steps
from ddp_lab.runtime.flags import parse_config
from tests.gpu_check.pretended import Pretended
from tests.tables import each_row


@each_row("size", range(1, 9))
def test_batches_fit_any_number_of_ranks(size, tmp_path, monkeypatch):
    monkeypatch.setattr(proofs, "newest_record", lambda folder: {"train_loss": [1.0]})
    machine = Pretended(size, size, tmp_path, is_quick=False)
    assert proofs.resume(machine).how == PASS
    speed.sweep_sample(machine)
    speed.sweep_llm(machine)
    for command in machine.commands:
        flags = command[command.index("--workload") :]
        config = parse_config("", ddp.REGISTRY, arguments=["--ddp-choice", "simple_ddp", *flags])
        assert config.micro_batch_size(size) == 2
        if "--no-profile" in command:
            assert config.train_samples and planned_steps(config, config.train_samples)[1] == config.max_steps


def check_row(unit, result):
    return {"subject": "x", "rank": "1", "unit": unit, "expected": "9", "measured": "0.0", "result": result}


@each_row(
    ("checks", "says"),
    [
        ([check_row("bytes", "pass"), check_row("calls/step", "pass"), check_row("bytes/step", "unknown")], ""),
        ([check_row("bytes", "pass"), check_row("calls/step", "fail")], "1 of 2 checks fail"),
        ([check_row("bytes", "pass"), check_row("calls/step", "unknown")], "nothing was checked in calls/step"),
        ([], "nothing was checked in bytes and calls/step"),
    ],
)
def test_a_run_that_nobody_checked_is_no_pass(checks, says):
    problem = speed.problem_of(checks, {"bytes", "calls/step"})
    assert problem.startswith(says) and bool(problem) == bool(says)

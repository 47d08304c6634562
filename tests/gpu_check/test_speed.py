"""What is measured on GPUs: how it is asked for with any number of ranks, and judged by what would be measured."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest

import ddp
from ddp_lab.gpu_check import proofs, speed
from ddp_lab.gpu_check.parts import FAIL, MEASURED, PASS
from ddp_lab.runtime.data.batches import planned_steps
from ddp_lab.runtime.flags import parse_config
from tests.gpu_check.pretended import Pretended
from tests.tables import each_row


@pytest.mark.parametrize("size", range(1, 9))
def test_batches_fit_any_number_of_ranks(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@each_row(("lower", "how"), [(1.01, MEASURED), (1.03, FAIL)])
def test_only_what_is_surely_slower_fails(lower: float, how: str, tmp_path: Path) -> None:
    class Timed(Pretended):
        def answer(self, log: str, command: Sequence[str]) -> str:
            row = {"choice": command[command.index("--choices") + 1].split(",")[0], "step_ms_median": 3.0}
            row |= {"ratio_median": 1.04, "ratio_p25": lower, "ratio_p75": 1.06}
            with Path(command[command.index("--csv") + 1]).open("w", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
                writer.writerow(row)
            return ""

    assert speed.beside_originals(Timed(2, 2, tmp_path, is_quick=True)).how == how


def check_row(unit: str, result: str) -> dict[str, str]:
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
def test_a_run_that_nobody_checked_is_no_pass(checks: list[dict[str, str]], says: str) -> None:
    problem = speed.problem_of(checks, {"bytes", "calls/step"})
    assert problem.startswith(says) and bool(problem) == bool(says)

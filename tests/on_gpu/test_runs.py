"""Runs that end and go on as they should."""

import os
from dataclasses import replace
from unittest import mock

import pytest

from ddp_lab.runtime.share_gpu import PIPES
from tests.faults.scenarios import SCENARIOS, run_scenario

pytestmark = pytest.mark.gpu

FAULTS = ("killed in forward", "stopped (SIGSTOP)", "endless loop")


def test_faults(commands):
    """A rank that is killed, one that is stopped, one that hangs: the run ends in time and names it.

    Ranks that share a GPU take turns here: a client that is killed ends the multi-process service's other clients.
    """
    place, bad = commands, []
    no_service = place.folder / "faults" / "no multi-process service"
    no_service.mkdir(parents=True)
    choices = ("bucket_ddp_async",) if place.is_quick else ("bucket_ddp_async", "zero3")
    planted = [(scenario, choice) for scenario in SCENARIOS if scenario.name in FAULTS for choice in choices]
    with mock.patch.dict(os.environ, {PIPES: str(no_service)} if place.shares_gpu else {}):
        for scenario, choice in planted:
            folder = place.folder / "faults" / f"{scenario.name} {choice}".replace(" ", "_")
            folder.mkdir(parents=True)
            outcome = run_scenario(replace(scenario, flags=(*scenario.flags, *place.sharing)), choice, folder)
            problems = outcome.problems(scenario)
            log = folder / "stderr.txt"
            log.write_text(outcome.output)
            place.logs += [log] * bool(problems)
            message = "; ".join(problems) or (outcome.errors[0] if outcome.errors else "")
            ended = {"ended after": f"{outcome.seconds:.1f} s", "said": message[:200]}
            place.rows.append({"fault": scenario.name, "choice": choice, **ended})
            bad += [f"{scenario.name}, {choice}: {message}"] * bool(problems)
    place.says(f"{len(planted)} planted faults ended in time and named", bad)


def test_resume(commands):
    """Six steps in one go, and three, a stop, three more: the same losses, to the last bit.

    Over rings, since NCCL's other algorithms need not add up in the same order twice.
    """
    place, bad = commands, []
    flags = ["--workload", "mlp", "--depth", "4", "--width", "256", "--no-profile"]
    flags += [*place.global_batch, "--train-samples", str(6 * 4 * place.ranks)]
    for script, choice in (("main_ddp.py", "simple_ddp_ga"), ("main_shard.py", "zero3")):
        folder = place.folder / "resume" / choice
        saving = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "3"]
        run = place.torchrun(script, "--ddp-choice", choice, *flags, "--output-dir")
        parts = {
            "whole": [str(folder / "whole"), "--max-steps", "6"],
            "first half": [str(folder / "first"), "--max-steps", "3", *saving],
            "second half": [str(folder / "second"), "--max-steps", "6", "--resume", *saving],
        }
        for name, part in parts.items():
            log, rings = f"resume {choice} {name}", {"NCCL_ALGO": "Ring"}
            place.run_well(log, [*run, *part], limit_s=300, environment=rings)
        straight, resumed = (place.newest_record(folder / name)["train_loss"] for name in ("whole", "second"))
        losses = f"{straight[-1]!r}, {resumed[-1]!r}"
        place.rows.append({"choice": choice, "last losses": losses})
        bad += [f"{choice}: {losses}"] * (straight != resumed)
    place.says("a resumed run goes on bit by bit", bad)

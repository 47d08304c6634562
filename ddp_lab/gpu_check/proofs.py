"""What must hold: parity, no waiting, no race, and runs that end and go on as they should."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from ddp_lab.gpu_check.host_waits import COUNTED
from ddp_lab.gpu_check.parts import FAIL, PASS, SKIPPED, Machine, Verdict, pipelines
from ddp_lab.runtime.share_gpu import PIPES
from tests.faults.scenarios import SCENARIOS, run_scenario

TOLERANCE = 1e-4
"""Of a parameter after four steps of Adam in fp32, over the largest: matrix products round in other orders on a GPU."""
FAULTS = ("killed in forward", "stopped (SIGSTOP)", "endless loop")
PLANTED = "simple_ddp"
"""The choice in which a wait is planted."""
RACED = "simple_ddp_async,bucket_ddp_async,zero1,zero2,zero3"


def parity(machine: Machine) -> Verdict:
    """Every choice against training in one process, on every backend."""
    rows = []
    for backend in machine.backends:
        found = machine.on_ranks("parity", "--backend", backend, limit_s=300, log=f"parity {backend}")
        for choice, difference in found.items():
            good = isinstance(difference, float) and difference <= TOLERANCE
            text = f"{difference:.1e}" if isinstance(difference, float) else difference
            rows.append({"choice": choice, "backend": backend, "largest difference": text, "": PASS if good else FAIL})
    bad = [f"{row['choice']} on {row['backend']}: {row['largest difference']}" for row in rows if row[""] == FAIL]
    line = f"{len(rows) - len(bad)} of {len(rows)} as one process computes them (to {TOLERANCE:g} of the largest value)"
    return Verdict(FAIL if bad else PASS, "; ".join([line, *bad]), rows)


def waits(machine: Machine) -> Verdict:
    """Calls that make the host wait for the device, as `torch.cuda.set_sync_debug_mode` sees them.

    Hand-written choices make none. References may. A wait that is planted must be seen.
    """
    found = machine.on_ranks("waits", limit_s=300)
    planted = machine.on_ranks("planted_wait", "--choices", PLANTED, limit_s=100)[PLANTED]
    rows, bad = [], []
    for choice, at in found.items():
        count, where = (str(sum(at.values())), ", ".join(at)) if isinstance(at, dict) else (at, "")
        rows.append({"choice": choice, f"waits in {COUNTED} steps": count, "where": where})
        if not isinstance(at, dict):
            bad.append(f"{choice}: {at}")
        elif at and not choice.startswith("pytorch_"):
            bad.append(f"{choice} waits {count} times in {COUNTED} steps: {where}")
    if bad:
        return Verdict(FAIL, "; ".join(bad), rows)
    if not machine.has_gpus:
        return Verdict(SKIPPED, "a CPU has nothing to wait for (every choice ran)", rows)
    if not isinstance(planted, dict) or not planted:
        return Verdict(FAIL, f"the wait that was planted is not seen, so nothing is proven here ({planted})", rows)
    return Verdict(PASS, "no hand-written choice waits for the device", rows)


def sanitizer(machine: Machine) -> Verdict:
    """torch's CUDA sanitizer, which looks for unordered accesses of streams to the same memory.

    It must find a race that is planted, and no other.
    """
    variables = {"TORCH_CUDA_SANITIZER": "1"} if machine.has_gpus else {}
    races, found = dict[str, int](), dict[str, Any]()
    raced = ",".join([RACED, *pipelines(machine.ranks, machine.shares_gpu)])
    for what, choices in (("steps", raced), ("race", "simple_ddp_async")):
        name = f"sanitizer {what}"
        found[what] = machine.on_ranks(what, "--choices", choices, limit_s=400, log=name, environment=variables)
        log = machine.folder / f"{name}.txt"
        races[what] = log.read_text(errors="replace").count("CSAN detected")
        machine.bad_logs.append(log)
    failed = [f"{choice}: {loss}" for choice, loss in found["steps"].items() if isinstance(loss, str)]
    if races["steps"] or failed:
        return Verdict(FAIL, "; ".join([f"{races['steps']} reports of a race; see sanitizer steps.txt", *failed]))
    if not machine.has_gpus:
        return Verdict(SKIPPED, "it needs a GPU (every choice ran)")
    if not races["race"]:
        return Verdict(FAIL, "the race that was planted is not reported, so the sanitizer does not work here")
    return Verdict(PASS, "no race reported but the one that was planted")


def faults(machine: Machine) -> Verdict:
    """A rank that is killed, one that is stopped, one that hangs: the run ends in time and names it.

    Ranks that share a GPU take turns here: a client that is killed ends the multi-process service's other clients.
    """
    no_service = machine.folder / "faults" / "no multi-process service"
    no_service.mkdir(parents=True)
    with mock.patch.dict(os.environ, {PIPES: str(no_service)} if machine.shares_gpu else {}):
        return planted_faults(machine)


def planted_faults(machine: Machine) -> Verdict:
    rows = []
    for scenario in SCENARIOS:
        if scenario.name in FAULTS:
            for choice in ("bucket_ddp_async",) if machine.is_quick else ("bucket_ddp_async", "zero3"):
                folder = machine.folder / "faults" / f"{scenario.name} {choice}".replace(" ", "_")
                folder.mkdir(parents=True)
                outcome = run_scenario(replace(scenario, flags=(*scenario.flags, *machine.sharing)), choice, folder)
                problems = outcome.problems(scenario)
                log = folder / "stderr.txt"
                log.write_text(outcome.output)
                machine.bad_logs += [log] * bool(problems)
                said = "; ".join(problems) or (outcome.errors[0] if outcome.errors else "")
                rows.append(
                    {
                        "fault": scenario.name,
                        "choice": choice,
                        "ended after": f"{outcome.seconds:.1f} s",
                        "said": said[:200],
                        "": FAIL if problems else PASS,
                    }
                )
    bad = [f"{row['fault']}, {row['choice']}: {row['said']}" for row in rows if row[""] == FAIL]
    return Verdict(FAIL if bad else PASS, "; ".join(bad) or f"{len(rows)} planted faults ended in time and named", rows)


def resume(machine: Machine) -> Verdict:
    """Six steps in one go, and three, a stop, three more: the same losses, to the last bit.

    Over rings, since NCCL's other algorithms need not add up in the same order twice.
    """
    flags = ["--workload", "mlp", "--depth", "4", "--width", "256", "--no-profile"]
    flags += [*machine.global_batch, "--train-samples", str(6 * 4 * machine.ranks)]
    rows = []
    for script, choice in (("main_ddp.py", "simple_ddp_ga"), ("main_shard.py", "zero3")):
        folder = machine.folder / "resume" / choice
        saving = ["--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "3"]
        run = machine.torchrun(script, "--ddp-choice", choice, *flags, "--output-dir")
        parts = {
            "whole": [str(folder / "whole"), "--max-steps", "6"],
            "first half": [str(folder / "first"), "--max-steps", "3", *saving],
            "second half": [str(folder / "second"), "--max-steps", "6", "--resume", *saving],
        }
        for name, part in parts.items():
            log, rings = f"resume {choice} {name}", {"NCCL_ALGO": "Ring"}
            machine.run_well(log, [*run, *part], limit_s=300, environment=rings)
        whole, resumed = (newest_record(folder / name)["train_loss"] for name in ("whole", "second"))
        how = PASS if whole == resumed else FAIL
        rows.append({"choice": choice, "last losses": f"{whole[-1]!r}, {resumed[-1]!r}", "": how})
    bad = [f"{row['choice']}: {row['last losses']}" for row in rows if row[""] == FAIL]
    return Verdict(FAIL if bad else PASS, "; ".join(bad) or "a resumed run goes on bit by bit", rows)


def newest_record(folder: Path) -> dict[str, Any]:
    """The latest run record under an output folder."""
    paths = sorted(folder.glob("profile/*/*.run.json"), key=lambda path: path.stat().st_mtime)
    record: dict[str, Any] = json.loads(paths[-1].read_text())
    return record

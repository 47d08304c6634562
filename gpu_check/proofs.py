"""What must hold: parity, no waiting, no race, and runs that end and go on as they should."""

import json
from pathlib import Path
from typing import Any

from gpu_check.parts import FAIL, PASS, SKIPPED, Machine, Verdict
from tests.faults.scenarios import SCENARIOS, run_scenario

TOLERANCE = 1e-4
"""Of a parameter after four steps of Adam in fp32, over the largest: matrix products round in other orders on a GPU."""
WAITS_BY_NATURE = ("pytorch_zero1",)
"""References whose own code may wait for the device. Hand-written choices never do."""
FAULTS = ("killed in forward", "stopped (SIGSTOP)", "endless loop")
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
    """Calls that make the host wait for the device, as `torch.cuda.set_sync_debug_mode` sees them."""
    found = machine.on_ranks("waits", limit_s=300)
    rows = [
        {
            "choice": choice,
            "waits a step": str(sum(at.values())) if isinstance(at, dict) else at,
            "where": ", ".join(at) if isinstance(at, dict) else "",
        }
        for choice, at in found.items()
    ]
    bad = [row for row in rows if row["waits a step"] != "0" and not row["choice"].startswith("pytorch_")]
    if not machine.has_gpus:
        return Verdict(SKIPPED, "a CPU has nothing to wait for (every choice ran)", rows)
    line = (
        "no hand-written choice waits for the device"
        if not bad
        else "; ".join(f"{row['choice']} waits {row['waits a step']} times: {row['where']}" for row in bad)
    )
    return Verdict(FAIL if bad else PASS, line, rows)


def sanitizer(machine: Machine) -> Verdict:
    """torch's CUDA sanitizer, which looks for unordered accesses of streams to the same memory."""
    variables = {"TORCH_CUDA_SANITIZER": "1"} if machine.has_gpus else {}
    found = machine.on_ranks("steps", "--choices", RACED, limit_s=400, log="sanitizer", environment=variables)
    text = (machine.folder / "sanitizer.txt").read_text()
    races = text.count("CSAN detected")
    failed = [f"{choice}: {loss}" for choice, loss in found.items() if isinstance(loss, str)]
    if races or failed:
        return Verdict(FAIL, "; ".join([f"{races} reports of a race; see sanitizer.txt", *failed]))
    return Verdict(PASS if machine.has_gpus else SKIPPED, "no race reported" if machine.has_gpus else "it needs a GPU")


def faults(machine: Machine) -> Verdict:
    """A rank that is killed, one that is stopped, one that hangs: the run ends in time and names it."""
    rows = []
    for scenario in SCENARIOS:
        if scenario.name in FAULTS:
            for choice in ("bucket_ddp_async",) if machine.is_quick else ("bucket_ddp_async", "zero3"):
                folder = machine.folder / "faults" / f"{scenario.name} {choice}".replace(" ", "_")
                folder.mkdir(parents=True)
                outcome = run_scenario(scenario, choice, folder)
                problems = outcome.problems(scenario)
                (folder / "stderr.txt").write_text(outcome.output)
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
    """Six steps in one go, and three, a stop, three more: the same losses, to the last bit."""
    flags = ["--workload", "mlp", "--depth", "4", "--width", "256", "--train-samples", "96", "--no-profile"]
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
            machine.run_well(f"resume {choice} {name}", [*run, *part], limit_s=300)
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

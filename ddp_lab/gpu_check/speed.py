"""What is measured: the link, the sweeps, and hand-written choices beside their originals."""

import csv
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.gpu_check.parts import FAIL, MEASURED, PASS, Machine, Verdict

PAIRS = {"bucket_ddp_async": "pytorch_ddp", "zero1": "pytorch_zero1", "zero3": "pytorch_zero3"}
"""Hand-written choices and their originals."""
SMALL = ["--workload", "mlp", "--depth", "8", "--width", "256"]
SLOWER = 1.02
REPORTS = {"ddp": "reports", "sharding": "reports_sharding"}


def curve(machine: Machine) -> Verdict:
    """Bus bandwidth of an all-reduce by its size, as nccl-tests define it."""
    rows = []
    for backend in machine.backends:
        folder = machine.folder / f"all-reduce {backend}"
        step, largest = (16 if machine.is_quick else 4), (2**30 if machine.has_gpus else 2**22)
        sizes = [size for size in (4096 * step**index for index in range(10)) if size <= largest]
        flags = ["--collectives", "all_reduce", "--sizes", ",".join(map(str, sizes))]
        flags += ["--seconds-per-size", "0.2" if machine.is_quick else "1", "--output-dir", str(folder)]
        command = machine.torchrun("benchmarks/collectives.py", "--backend", backend, *flags)
        machine.run_well(f"all-reduce {backend}", command, limit_s=240)
        for row in rows_of(next(folder.glob("reports/collectives/*_ranks.csv"))):
            found = {"backend": backend, "size, bytes": row["size_bytes"], "median, us": shown(row["p50_us"])}
            rows.append(found | {"bus bandwidth, GB/s": f"{float(row['busbw_gb_per_s']):.2f}"})
    best = {b: max(float(r["bus bandwidth, GB/s"]) for r in rows if r["backend"] == b) for b in machine.backends}
    return Verdict(MEASURED, "; ".join(f"{name}: up to {rate:.1f} GB/s" for name, rate in best.items()), rows)


def sweep_sample(machine: Machine) -> Verdict:
    """Both sweeps on the built-in workload."""
    workload = SMALL if machine.is_quick else ["--workload", "sample"]
    return sweeps(machine, "sample", [*workload, "--max-steps", "14" if machine.is_quick else "40"])


def sweep_llm(machine: Machine) -> Verdict:
    """Both sweeps on SmolLM2-360M's architecture in bf16; without GPUs the sharded one, on a small model."""
    if machine.has_gpus:
        flags = ["--workload", "smollm2-360m", "--max-steps", "20", "--profile-active", "2"]  # traces take long to read
    else:
        flags = ["--workload", "mlp", "--depth", "4", "--width", "64", "--max-steps", "10"]
    return sweeps(machine, "bf16", [*flags, "--precision", "bf16"])


def sweeps(machine: Machine, name: str, flags: list[str]) -> Verdict:
    """Both sweeps with these flags: all choices run, and traffic and memory are what each one announced."""
    folder, rows = machine.folder / f"sweep {name}", []
    failed = []
    families = ["sharding"] if machine.is_quick and name == "bf16" else list(REPORTS)
    wanted = {"bytes"} if machine.has_gpus and machine.ranks == 1 else {"bytes", "calls/step"}
    for family in families:
        command = ["-m", "ddp_lab", "sweep", family, str(machine.ranks), "--passes", "1"]
        command += ["--output-dir", str(folder), *flags]
        limit_s = 600 + 300 * machine.ranks  # the traces of all ranks are read, one after the other
        done = machine.run(
            f"sweep {name} {family}", [*command, *machine.sharing, *machine.global_batch, "--link", "none"], limit_s
        )
        if done.returncode != 0:
            failed.append(f"{family}: exit code {done.returncode}; see sweep {name} {family}.txt")
        reports = folder / REPORTS[family]
        for row in rows_of(reports / "compare.csv"):
            checks = rows_of(reports / row["choice"] / "audit.csv") if row["audit_failures"] else []
            problem = problem_of(checks, wanted)
            rows.append(
                {
                    "choice": row["choice"],
                    "step, ms": shown(row["step_time_ms_median"]),
                    "peak, MiB": shown(row["peak_bytes"], 2**20),
                    "audit": problem or f"{sum(check['result'] == 'pass' for check in checks)} of {len(checks)} pass",
                }
            )
            failed += [f"{row['choice']}: {problem}"] * bool(problem)
    machine.found[f"sweep {name}"] = folder
    return Verdict(
        FAIL if failed or not rows else PASS, "; ".join(failed) or f"{len(rows)} runs, as they announced", rows
    )


def problem_of(checks: Sequence[dict[str, str]], wanted: set[str]) -> str:
    """What is wrong with a run by its `audit.csv`; empty if nothing is.

    Args:
        wanted: Units of checks that must be there and pass: bytes held, and calls if the ranks send anything.
    """
    wrong = [check for check in checks if check["result"] == "fail"]
    if wrong:
        first = wrong[0]
        where = f" on rank {first['rank']}" if first["rank"] else ""
        what = f"{first['subject']}{where} {first['measured']} instead of {first['expected']}"
        return f"{len(wrong)} of {len(checks)} checks fail (audit.csv), the first: {what}"
    lacking = wanted - {check["unit"] for check in checks if check["result"] == "pass"}
    return f"nothing was checked in {' and '.join(sorted(lacking))}" if lacking else ""


def beside_originals(machine: Machine) -> Verdict:
    """Hand-written choices and their originals in turn, on every backend.

    Slower is one whose ratio lies above `SLOWER` in three rounds of four. Less can be noise.
    """
    rows = []
    for backend in machine.backends:
        for own, original in PAIRS.items():
            path = machine.folder / f"{own} {backend}.csv"
            flags = ["--backend", backend, "--choices", f"{own},{original},local", "--against", original]
            flags += ["--rounds", "3" if machine.is_quick else "15", "--csv", str(path), *machine.global_batch]
            flags += SMALL if machine.is_quick else ["--workload", "sample"]
            command = machine.torchrun("benchmarks/strategies.py", *flags)
            machine.run_well(f"{own} {backend}", command, limit_s=300)
            row = next(row for row in rows_of(path) if row["choice"] == own)
            rows.append(
                {
                    "choice": own,
                    "original": original,
                    "backend": backend,
                    "step, ms": shown(row["step_ms_median"]),
                    "ratio": f"{float(row['ratio_median']):.3f}",
                    "lower quartile": f"{float(row['ratio_p25']):.3f}",
                    "upper quartile": f"{float(row['ratio_p75']):.3f}",
                }
            )
    slow = [row for row in rows if float(row["lower quartile"]) > SLOWER]
    line = "; ".join(f"{row['choice']} takes {row['ratio']} of {row['original']} on {row['backend']}" for row in rows)
    return Verdict(FAIL if slow and machine.has_gpus and not machine.shares_gpu else MEASURED, line, rows)


def rows_of(path: Path) -> list[dict[str, str]]:
    """Those of a CSV file; none if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shown(text: str, unit: float = 1.0) -> str:
    return f"{float(text) / unit:.1f}" if text else ""

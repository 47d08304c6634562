"""What is measured: the link, the sweeps, and hand-written choices beside their originals."""

import csv

import pytest

pytestmark = pytest.mark.gpu

PAIRS = {"bucket_ddp_async": "pytorch_ddp", "zero1": "pytorch_zero1", "zero3": "pytorch_zero3"}
"""Hand-written choices and their originals."""
SMALL = ["--workload", "mlp", "--depth", "8", "--width", "256"]
SLOWER = 1.02
REPORTS = {"ddp": "reports", "sharding": "reports_sharding"}


def rows_of(path):
    """Of a CSV file; none if it is not there."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shown(number, unit=1.0):
    return f"{float(number) / unit:.1f}" if number else "-"


def test_all_reduce(commands):
    """Bus bandwidth of an all-reduce by its size, as nccl-tests define it."""
    place, best = commands, dict.fromkeys(commands.backends, 0.0)
    place.measures = True
    step, largest = (16 if place.is_quick else 4), (2**30 if place.has_gpus else 2**22)
    sizes = [size for size in (4096 * step**index for index in range(10)) if size <= largest]
    for backend in place.backends:
        folder = place.folder / f"all-reduce {backend}"
        flags = ["--collectives", "all_reduce", "--sizes", ",".join(map(str, sizes))]
        flags += ["--seconds-per-size", "0.2" if place.is_quick else "1", "--output-dir", str(folder)]
        command = place.torchrun("-m ddp_lab bench collectives", "--backend", backend, *flags)
        place.run_well(f"all-reduce {backend}", command, limit_s=240)
        for row in rows_of(next(folder.glob("reports/collectives/*_ranks.csv"))):
            rate = float(row["busbw_gb_per_s"])
            size = {"backend": backend, "size, bytes": row["size_bytes"], "median, us": shown(row["p50_us"])}
            place.rows.append(size | {"bus bandwidth, GB/s": f"{rate:.2f}"})
            best[backend] = max(best[backend], rate)
    place.says("; ".join(f"{name}: up to {rate:.1f} GB/s" for name, rate in best.items()))


def test_originals(commands):
    """Hand-written choices and their originals in turn, on every backend.

    Slower is one whose ratio lies above `SLOWER` in three rounds of four. Less can be noise.
    """
    place, lines, slow = commands, [], []
    place.measures = not place.has_gpus or place.shares_gpu
    for backend in place.backends:
        for choice, original in PAIRS.items():
            path = place.folder / f"{choice} {backend}.csv"
            flags = ["--backend", backend, "--choices", f"{choice},{original},local", "--against", original]
            flags += ["--rounds", "3" if place.is_quick else "15", "--csv", str(path), *place.global_batch]
            flags += SMALL if place.is_quick else ["--workload", "sample"]
            command = place.torchrun("-m ddp_lab bench strategies", *flags)
            place.run_well(f"{choice} {backend}", command, limit_s=300)
            row = next(row for row in rows_of(path) if row["choice"] == choice)
            ids = {"choice": choice, "original": original, "backend": backend, "step, ms": shown(row["step_ms_median"])}
            columns = {"ratio": "median", "lower quartile": "p25", "upper quartile": "p75"}
            ratios = {name: f"{float(row[f'ratio_{column}']):.3f}" for name, column in columns.items()}
            place.rows.append(ids | ratios)
            lines.append(f"{choice} takes {ratios['ratio']} of {original} on {backend}")
            slow += [f"{choice} on {backend} is slower"] * (float(row["ratio_p25"]) > SLOWER)
    place.says("; ".join(lines), [] if place.measures else slow)


def test_sweep(commands):
    """Both sweeps on the built-in workload."""
    workload = SMALL if commands.is_quick else ["--workload", "sample"]
    sweeps(commands, "sample", [*workload, "--max-steps", "14" if commands.is_quick else "40"], list(REPORTS))


def test_sweep_bf16(commands):
    """Both sweeps on SmolLM2-360M's architecture in bf16; without GPUs the sharded one, on a small model."""
    if commands.has_gpus:
        flags = ["--workload", "smollm2-360m", "--max-steps", "20", "--profile-active", "2"]  # traces take long to read
    else:
        flags = ["--workload", "mlp", "--depth", "4", "--width", "64", "--max-steps", "10"]
    families = ["sharding"] if commands.is_quick else list(REPORTS)
    sweeps(commands, "bf16", [*flags, "--precision", "bf16"], families)


def sweeps(place, name, flags, families):
    """Sweeps with these flags: all choices run, and traffic and memory are what each one announced."""
    folder, bad = place.folder / f"sweep {name}", []
    units = {"bytes"} if place.has_gpus and place.ranks == 1 else {"bytes", "calls/step"}
    for family in families:
        command = ["-m", "ddp_lab", "sweep", family, str(place.ranks), "--passes", "1"]
        command += ["--output-dir", str(folder), *flags, *place.sharing, *place.global_batch, "--link", "none"]
        limit_s = 600 + 300 * place.ranks  # the traces of all ranks are read, one after the other
        answer = place.run(f"sweep {name} {family}", command, limit_s)
        if answer.returncode != 0:
            bad.append(f"{family}: exit code {answer.returncode}; see sweep {name} {family}.txt")
        reports = folder / REPORTS[family]
        for row in rows_of(reports / "compare.csv"):
            checks = rows_of(reports / row["choice"] / "audit.csv") if row["audit_failures"] else []
            problem = problem_of(checks, units)
            passed = f"{sum(check['result'] == 'pass' for check in checks)} of {len(checks)} pass"
            figures = {"step, ms": shown(row["step_time_ms_median"]), "peak, MiB": shown(row["peak_bytes"], 2**20)}
            place.rows.append({"choice": row["choice"], **figures, "audit": problem or passed})
            bad += [f"{row['choice']}: {problem}"] * bool(problem)
    assert place.rows, "no run"
    place.says(f"{len(place.rows)} runs, as they announced", bad)


def problem_of(checks, units):
    """What is wrong with a run by its `audit.csv`; empty if nothing is.

    Args:
        units: Of checks that must be there and pass: bytes held, and calls if the ranks send anything.
    """
    wrong = [check for check in checks if check["result"] == "fail"]
    if wrong:
        first = wrong[0]
        where = f" on rank {first['rank']}" if first["rank"] else ""
        figures = f"{first['subject']}{where} {first['measured']} instead of {first['expected']}"
        return f"{len(wrong)} of {len(checks)} checks fail (audit.csv), the first: {figures}"
    lacking = units - {check["unit"] for check in checks if check["result"] == "pass"}
    return f"nothing was checked in {' and '.join(sorted(lacking))}" if lacking else ""

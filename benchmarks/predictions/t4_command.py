"""The published table of two T4s, from its own compute time and its own all-reduces."""

import argparse
from pathlib import Path


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the tables there, too")


def run(options: argparse.Namespace) -> None:
    """Print all tables.

    Raises:
        UserError: the file cannot be written.
    """
    from benchmarks.predictions import t4
    from benchmarks.predictions.held import show, write
    from planner import hardware
    from planner.contracts import Contention

    for workload, (size, ms, fits) in t4.consistent_workloads().items():
        verdict = "fits" if fits else "does not fit"
        print(f"{workload}: gradients {size / t4.MB:,.0f} MB, one all-reduce {ms:,.0f} ms: {verdict}")
    reckoned = t4.reckoning()
    print(f"compute {t4.COMPUTE_S * 1e3:.1f} ms: the roofline of a T4 for 1024 tokens, times {reckoned.factor:.3f}")
    plain = t4.held(reckoned, Contention())
    show(plain, "nothing taken from each other", 5, 3)
    assumed, _ = hardware.contention(reckoned.cluster.device)
    as_planned = t4.held(reckoned, assumed)
    show(as_planned, f"\ncompute takes {assumed.compute:.2f} times as long beside communication, as plans assume", 5, 3)
    contention = t4.fitted_contention(reckoned)
    beside = t4.held(reckoned, contention, t4.CALIBRATES)
    show(beside, f"\ncommunication takes {contention.communication:.2f} times as long beside compute", 5, 3)
    write([*plain, *as_planned, *beside], options.csv)

"""What compute and all-reduces take from each other while both are under way, for the planner.

    torchrun --standalone --nproc_per_node=2 benchmarks/contention.py
    python scripts/link_lab.py --rate 1gbit -- benchmarks/contention.py

Each number of ranks and each rate of the link is a measurement of its own; all are kept in one file,
<output-dir>/reports/collectives/contention.json (docs/planner-costs.md).
"""

import argparse
import datetime
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

from training.cli import OneLineParser
from training.config import RunConfig
from training.errors import UserError

if TYPE_CHECKING:
    from training.distributed import Ranks


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--seconds", type=float, default=1.0, help="of each part of a round, 0.01 to 60 (default: %(default)s)")
    add("--rounds", type=int, default=5, help="1 to 100; medians count (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--backend", default="auto", help="auto, gloo or nccl (default: %(default)s)")
    add("--output-dir", type=Path, default=Path(), help="root of reports/ (default: the current folder)")
    return parser


def main() -> int:
    parser = build_parser()
    options = parser.parse_args()
    for flag, value, least, most in (
        ("--seconds", options.seconds, 0.01, 60),
        ("--rounds", options.rounds, 1, 100),
    ):
        if not least <= value <= most:
            parser.error(f"{flag} {value}: must be from {least} to {most}")
    from training.distributed import joined_ranks
    from training.run import silence_libraries

    silence_libraries()
    try:
        with joined_ranks(RunConfig(device=options.device, backend=options.backend)) as ranks:
            run(options, ranks)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def run(options: argparse.Namespace, ranks: "Ranks") -> None:
    """Measure, print and keep. Collective.

    Raises:
        UserError: there is one rank only, or the file cannot be written.
    """
    from benchmarks.collective.rows import link_rate
    from benchmarks.contention_rounds import PAYLOADS, measure_drift, measure_rounds, summary
    from planner.contention import Measured, keep
    from training.distributed import from_rank0
    from training.records.record import device_name

    if ranks.world_size < 2:
        raise UserError("one rank has nobody to communicate with; run with --nproc_per_node=2 or more")
    path = options.output_dir / "reports" / "collectives" / "contention.json"
    on_cpu = ranks.device.type == "cpu"
    drift = measure_drift(ranks.device, options.seconds, options.rounds) if on_cpu else 0.0
    if ranks.is_main and on_cpu:
        print(f"after 10 ms of compute the last rank is {drift * 0.01**0.5 * 1e3:.2f} ms behind (with its square root)")
    for payload in PAYLOADS:
        measured = Measured(
            world_size=ranks.world_size,
            backend=ranks.backend,
            device=ranks.device.type,
            device_name=device_name(ranks.device),
            link_bits_per_s=link_rate(),
            payload_bytes=payload,
            **summary(measure_rounds(ranks.device, payload, options.seconds, options.rounds)),
            drift=drift,
            host=socket.gethostname(),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        from_rank0(partial(keep, path, measured))
        if ranks.is_main:
            print(
                f"without the other: a step {measured.step_s * 1e3:.1f} ms, one of many all-reduces of "
                f"{payload / 2**10:,.0f} KiB {measured.all_reduce_s * 1e3:.2f} ms "
                f"({measured.bytes_per_s * 8 / 1e9:.3g} Gbit/s), "
                f"{measured.hand_over_s * 1e6:.0f} us to hand it over\n"
                f"one of many under way takes {measured.together:.2f} times as long as one that is waited for\n"
                f"both at once: a step takes {measured.compute:.2f} times as long, an all-reduce "
                f"{measured.communication:.2f} times (half the range over {measured.rounds} rounds: "
                f"{measured.spread_pct:.0f} %)"
            )
    if ranks.is_main:
        print(f"kept in {path}")


if __name__ == "__main__":
    sys.exit(main())

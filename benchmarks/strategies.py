"""Step times and memory of strategies, in alternation inside one process group.

    torchrun --standalone --nproc_per_node=2 benchmarks/strategies.py --choices bucket_ddp_async,simple_ddp \\
        --against pytorch_ddp --workload sample --rounds 20 --csv FILE

Machines drift: the same command can take twice as long a minute later. So each round runs three optimizer steps of
every choice (communication may go on into the next step, and is waited for at the end of the round), in a new random
order (what runs just before leaves its traces in caches and in the allocator), and a choice is judged by the median
over rounds of its ratio to the reference in the same round. `local` is the same step without any communication, from
which exposed time is reckoned. A choice may carry settings: `pytorch_ddp:bucket_cap_mb=1`.

Where the link's rate is known (`--link-rate`; the link lab sets it), each choice has a bound: forward, then backward or
its bytes on the wire at that rate, whichever takes longer, then the optimizer, all as `local` takes them.

With `--rounds 0` only memory is measured (`benchmarks/memory.py` does that for many choices and world sizes).
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import ddp
import sharding
from benchmarks.variants import SETTINGS, parse_variant
from training.cli import exit_with_error, unknown_name
from training.config import RunConfig
from training.data.workloads import WORKLOADS
from training.errors import UserError

REGISTRIES = (ddp.REGISTRY, sharding.REGISTRY)
LOCAL = "local"
COLUMNS = (
    "choice",
    "against",
    "rounds",
    "step_ms_median",
    "ratio_median",
    "ratio_p25",
    "ratio_p75",
    "exposed_ms_median",
    "link_bits_per_s",
    "wire_bytes",
    "sent_bytes_median",
    "bound_ms",
    "bound_ratio_median",
    "peak_bytes",
    "workload",
    "world_size",
    "elements",
    "resting_bytes",
    "expected_resting_bytes",
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = list(dict.fromkeys([name for registry in REGISTRIES for name in registry.names] + [LOCAL, "bare_loop"]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--choices",
        required=True,
        help=f"comma-separated; of {', '.join(names)}; each may carry settings ({', '.join(SETTINGS)}), as in "
        "bucket_ddp_async:bucket_cap_mb=25:overlap_optimizer=on",
    )
    parser.add_argument("--against", default="pytorch_ddp", help="the choice that ratios refer to")
    parser.add_argument("--workload", default="sample", help=f"one of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds; 0 measures memory only")
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument(
        "--link-rate",
        type=float,
        default=os.environ.get("LINK_BITS_PER_S") or None,
        help="bits per second that a rank can send, for the bound (default: what the link lab sets)",
    )
    parser.add_argument("--depth", type=int, default=40, help="layers of workload mlp")
    parser.add_argument("--width", type=int, default=4096, help="features of each layer of workload mlp")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    options.choices = [parse_variant(text, names) for text in options.choices.split(",")]
    options.against = parse_variant(options.against, names)
    if options.link_rate is not None and not options.link_rate > 0:
        exit_with_error(f"--link-rate {options.link_rate}: must be above 0 bits per second")
    if options.workload not in WORKLOADS:
        exit_with_error(unknown_name("workload", options.workload, WORKLOADS))
    if options.rounds < 0:
        exit_with_error(f"--rounds {options.rounds}: must be 0 or more")
    if options.csv and not (options.csv.parent.is_dir() and os.access(options.csv.parent, os.W_OK)):
        exit_with_error(f"--csv {options.csv}: its folder does not exist or cannot be written to")
    return options


def main() -> int:
    options = parse()
    from training.distributed import joined_ranks
    from training.run import silence_libraries

    silence_libraries()
    try:
        config = RunConfig(
            workload=options.workload,
            global_batch_size=options.global_batch_size,
            device=options.device,
            grad_accum_steps=options.grad_accum_steps,
            backend=options.backend,
            depth=options.depth,
            width=options.width,
            train_samples=options.global_batch_size,
            eval_samples=1,
        )
        with joined_ranks(config) as ranks:
            table = measure(options, config, ranks)
            if ranks.is_main:
                show(table, options)
    except UserError as error:
        exit_with_error(str(error))
    return 0


def measure(options: argparse.Namespace, config: RunConfig, ranks: Any) -> Any:
    """Measure all choices; the table of `COLUMNS` (the same on every rank)."""
    import pandas as pd

    from benchmarks.rounds import STEPS_PER_ROUND, bounds_ms, time_rounds
    from benchmarks.runners import make_runner, measure_memory

    local = parse_variant(LOCAL, [LOCAL])
    wanted = [options.against, *options.choices, local] if options.rounds else options.choices
    variants = {variant.label: variant for variant in wanted}
    table = pd.DataFrame(index=list(variants), columns=list(COLUMNS))
    runners = {}
    for label, variant in variants.items():
        runner = runners[label] = make_runner(variant.of(config), ranks, load_strategy)
        memory = measure_memory(runner, ranks.device)
        table.loc[label, ["choice", "workload", "world_size"]] = label, config.workload, ranks.world_size
        table.loc[label, ["elements", "rounds"]] = runner.elements, options.rounds
        table.loc[label, ["link_bits_per_s", "wire_bytes"]] = options.link_rate, runner.wire_bytes()
        table.loc[label, "peak_bytes"] = memory.peak
        table.loc[label, ["resting_bytes", "expected_resting_bytes"]] = memory.resting, runner.expected_state_bytes
    if options.rounds:
        times, sent = time_rounds(runners, options.rounds, ranks)
        table["sent_bytes_median"] = sent.median()
        table["against"] = options.against.label
        ratios = times.div(times[options.against.label], axis="index")
        table["step_ms_median"] = times.median()
        table["ratio_median"] = ratios.median()
        table["ratio_p25"] = ratios.quantile(0.25)
        table["ratio_p75"] = ratios.quantile(0.75)
        table["exposed_ms_median"] = times.sub(times[LOCAL], axis="index").median()
        if options.link_rate:
            bounds = bounds_ms(runners[LOCAL].phase_seconds[-len(times) * STEPS_PER_ROUND :], table, ranks)
            table["bound_ms"] = bounds.median()
            table["bound_ratio_median"] = times.div(bounds).median()
    table.attrs["notes"] = [f"{label}: {note}" for label, runner in runners.items() for note in runner.notes]
    return table


def load_strategy(name: str) -> Any:
    return next(registry for registry in REGISTRIES if name in registry.names).load(name)


def show(table: Any, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    mib = 2**20
    for note in table.attrs["notes"]:
        print(note)
    title = f"{options.workload}, {table.elements.iloc[0] / 1e6:.1f} M parameters, {table.world_size.iloc[0]} ranks"
    columns = {"choice": table.choice}
    if options.rounds:
        title += f", {options.rounds} rounds, ratios to {options.against.label}"
        columns |= {
            "step, ms": table.step_ms_median.map("{:.1f}".format),
            "ratio": table.ratio_median.map("{:.3f}".format),
            "p25": table.ratio_p25.map("{:.3f}".format),
            "p75": table.ratio_p75.map("{:.3f}".format),
            "exposed, ms": table.exposed_ms_median.map("{:.1f}".format),
        }
    if options.link_rate and options.rounds:
        title += f", link of {options.link_rate / 1e6:g} Mbit/s"
        columns |= {
            "formula, MB": (table.wire_bytes / 1e6).map("{:.2f}".format),
            "sent, MB": (table.sent_bytes_median / 1e6).map("{:.2f}".format),
            "bound, ms": table.bound_ms.map("{:.1f}".format),
            "/ bound": table.bound_ratio_median.map("{:.3f}".format),
        }
    columns |= {
        "peak, MiB": (table.peak_bytes / mib).map("{:.1f}".format),
        "at rest, MiB": (table.resting_bytes / mib).map("{:.2f}".format),
        "formula, MiB": (table.expected_resting_bytes / mib).map("{:.2f}".format),
    }
    shown = Table(title=title, box=None)
    for heading in columns:
        shown.add_column(heading, justify="left" if heading == "choice" else "right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    Console(width=180).print(shown)
    if options.csv:
        table.to_csv(options.csv, index=False)
        print(f"table: {options.csv}")


if __name__ == "__main__":
    sys.exit(main())

"""Step times and memory of strategies, in alternation inside one process group.

    torchrun --standalone --nproc_per_node=2 benchmarks/strategies.py --choices bucket_ddp_async,simple_ddp \\
        --against pytorch_ddp --workload sample --rounds 20 --csv FILE

Machines drift: the same command can take twice as long a minute later. So each round runs three optimizer steps of
every choice, in a new random order, because what runs just before changes caches and the allocator. Communication may
go on into the next step, and is waited for at the end of the round. A choice is judged by the median over rounds of its
ratio to the reference in the same round. `local` is the same step without communication. `runtime` is a step of this
project's training loop in which no gradient is sent; exposed time is the difference to it, so that the loop's own
exchanges do not count. Both compute in the precision of `--against`; a choice that computes in another way has no
exposed time. Neither has a pipeline, whose ranks wait for each other; there the two are not run. A choice may carry
settings: `pytorch_ddp:bucket_cap_mb=1`.

`--rounds 0` measures memory only.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import ddp
import sharding
import tensor_parallel
from benchmarks.variants import BARE, LOCAL, PLAIN, RUNTIME, SETTINGS, parse_variant
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import OneLineParser, add_csv, at_least, exit_with_error, unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.link.speed import Link
from ddp_lab.runtime.settings.data import WORKLOADS

REGISTRIES = (ddp.REGISTRY, sharding.REGISTRY, tensor_parallel.REGISTRY)
load_parallelize = tensor_parallel.REGISTRY.load_parallelize
AS_THE_RUNNERS = (
    *("global_batch_size", "grad_accum_steps", "depth", "width"),
    *("device", "backend", "share_gpu", "link", "nodes", "outer_link"),
)
ALONE = (LOCAL, RUNTIME)
"""What is measured beside all choices, but for pipelines."""
NAMES = list(dict.fromkeys([name for registry in REGISTRIES for name in registry.names] + [*ALONE, *BARE]))
MIB = 2**20
RATIOS = ["ratio_median", "ratio_p25", "ratio_p75"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--choices",
        required=True,
        help=f"comma-separated; of {', '.join(NAMES)}; each may carry settings ({', '.join(SETTINGS)}), as in "
        "bucket_ddp_async:bucket_cap_mb=25:compile=on",
    )
    parser.add_argument("--against", default="pytorch_ddp", help="the choice that ratios refer to")
    parser.add_argument("--rounds", type=at_least(0), default=20, help="timed rounds; 0 measures memory only")
    parser.add_argument("--workload", default="sample", help=f"one of {', '.join(WORKLOADS)}")
    add_flags(parser, AS_THE_RUNNERS, grad_accum_steps=1, depth=40, width=4096)
    add_csv(parser)
    options = parser.parse_args(arguments)
    link = Link.parse(options.link)
    options.link_rate = link.bits_per_s if link else None
    choices = options.choices.split(",")
    options.alone = () if RunConfig.of(**parse_variant(options.against, NAMES)).has_stages else ALONE
    wanted = [options.against, *choices, *options.alone] if options.rounds else choices
    options.variants = {text: parse_variant(text, NAMES) for text in wanted}
    if options.rounds:
        for name in options.alone:
            options.variants[name]["precision"] = options.variants[options.against].get("precision", "fp32")
    if options.workload not in WORKLOADS:
        exit_with_error(unknown_name("workload", options.workload, WORKLOADS))
    return options


def computes_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two variants differ in their communication alone."""
    plain = RunConfig().as_dict()
    names = ("precision", "param_dtype", "compile", "activation_checkpointing")
    return all(one.get(name, plain[name]) == other.get(name, plain[name]) for name in names)


def main() -> int:
    options = parse()
    from ddp_lab.runtime.distributed import joined_ranks
    from ddp_lab.runtime.process.environment import silence_libraries

    silence_libraries()
    try:
        config = RunConfig(
            **{name: getattr(options, name) for name in ("workload", *AS_THE_RUNNERS)},
            train_samples=options.global_batch_size,
            eval_samples=1,
        )
        with joined_ranks(config) as ranks, ExitStack() as stack:
            table = measure(options, config, ranks, stack)
            if ranks.is_main:
                show(table, options)
    except UserError as error:
        exit_with_error(str(error))
    return 0


def measure(options: argparse.Namespace, config: RunConfig, ranks: Any, stack: ExitStack) -> Any:
    """Measure all choices; the table that docs/command-line.md describes (the same on every rank)."""
    import pandas as pd
    import torch.distributed as dist

    from benchmarks.rounds import time_rounds
    from benchmarks.runners import make_runner, measure_memory
    from ddp_lab.runtime.distributed import meshed

    runners, rows, on_meshes = {}, [], {None: ranks}
    with long_work("measuring memory", len(options.variants), ranks.is_main) as tell:
        for label, fields in options.variants.items():
            mesh = fields.get("mesh")
            if mesh not in on_meshes:
                on_meshes[mesh] = stack.enter_context(meshed(ranks, mesh))
            group = on_meshes[mesh].groups.data if mesh else dist.group.WORLD
            own = config.but(**fields)
            runner = runners[label] = make_runner(own, on_meshes[mesh], load_strategy, group, load_parallelize)
            resting, peak = measure_memory(runner, ranks.device)
            rows.append(
                {
                    "choice": label,
                    "against": options.against if options.rounds else None,
                    "rounds": options.rounds,
                    **dict.fromkeys(("step_ms_median", "ratio_median", "ratio_p25", "ratio_p75", "exposed_ms_median")),
                    "link_bits_per_s": options.link_rate,
                    "wire_bytes": runner.wire_bytes(),
                    "peak_bytes": peak,
                    "workload": config.workload,
                    "world_size": ranks.world_size,
                    "elements": runner.elements,
                    "resting_bytes": resting,
                    "expected_resting_bytes": runner.expected_state_bytes,
                }
            )
            tell(label)
    table = pd.DataFrame(rows, index=list(runners))
    if options.rounds:
        times = time_rounds(runners, options.rounds, ranks)
        ratios = times.div(times[options.against], axis="index")
        table["step_ms_median"] = times.median()
        for column, quantile in zip(RATIOS, (0.5, 0.25, 0.75), strict=True):
            table[column] = ratios.quantile(quantile)
        for label, fields in options.variants.items():
            alone = LOCAL if fields["choice"] in PLAIN else RUNTIME
            is_known = alone in times and computes_alike(fields, options.variants[alone])
            exposed = (times[label] - times[alone]).median() if is_known else float("nan")
            table.loc[label, "exposed_ms_median"] = exposed
    table.attrs["notes"] = [f"{label}: {note}" for label, runner in runners.items() for note in runner.notes]
    return table


def load_strategy(name: str) -> Any:
    return next(registry for registry in REGISTRIES if name in registry.names).load(name)


def show(table: Any, options: argparse.Namespace) -> None:
    import pandas as pd

    title = f"{options.workload}, {table.elements.iloc[0] / 1e6:.1f} M parameters, {table.world_size.iloc[0]} ranks"
    columns: dict[str, tuple[Any, int]] = {}
    if options.rounds:
        title += f", {options.rounds} rounds, ratios to {options.against}"
        columns |= {"step, ms": (table.step_ms_median, 1), "ratio": (table.ratio_median, 3)}
        columns |= {"p25": (table.ratio_p25, 3), "p75": (table.ratio_p75, 3)}
        columns |= {"exposed, ms": (table.exposed_ms_median, 1)}
    if options.link_rate and options.rounds:
        title += f", link of {options.link_rate / 1e6:g} Mbit/s"
        columns |= {"formula, MB": (table.wire_bytes / 1e6, 2)}
    columns |= {"peak, MiB": (table.peak_bytes / MIB, 1), "at rest, MiB": (table.resting_bytes / MIB, 2)}
    columns |= {"formula, MiB": (table.expected_resting_bytes / MIB, 2)}
    texts = {heading: values.map(f"{{:.{digits}f}}".format) for heading, (values, digits) in columns.items()}
    shown = pd.DataFrame({"choice": table.choice, **texts}).replace({None: "–", "nan": "–"})
    print(*table.attrs["notes"], title, shown.to_string(index=False), sep="\n")
    if options.csv:
        table.to_csv(options.csv, index=False)
        print(f"table: {options.csv}")


if __name__ == "__main__":
    sys.exit(main())

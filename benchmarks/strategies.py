"""Step times and memory of strategies, in alternation inside one process group.

    ddp-lab bench strategies --ranks 2 --choices bucket_ddp_async,simple_ddp \\
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

With `--host`, a step's time is that of the training thread alone, and what is exposed is what it takes beyond `local`.
What the thread waits for, and what other threads do, does not count. Where a GPU is faster than the thread that feeds
it, a step takes as long as the host does; benchmarks/thin.py is such a model. Operators are those below autograd that
run a kernel or send: views and allocations are left out, and one over a list of tensors counts once, as one of FSDP2's
own does. A GPU needs some 5 to 10 us to launch each.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.rounds import quartiles, run_program, table_parser, time_rounds
from benchmarks.runners import (
    LOCAL,
    NAMES,
    PLAIN,
    RUNTIME,
    SETTINGS,
    count_operators,
    make_runner,
    measure_memory,
    parse_variant,
)
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import at_least
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext, meshed
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.link.speed import SimulatedLink

AS_THE_RUNNERS = (
    *("workload", "global_batch_size", "grad_accum_steps", "depth", "width"),
    *("device", "backend", "share_gpu", "link", "nodes", "outer_link"),
)
TIMES = ["step_ms_median", "ratio_median", "ratio_p25", "ratio_p75", "exposed_ms_median"]
ALONE = (LOCAL, RUNTIME)
"""What is measured beside all choices, but for pipelines."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = table_parser("strategies", __doc__)
    carried = f"each may carry settings ({', '.join(SETTINGS)}), as in bucket_ddp_async:bucket_cap_mb=25:compile=on"
    parser.add_argument("--choices", required=True, help=f"comma-separated; of {', '.join(NAMES)}; {carried}")
    parser.add_argument("--against", default="pytorch_ddp", help="the strategy that ratios refer to")
    parser.add_argument("--rounds", type=at_least(0), default=20, help="timed rounds of three steps")
    parser.add_argument("--host", action="store_true", help="time what the training thread computes, count operators")
    add_flags(parser, AS_THE_RUNNERS, workload="sample", grad_accum_steps=1, depth=40, width=4096)
    options = parser.parse_args(arguments)
    against = parse_variant(options.against)
    choices, alone = options.choices.split(","), () if RunConfig.of(**against).has_stages else ALONE
    labels = [options.against, *choices, *alone] if options.rounds else choices
    options.variants = {text: parse_variant(text) for text in labels}
    for name in alone if options.rounds else ():
        options.variants[name]["precision"] = against.get("precision", "fp32")
    return options


def computes_alike(variant: Mapping[str, Any], alone: Mapping[str, Any]) -> bool:
    """Whether two variants differ in their communication alone."""
    plain = RunConfig().as_dict()
    names = ("precision", "param_dtype", "compile", "activation_checkpointing")
    return all(variant.get(name, plain[name]) == alone.get(name, plain[name]) for name in names)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    settings = {name: getattr(options, name) for name in AS_THE_RUNNERS}
    settings |= {"train_samples": options.global_batch_size, "eval_samples": 1}
    return run_program(partial(measure, options), options.csv, **settings)


def measure(options: argparse.Namespace, config: RunConfig, ranks: RankContext) -> pd.DataFrame:
    """Measure all choices; the table that docs/command-line.md describes (the same on every rank)."""
    with ExitStack() as stack:
        # memory, each choice alone
        runners, rows, on_meshes, link = {}, [], {None: ranks}, SimulatedLink.parse(options.link)
        with long_work("measuring memory", len(options.variants), ranks.is_main) as tell:
            for label, fields in options.variants.items():
                mesh = fields.get("mesh")
                if mesh not in on_meshes:
                    on_meshes[mesh] = stack.enter_context(meshed(ranks, mesh))
                runner = runners[label] = make_runner(config.but(device=ranks.device.type, **fields), on_meshes[mesh])
                resting, peak = measure_memory(runner, ranks.device)
                rows.append(
                    {
                        "choice": label,
                        "against": options.against if options.rounds else None,
                        "rounds": options.rounds,
                        **dict.fromkeys(TIMES),
                        "operators": count_operators(runner) if options.host else None,
                        "link_bits_per_s": link.bits_per_s if link else None,
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
        table.attrs["notes"] = [f"{label}: {note}" for label, runner in runners.items() for note in runner.notes]
        if not options.rounds:
            return table
        # times, in turn
        clock = time.thread_time if options.host else time.perf_counter
        times = time_rounds({label: runner.steps for label, runner in runners.items()}, options.rounds, ranks, clock)
    ratios = quartiles(times.div(times[options.against], axis="index"), "ratio")
    table[TIMES] = ratios.assign(step_ms_median=times.median(), exposed_ms_median=float("nan"))[TIMES]
    for label, fields in options.variants.items():
        alone = LOCAL if options.host or fields["choice"] in PLAIN else RUNTIME
        if alone in times and computes_alike(fields, options.variants[alone]):
            table.loc[label, "exposed_ms_median"] = (times[label] - times[alone]).median()
    return table

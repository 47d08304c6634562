"""Step times of strategies, in alternation inside one process group.

    torchrun --standalone --nproc_per_node=2 benchmarks/strategies.py --choices bucket_ddp_async,simple_ddp \\
        --against pytorch_ddp --workload sample --rounds 20 --csv FILE

Machines drift: the same command can take twice as long a minute later. So each round runs three optimizer steps of
every choice (communication may go on into the next step, and is waited for at the end of the round), in a new random
order (what runs just before leaves its traces in caches and in the allocator), and a choice is judged by the median
over rounds of its ratio to the reference in the same round. `local` is the same step without any communication, from
which exposed time is reckoned.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import ddp
import sharding
from training.cli import exit_with_error, unknown_name
from training.config import RunConfig
from training.errors import UserError
from training.workloads import WORKLOADS

REGISTRIES = (ddp.REGISTRY, sharding.REGISTRY)
LOCAL, BARE = "local", "bare_loop"
SPECIAL = {
    LOCAL: "forward, backward and optimizer, without communication",
    BARE: "a plain training loop around PyTorch DDP, without this project's runtime",
}
COLUMNS = (
    "choice",
    "against",
    "rounds",
    "step_ms_median",
    "ratio_median",
    "ratio_p25",
    "ratio_p75",
    "exposed_ms_median",
    "peak_bytes",
)
WARMUP_ROUNDS = 2
STEPS_PER_ROUND = 3


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    names = [name for registry in REGISTRIES for name in registry.names] + list(SPECIAL)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", required=True, help=f"comma-separated; of {', '.join(names)}")
    parser.add_argument("--against", default="pytorch_ddp", help="the choice that ratios refer to")
    parser.add_argument("--workload", default="sample", help=f"one of {', '.join(WORKLOADS)}")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds")
    parser.add_argument("--global-batch-size", type=int, default=8)
    parser.add_argument("--grad-accum-steps", type=int, default=1)
    parser.add_argument("--bucket-cap-mb", type=float, default=None)
    parser.add_argument("--depth", type=int, default=40, help="layers of workload mlp")
    parser.add_argument("--width", type=int, default=4096, help="features of each layer of workload mlp")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    options = parser.parse_args(arguments)
    options.choices = options.choices.split(",")
    for name in (*options.choices, options.against):
        if name not in names:
            exit_with_error(unknown_name("strategy", name, names))
    if options.workload not in WORKLOADS:
        exit_with_error(unknown_name("workload", options.workload, WORKLOADS))
    if options.rounds < 1:
        exit_with_error(f"--rounds {options.rounds}: must be at least 1")
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
            bucket_cap_mb=options.bucket_cap_mb,
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
    """Time all choices; the table of `COLUMNS` (the same on every rank)."""
    import pandas as pd

    from training.data import to_device
    from training.run import seed_everything
    from training.workloads import build_workload

    names = list(dict.fromkeys([options.against, *options.choices, LOCAL]))
    runners: dict[str, Runner] = {}
    peaks = {}
    size = config.micro_batch_size(ranks.world_size)
    for name in names:
        seed_everything(0, rank=0)
        workload = build_workload(config)
        samples = [workload.train[i] for i in range(ranks.rank, config.global_batch_size, ranks.world_size)]
        batches = [
            to_device(workload.collate(samples[i : i + size]), ranks.device) for i in range(0, len(samples), size)
        ]
        runners[name] = make_runner(name, replace(config, choice=name), workload, batches, ranks)
        peaks[name] = peak_of_one_step(runners[name], ranks.device)
    times = pd.DataFrame(index=range(options.rounds), columns=names, dtype=float)
    order = random.Random(0)  # the same on every rank
    for round_number in range(-WARMUP_ROUNDS, options.rounds):
        for name in order.sample(names, len(names)):
            seconds = timed(runners[name], ranks.device) / STEPS_PER_ROUND
            if round_number >= 0:
                times.loc[round_number, name] = 1000 * slowest(seconds, ranks.device)
    rows = []
    for name in names:
        ratios = times[name] / times[options.against]
        rows.append(
            (
                name,
                options.against,
                options.rounds,
                times[name].median(),
                ratios.median(),
                ratios.quantile(0.25),
                ratios.quantile(0.75),
                (times[name] - times[LOCAL]).median(),
                peaks[name],
            )
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


@dataclass(frozen=True)
class Runner:
    """One choice, ready to run.

    Attributes:
        steps: Run this many optimizer steps, to the end of all their communication.
        rest: Drop gradients, then count the bytes that are still held.
    """

    steps: Callable[[int], Any]
    rest: Callable[[], int]


def make_runner(name: str, config: RunConfig, workload: Any, batches: list[Any], ranks: Any) -> Runner:
    """One optimizer step of `name` on `batches`: through the project's own training loop, or a plain one."""
    from training.loop import train
    from training.profiling import WindowProfiler
    from training.run import build_strategy

    if name in SPECIAL:
        return plain_runner(name, workload, batches, ranks.device)
    registry = next(registry for registry in REGISTRIES if name in registry.names)
    strategy = build_strategy(config, workload, ranks, registry.load(name))
    unused = WindowProfiler(replace(config, no_profile=True), Path(), "", ranks)

    def rest() -> int:
        strategy.zero_grad()
        return sum(strategy.memory_breakdown().values())

    def steps(count: int) -> None:
        train(strategy, [(config.global_batch_size, batches)] * count, unused, None, lambda result: None)
        strategy.finish_parameter_synchronization()

    return Runner(steps, rest)


def plain_runner(name: str, workload: Any, batches: list[Any], device: Any) -> Runner:
    """`local` or `bare_loop`: what a person writes by hand, without this project's runtime."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from reference.pytorch_ddp import bucket_bytes
    from training.memory import storage_bytes

    module = workload.model.to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=workload.learning_rate, fused=True)
    model = DistributedDataParallel(module) if name == BARE else module

    def step() -> None:
        optimizer.zero_grad()
        for index, batch in enumerate(batches):
            if name == BARE:
                model.require_backward_grad_sync = index == len(batches) - 1
            (model(**batch).loss / len(batches)).backward()
        optimizer.step()

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    def rest() -> int:
        optimizer.zero_grad()
        states = [value for entry in optimizer.state.values() for value in entry.values()]
        buckets = sum(bucket_bytes(model)) if name == BARE else 0
        return storage_bytes([*module.parameters(), *module.buffers(), *states]) + buckets

    return Runner(steps, rest)


def timed(runner: Runner, device: Any) -> float:
    """Seconds from all ranks' start of a round to this rank's end of it."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    runner.steps(STEPS_PER_ROUND)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def slowest(seconds: float, device: Any) -> float:
    """The largest of all ranks' times."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def peak_of_one_step(runner: Runner, device: Any) -> int:
    """Most bytes of tensors held in a step, on the rank that held most: those at rest and what the step adds.

    The first step of a choice makes optimizer states, so the second is measured, after gradients are dropped.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from training.allocations import counting_on_all_threads, peak_of_allocations

    runner.steps(1)
    at_rest = runner.rest()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner.steps(1)
        return round(slowest(at_rest + torch.cuda.max_memory_allocated(device) - before, device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, counting_on_all_threads():
        runner.steps(1)
    return round(slowest(at_rest + peak_of_allocations(profiler), device))


def show(table: Any, options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=f"{options.workload}, {options.rounds} rounds, ratios to {options.against}", box=None)
    for heading in ("choice", "step, ms", "ratio", "p25", "p75", "exposed, ms", "peak memory, MiB"):
        shown.add_column(heading, justify="left" if heading == "choice" else "right", no_wrap=True)
    for row in table.itertuples():
        shown.add_row(
            row.choice,
            f"{row.step_ms_median:.1f}",
            f"{row.ratio_median:.3f}",
            f"{row.ratio_p25:.3f}",
            f"{row.ratio_p75:.3f}",
            f"{row.exposed_ms_median:.1f}",
            f"{row.peak_bytes / 2**20:.1f}",
        )
    Console(width=110).print(shown)
    if options.csv:
        table.to_csv(options.csv, index=False)
        print(f"table: {options.csv}")


if __name__ == "__main__":
    sys.exit(main())

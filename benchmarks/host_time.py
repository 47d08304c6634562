"""How much Python a strategy adds to a step, where communication costs nothing.

    python benchmarks/host_time.py                        # all hand-written choices and PyTorch's, 32 layers
    python benchmarks/host_time.py --choices zero3 --layers 12

On a GPU the host must issue a step faster than the device computes it. So this measures the host alone: a model with
many small layers, in one process, under a process group of four ranks that does nothing. Collectives are recorded, as
in every run. The choices take turns with a plain loop, and the table shows what each one takes beyond it: median and
quartiles of the differences in ms of CPU a step, and how many functions it calls, which is the same on every machine.
"""

import argparse
import cProfile
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ddp
import sharding
from ddp_lab.runtime.loop import Unwatched, train
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.sequence import follow_gradients, recorded_collectives
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.step import StepData

RANKS, STEPS = 4, 8
BATCH: dict[str, Tensor] = {name: torch.ones(1, 8, dtype=torch.int64) for name in ("input_ids", "labels")}
CHOICES = [
    *(name for name in ddp.CHOICES if name != "pytorch_ddp"),  # its reducer waits for a result, which is never there
    *("zero1", "zero2", "zero3", "pytorch_zero3"),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", default=",".join(CHOICES), help="comma-separated (default: all)")
    parser.add_argument("--layers", type=int, default=32, help="blocks of the model (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each choice (default: %(default)s)")
    options = parser.parse_args()
    wanted = options.choices.split(",")
    if unknown := sorted(set(wanted) - set(CHOICES)):
        parser.error(f"--choices: unknown {', '.join(unknown)}; known: {', '.join(CHOICES)}")
    torch.set_num_threads(1)
    with pretended_ranks():
        loop = plain_loop(options.layers)
        runs = {name: steps_of(name, options.layers) for name in wanted}
        loop_ms, beyond = measure(loop, runs, options.rounds)
        title = f"host time beyond a plain loop of {loop_ms:.1f} ms a step, {options.layers} layers"
        table = Table(title=title)
        for column in ("choice", "median, ms", "25 %, ms", "75 %, ms", "function calls a step"):
            table.add_column(column, justify="left" if column == "choice" else "right")
        for name, differences in beyond.items():
            low, middle, high = statistics.quantiles(differences, n=4)
            calls = function_calls(runs[name]) - function_calls(loop)
            table.add_row(name, *(f"{value:.2f}" for value in (middle, low, high)), f"{calls:,}")
    Console().print(table)
    return 0


@contextmanager
def pretended_ranks() -> Iterator[None]:
    """Within this context, this process is rank 0 of `RANKS`. Collectives are recorded, and return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", WORLD_SIZE=str(RANKS), LOCAL_RANK="0")
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with recorded_collectives(FlightRecorder.create(rank=0)):
        yield


def many_small_layers(layers: int) -> nn.Module:
    """A Llama so narrow that its kernels take no time beside what launches them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, use_cache=False))


def make_optimizer(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)  # type: ignore[arg-type]


def plain_loop(layers: int) -> Callable[[], None]:
    """`STEPS` steps as a person writes them for one device."""
    module = many_small_layers(layers)
    optimizer = make_optimizer(module.parameters())

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            module(**BATCH).loss.backward()
            optimizer.step()

    return steps


def steps_of(name: str, layers: int) -> Callable[[], None]:
    """`STEPS` steps of a choice. Buckets have 25 MiB, because there is no link to fit them to."""
    registry = next(registry for registry in (ddp.REGISTRY, sharding.REGISTRY) if name in registry.names)
    options = StrategyOptions(bucket_cap_mb=25.0) if name == "bucket_ddp_async" else StrategyOptions()
    strategy = registry.load(name)(many_small_layers(layers), make_optimizer, options)

    def steps() -> None:
        follow_gradients(strategy.watch)
        train(strategy, [StepData(RANKS, [BATCH])] * STEPS, Unwatched(), None, lambda result: None)

    return steps


def measure(
    loop: Callable[[], None], runs: dict[str, Callable[[], None]], rounds: int
) -> tuple[float, dict[str, list[float]]]:
    """Milliseconds of CPU a step: the median of `loop`, and what each of `runs` takes beyond it in the same round."""
    loops: list[float] = []
    beyond: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(-1, rounds):
        baseline = milliseconds(loop)
        for name, run in runs.items():
            taken = milliseconds(run) - baseline
            if round_number >= 0:
                beyond[name].append(taken)
        loops.append(baseline)
    return statistics.median(loops), beyond


def function_calls(run: Callable[[], None]) -> int:
    """How many functions a step calls, those written in C too. `run` must have run before."""
    profiler = cProfile.Profile()
    profiler.runcall(run)
    return sum(entry.callcount for entry in profiler.getstats()) // STEPS


def milliseconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return 1000 * (time.process_time() - start) / STEPS


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a pretended group cannot be destroyed

"""What Linux's batch policy (sched(7)) is worth to steps on a CPU: with it and with the default policy, in turn.

    torchrun --standalone --nproc_per_node=2 benchmarks/scheduling.py --model mlp --choices simple_ddp,pytorch_ddp

One process group trains each choice by itself. A round runs three steps with all threads of all ranks under the one
policy and three under the other, in a random order; the median over rounds of the ratio of their times counts.
"""

import argparse
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process, scheduling

if __name__ == "__main__":
    prepare_process()

import ddp
import sharding
from benchmarks.predictions.memory_command import MODELS
from benchmarks.rounds import time_rounds
from benchmarks.runners import Runner, make_runner
from benchmarks.strategies import load_strategy
from training.cli import OneLineParser, unknown_name
from training.config import RunConfig
from training.distributed import Ranks, joined_ranks
from training.run import silence_libraries

CHOICES = "simple_ddp,bucket_ddp_async,pytorch_ddp,zero1,zero2,zero3"
POLICIES = {"default": "SCHED_OTHER", "batch": "SCHED_BATCH"}


def main() -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", default="mlp", help=f"one of {', '.join(MODELS)} (default: %(default)s)")
    add("--choices", default=CHOICES, help="with commas between (default: %(default)s)")
    add("--rounds", type=int, default=10, help="2 or more (default: %(default)s)")
    options = parser.parse_args()
    if options.model not in MODELS:
        parser.error(f"--model: {unknown_name('model', options.model, MODELS)}")
    choices, known = options.choices.split(","), (*ddp.CHOICES, *sharding.REGISTRY.names)
    for choice in choices:
        if choice not in known:
            parser.error(f"--choices: {unknown_name('strategy', choice, known)}")
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds}: quartiles need 2 or more")
    if scheduling() != "batch":
        parser.error("it needs Linux's batch policy, which this process could not get (a GPU, chrt, or a sandbox)")
    silence_libraries()
    alike = {"global_batch_size": 8, "grad_accum_steps": 1, "train_samples": 8, "eval_samples": 1}
    config = RunConfig(**{**MODELS[options.model], **alike}, device="cpu", backend="gloo")
    with joined_ranks(config) as ranks:
        for choice in choices:
            measure(replace(config, choice=choice), options.rounds, ranks)
    return 0


def measure(config: RunConfig, rounds: int, ranks: Ranks) -> None:
    """Print one choice's step times under both policies, and their ratio. Collective."""
    schedule_threads(POLICIES["batch"])  # under which a choice settles in runs
    runner = make_runner(config, ranks, load_strategy)
    runner.steps(runner.settling_steps)
    times, _ = time_rounds({name: under(policy, runner) for name, policy in POLICIES.items()}, rounds, ranks)
    schedule_threads(POLICIES["batch"])
    low, ratio, high = (times["batch"] / times["default"]).quantile([0.25, 0.5, 0.75])
    if ranks.is_main:
        default, batch = times["default"].median(), times["batch"].median()
        print(
            f"{config.choice:17} {default:8.1f} ms a step by default, {batch:8.1f} ms as batch, "
            f"ratio {ratio:.2f} (quartiles {low:.2f} and {high:.2f}, {rounds} rounds)",
            flush=True,
        )


def under(policy: str, runner: Runner) -> Runner:
    """The same runner, whose process's threads have this policy while it runs."""

    def steps(count: int) -> None:
        schedule_threads(policy)
        runner.steps(count)

    return replace(runner, steps=steps)


def schedule_threads(policy: str) -> None:
    """Give all threads of this process that policy."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setscheduler(int(thread.name), getattr(os, policy), os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main())

"""A program that measures on all ranks, and rounds in which all its choices run in turn."""

import argparse
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import OneLineParser, exit_with_error
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext, joined_ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import host_barrier
from ddp_lab.runtime.process.environment import silence_libraries

WARMUP_ROUNDS = 2
STEPS_PER_ROUND = 3
Steps = Callable[[int], None]
"""Runs so many optimizer steps, to the end of all their communication."""


def table_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a program that prints a table, with a flag for a file of it, whose folder is made."""

    def new_file(text: str) -> Path:
        path = Path(text)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise argparse.ArgumentTypeError(f"{text}: cannot write to its folder; give another")
        return path

    parser = OneLineParser(f"ddp-lab bench {name}", description=description)
    parser.add_argument("--csv", type=new_file, metavar="FILE", help="also write the table here")
    return parser


def print_table(table: pd.DataFrame, csv: Path | None) -> None:
    """Print the columns that have a value, bytes in MiB, and write all of them."""
    shown = table.dropna(axis="columns", how="all").rename(columns=lambda name: name.replace("_bytes", ", MiB"))
    mib = shown.filter(like=", MiB").astype(float) / 2**20
    print(shown.assign(**mib).round(3).to_string(index=False))
    if csv:
        table.to_csv(csv, index=False)
        print(f"table: {csv}")


def run_program(
    measure: Callable[[RunConfig, RankContext], pd.DataFrame | None], csv: Path | None, **settings: Any
) -> int:
    """Measure on ranks with these fields of `RunConfig`; rank 0 prints the table and its notes, and writes it.

    Returns:
        The exit code.
    """
    silence_libraries()
    try:
        with joined_ranks(config := RunConfig(**settings)) as ranks:
            table = measure(config, ranks)
            if ranks.is_main and table is not None:
                for note in table.attrs.get("notes", ()):
                    print(note)
                print_table(table, csv)
    except (UserError, OSError) as error:
        exit_with_error(str(error))
    except KeyboardInterrupt:
        os._exit(130)  # other ranks may be gone, and leaving the group would wait for them
    return 0


def quartiles(values: pd.DataFrame, name: str) -> pd.DataFrame:
    """Median and quartiles of each column over rounds, as columns whose names begin with `name`."""
    places = {f"{name}_median": 0.5, f"{name}_p25": 0.25, f"{name}_p75": 0.75}
    return pd.DataFrame({column: values.quantile(place) for column, place in places.items()})


def time_rounds(
    steps: Mapping[str, Steps], rounds: int, ranks: RankContext, clock: Callable[[], float] = time.perf_counter
) -> pd.DataFrame:
    """Run all choices in turn, in a new random order each round. Collective.

    Args:
        clock: Returns seconds.

    Returns:
        Milliseconds a step, of the slowest rank: one row for each round and one column for each choice.
    """
    times = pd.DataFrame(index=range(rounds), columns=list(steps), dtype=float)
    order = random.Random(0)  # the same on every rank
    with long_work(f"timing {len(steps)} strategies in turn", WARMUP_ROUNDS + rounds, ranks.is_main) as tell:
        for round_number in range(-WARMUP_ROUNDS, rounds):
            for name in order.sample(list(steps), len(steps)):
                host_barrier()
                start = clock()
                steps[name](STEPS_PER_ROUND)
                if ranks.device.type == "cuda":
                    torch.cuda.synchronize(ranks.device)
                seconds = clock() - start
                host_barrier()
                if round_number >= 0:
                    times.loc[round_number, name] = 1000 * largest(seconds, ranks.device) / STEPS_PER_ROUND
            tell("warmed up" if round_number < 0 else f"round {round_number + 1}")
    return times


def largest(value: float, device: torch.device) -> float:
    """The largest of all ranks' values. Collective."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()

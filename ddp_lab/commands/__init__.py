"""What `ddp-lab` can do. Imports nothing heavy, so that `ddp-lab --help` answers at once."""

import importlib
from typing import Any, NamedTuple

TRAIN, READ, LOOK = "train", "read what runs left", "before a run, or when it fails"
"""Headings of `ddp-lab --help`."""


class Command(NamedTuple):
    """A command of `ddp-lab`.

    Attributes:
        group: Its heading in `ddp-lab --help`.
        module: Has `build_parser() -> ArgumentParser` and `main(arguments) -> int`, the exit code.
        about: Its line in `ddp-lab --help`.
        example: Arguments of an example.
    """

    group: str
    module: str
    about: str
    example: str

    def load(self) -> Any:
        return importlib.import_module(f"ddp_lab.{self.module}")


COMMANDS = {
    "train": Command(TRAIN, "commands.train", "train with one strategy", "zero3 --ranks 2 --max-steps 40"),
    "sweep": Command(TRAIN, "sweep.command", "train with every strategy of a family, and compare", "sharding 2"),
    "bench": Command(
        TRAIN, "commands.bench", "time strategies, collectives or memory side by side", "strategies --help"
    ),
    "report": Command(READ, "commands.report", "turn a run's traces into a page and a table", "profile/zero3"),
    "compare": Command(READ, "commands.compare", "compare all strategies, or two runs of one", "sharding"),
    "parity": Command(
        LOOK,
        "parity.command",
        "the first quantity in which a strategy, or your own loop, differs from one process",
        "--choice zero3 --ranks 2",
    ),
    "plan": Command(
        LOOK,
        "planner.command",
        "what each strategy would need on devices that you do not have",
        "--model SmolLM2-360M --gpus 2xL4 --link pcie4",
    ),
    "doctor": Command(LOOK, "doctor.command", "why NCCL or Gloo hangs, fails or is slow", "profile/zero3"),
    "check-gpu": Command(LOOK, "commands.check_gpu", "check the claims of the project on your GPUs", "--quick"),
}

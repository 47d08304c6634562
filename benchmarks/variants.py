"""Choices with settings of their own, as a benchmark's command line names them: `pytorch_ddp:bucket_cap_mb=1`."""

import argparse
import re
from collections.abc import Callable, Sequence

from ddp_lab.runtime.cli import exit_with_error, unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import argument
from ddp_lab.strategy.options import bucket_cap

LOCAL, RUNTIME = "local", "runtime"
"""A step without communication, as a person writes it for one device; and one through this project's training loop,
with the small exchanges of that loop, in which no gradient is sent."""
STATES = ("parameters", "gradients", "optimizer_state")
BARE = {
    "bare_loop": (2, ()),
    "bare_zero1": (3, ("optimizer_state",)),
    "bare_zero2": (2, STATES),
    "bare_zero3": (3, STATES),
}
"""Loops without this project's, as torch's tutorials write them: around PyTorch DDP, DDP with ZeroRedundancyOptimizer,
FSDP2 that keeps blocks until backward, and FSDP2 that reshards them after forward. Each with how often it sends all
parameters in a step, times (N-1)/N, and what it shards."""
PLAIN = (LOCAL, *BARE)
"""Loops written by hand, which have no setting but their precision."""
SETTINGS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(("precision", "param_dtype", "reduce_dtype", "compress", "offload"), str),
    **dict.fromkeys(("compile", "sequence_parallel"), {"on": True, "off": False}.__getitem__),
    **{"activation_checkpointing": str, "bucket_cap_mb": argument(bucket_cap)},
    **{"pipeline_schedule": str, "stages_per_rank": int},
    "mesh": lambda text: re.sub(r"-?([a-z]+)(\d+)", r",\1=\2", text).lstrip(","),
}
"""What may differ between the choices of one benchmark, and how its value is read."""


def parse_variant(text: str, names: Sequence[str]) -> dict[str, object]:
    """Fields of `RunConfig` from `choice` or `choice:setting=value:setting=value`. A mesh is written as in names of
    folders: `mesh=dp2-tp2`.

    Leaves the process with one line where the text makes no sense.
    """
    choice, *pairs = re.split(r":(?=\w+=)", text)  # a value may have colons
    if choice not in names:
        exit_with_error(unknown_name("strategy", choice, names))
    fields: dict[str, object] = {"choice": choice}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in SETTINGS:
            exit_with_error(f"{text}: {unknown_name('setting', name, SETTINGS)}")
        try:
            fields[name] = SETTINGS[name](value)
        except (ValueError, KeyError, argparse.ArgumentTypeError):
            exit_with_error(f"{text}: {name} cannot be '{value}'")
    if choice in PLAIN and (unused := fields.keys() - {"choice", "precision"}):
        exit_with_error(
            f"{text}: {choice} has no setting but precision, so {', '.join(sorted(unused))} would do nothing"
        )
    try:
        RunConfig.of(**fields)
    except UserError as error:
        exit_with_error(f"{text}: {error}")
    return fields

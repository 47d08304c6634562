"""The flags of `scripts/plan.py`, and the model that they name. Imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from training.cli import rate
from training.config import AUTO, PRECISIONS, bucket_cap
from training.errors import UserError

if TYPE_CHECKING:
    from planner.models import Model

SIZES = ("d_model", "d_ff", "layers")
MORE_SIZES = ("heads", "kv_heads", "vocab")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that name a model: `--model`, or its sizes."""
    parser.add_argument(
        "--model",
        help="published model (from a built-in table, without network), or a local config.json or its folder",
    )
    parser.add_argument("--d-model", type=int, help="instead: width of a Llama's residual stream")
    parser.add_argument("--d-ff", type=int, help="with --d-model: width of its feed-forward layers")
    parser.add_argument("--layers", type=int, help="with --d-model: number of blocks")
    parser.add_argument("--heads", type=int, help="with --d-model: attention heads (default: of 64 features each)")
    parser.add_argument("--kv-heads", type=int, help="with --d-model: heads of keys and values (default: --heads)")
    parser.add_argument("--vocab", type=int, help="with --d-model: tokens in the vocabulary (default: 49152)")


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument(
        "--gpus", required=True, help="devices: 2xL4, or 4x8xH100 for 4 nodes of 8; 2xcpu is this machine"
    )
    parser.add_argument("--link", required=True, help="between devices of a node: nvlink4, pcie4, 10gbit, ...")
    parser.add_argument("--between", help="between nodes, shared by the devices of one: ndr, 8xndr, 100gbit, ...")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a sample (default: 512)")
    parser.add_argument("--global-batch-size", type=int, default=8, help="samples in an optimizer step (default: 8)")
    parser.add_argument(
        "--grad-accum-steps", type=int, default=2, help="micro-batches of a rank in an optimizer step (default: 2)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="bf16: autocast (default: fp32)")
    parser.add_argument("--clip-grad-norm", type=float, help="clip gradients to this norm, as the runner would")
    cap = "largest gradient bucket in MiB (default: auto)"
    parser.add_argument("--bucket-cap-mb", type=bucket_cap, default=AUTO, help=cap)
    parser.add_argument("--price", type=float, help="of one device for an hour, in any currency")
    parser.add_argument("--record", type=Path, metavar="FILE", help="operators as `plan.py record` timed them")
    parser.add_argument(
        "--contention",
        type=float,
        metavar="FACTOR",
        help="how many times as long compute takes beside collectives (default: 1.19 on GPUs, published; 1 on CPUs)",
    )
    parser.add_argument(
        "--efficiency", type=float, help="part of peak rates that operators reach, above 0 to 1 (default: by the table)"
    )
    parser.add_argument("--choices", metavar="NAMES", help="only these strategies, with commas between (default: all)")
    parser.add_argument(
        "--jobs", type=int, help="simulations at a time, in processes of their own (default: a core each)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with table and pictures there")
    parser.add_argument(
        "--grid-seconds",
        type=float,
        default=60.0,
        help="of --html: seconds for simulating other settings; 0: none (default: 60)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there")


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--parameters", type=float, help="instead of a model: a number of parameters, such as 7.5e9")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share the states (default: 1)")
    parser.add_argument(
        "--precision",
        choices=(*PRECISIONS, "mixed"),
        default="fp32",
        help="bf16: autocast, as the runner's; mixed: 16-bit parameters, as in ZeRO's table (default: fp32)",
    )
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples in a micro-batch (default: 1)")
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a sample (default: 512)")
    parser.add_argument("--device-memory-gib", type=float, default=80.0, help="of one device, in GiB (default: 80)")


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write; give it to `plan.py --record`")
    parser.add_argument(
        "--micro-batch-sizes", default="1,2", help="samples in a micro-batch, with commas between (default: 1,2)"
    )
    parser.add_argument("--sequence-length", type=int, default=512, help="tokens of a sample (default: 512)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="bf16: autocast (default: fp32)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--repeats", type=int, default=7, help="how often each step is timed (default: 7)")


def add_what_if_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="a run record (*.run.json), or its folder profile/CHOICE")
    parser.add_argument(
        "--ranks", type=int, help="number of ranks, each with its recorded batch (default: as recorded)"
    )
    parser.add_argument("--rate", type=rate, help="of every link, such as 10gbit (default: as recorded)")
    parser.add_argument(
        "--bucket-cap-mb", type=bucket_cap, help="largest gradient bucket in MiB (default: as recorded)"
    )
    parser.add_argument("--choice", help="another strategy (default: the recorded one)")


COMMANDS = {
    "plan": (add_plan_flags, "planner.plan_command"),
    "memory": (add_memory_flags, "planner.memory_command"),
    "record": (add_record_flags, "planner.record_command"),
    "what-if": (add_what_if_flags, "planner.what_if"),
}
"""For each command what makes its flags, and the module whose `run` does it, which is imported only then."""


def chosen_model(options: argparse.Namespace) -> "Model":
    """The model that these flags name.

    Raises:
        UserError: they name none, or two, or one that cannot be built.
    """
    from planner import models

    given = [flag(size) for size in (*SIZES, *MORE_SIZES) if getattr(options, size) is not None]
    if options.model is not None:
        if given:
            raise UserError(f"{given[0]} is for a model by sizes; it does not go with --model {options.model}")
        return models.find(options.model)
    missing = [flag(size) for size in SIZES if getattr(options, size) is None]
    if len(missing) == len(SIZES):
        raise UserError("no model: give --model, or --d-model, --d-ff and --layers")
    if missing:
        raise UserError(f"{missing[0]} is missing; a model by sizes needs --d-model, --d-ff and --layers")
    return models.from_sizes(*(getattr(options, size) for size in (*SIZES, *MORE_SIZES)))


def require_between(options: argparse.Namespace, name: str, least: float, most: float) -> None:
    """Refuse a value out of bounds; None is accepted.

    Raises:
        UserError: names flag, value and bounds.
    """
    value = getattr(options, name)
    if value is not None and not least <= value <= most:
        raise UserError(f"{flag(name)} {value:.10g}: must be from {least:,.10g} to {most:,.10g}")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")

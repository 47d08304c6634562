"""Check without a GPU that strategies are safe on CUDA streams, and count what they make the host and streams wait for.

    python scripts/check_streams.py                         # every choice that is not DeepSpeed's
    python scripts/check_streams.py --choices zero3 --model branching --micro-batches 3

It prints the table of docs/gpu.md. Exit code 0: no race. 1: a race was found; it is printed. 2: wrong command line.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

from ddp_lab.choices import CHOICES, load
from ddp_lab.runtime.cli import OneLineParser, at_least
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.stream_checker.check import STEPS, adamw, check, plain_loop
from ddp_lab.stream_checker.device import CheckedCounts
from tests.models import MODELS, build, make_batch

COLUMNS = ("strategy", "races", "waits of the host", "waits in backward", "stalls", "collectives", "launches", "copied")
IN_BUCKETS = ("bucket_ddp_async", "baseline", "zero1", "zero2", "pytorch_ddp", "pytorch_ddp_plain", "pytorch_zero1")
SMALL_MB = 0.003


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--choices", default=",".join(CHOICES), help="with commas between (default: all)")
    models = [*MODELS, "branching", "normed", "deep"]
    parser.add_argument("--model", choices=models, default="llama", help="of tests/models.py (default: %(default)s)")
    parser.add_argument("--micro-batches", type=at_least(1), default=1, help="of a step (default: %(default)s)")
    options = parser.parse_args()
    choices = options.choices.split(",")
    if unknown := [name for name in choices if name not in CHOICES]:
        parser.error(f"--choices {', '.join(unknown)}: no such strategy; there are {', '.join(CHOICES)}")
    torch.set_num_threads(1)
    counts = {name: look(name, options.model, options.micro_batches) for name in choices}
    print(markdown(rows_of(counts, options.model, options.micro_batches)))
    for name, count_of_choice in counts.items():
        for text, count in count_of_choice.races.most_common():
            print(f"race: {name}: {text} ({count} times)")
    return 1 if any(count_of_choice.races for count_of_choice in counts.values()) else 0


def look(choice: str, model: str, micro_batches: int) -> CheckedCounts:
    """The counts of a choice. Buckets are small beside the model, as they are beside a large one."""
    options = StrategyOptions(bucket_cap_mb=SMALL_MB) if choice in IN_BUCKETS else StrategyOptions()
    make_strategy = lambda: nullcontext(load(choice)(build(model), adamw, options))  # noqa: E731
    return check(make_strategy, partial(make_batch, model, 3), micro_batches)


def rows_of(counts: dict[str, CheckedCounts], model: str, micro_batches: int) -> list[list[str]]:
    """A row for each choice. Launches and copies are those that a loop on one device does not need."""
    alone = plain_loop(partial(build, model), partial(make_batch, model, 3), micro_batches)
    gradient_bytes = sum(4 * p.numel() for p in build(model).parameters() if p.requires_grad)
    return [
        [
            f"`{name}`",
            str(sum(count_of_choice.races.values())),
            f"{sum(count_of_choice.host_waits.values()) / STEPS:g}",
            f"{count_of_choice.waits_in_backward / STEPS:g}",
            f"{count_of_choice.stalls / STEPS:g}",
            f"{count_of_choice.collectives / STEPS:g}",
            f"{(count_of_choice.launches - alone.launches) / STEPS:+g}",
            f"{(count_of_choice.copied_bytes - alone.copied_bytes) / STEPS / gradient_bytes:.2f} x",
        ]
        for name, count_of_choice in counts.items()
    ]


def markdown(rows: list[list[str]]) -> str:
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())

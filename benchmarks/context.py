"""Percent of ideal of attention over tokens that are cut over ranks, forward and backward.

    torchrun --standalone --nproc_per_node=2 benchmarks/context.py --csv FILE

Ideal is a rank's attention over the whole sequence, divided by the ranks. All ranks compute the whole at once, so that
they share caches, memory and, where there are more ranks than cores, cores, as they do when the sequence is cut.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.rounds import time_rounds
from context_parallel.attention import Context
from context_parallel.ulysses import require_heads
from ddp_lab.runtime.cli import OneLineParser, add_csv, at_least, exit_with_error
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.settings.mesh import CONTEXT_PARALLEL

FEATURES = 64
"""Of one head's queries, keys and values."""
WHOLE = "whole"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Attention:
    """Runs one way of attention, forward and backward. `kept`: queries, keys, values and the gradient of outputs."""

    attend: Attend
    kept: tuple[Tensor, ...]

    def steps(self, count: int) -> None:
        *qkv, gradient = self.kept
        for _ in range(count):
            torch.autograd.grad(self.attend(*qkv), qkv, gradient)


def made(heads: int, tokens: int, device: torch.device) -> tuple[Tensor, ...]:
    """On a GPU in bf16, which its fastest kernel takes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    *qkv, gradient = torch.randn(4, 1, heads, tokens, FEATURES, device=device, dtype=dtype)
    return *(tensor.clone().requires_grad_() for tensor in qkv), gradient


def measured(heads: int, tokens: int, rounds: int, ranks: Ranks) -> pd.DataFrame:
    """A row for each way. Collective over all ranks.

    Raises:
        UserError: heads or tokens do not go with so many ranks.
    """
    group, size = dist.group.WORLD, ranks.world_size
    assert group is not None
    require_heads(heads, size)
    if tokens % (2 * size):
        raise UserError(f"--tokens {tokens}: must be a multiple of twice the {size} ranks, {2 * size}")

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def cut(way: str) -> Attend:
        context = Context(group, way)
        return lambda q, k, v: context.attend(q, k, v, None, FEATURES**-0.5, 0.0)

    part = made(heads, tokens // size, ranks.device)
    ways = {way: Attention(cut(way), part) for way in CONTEXT_PARALLEL}
    times = time_rounds({WHOLE: Attention(whole, made(heads, tokens, ranks.device)), **ways}, rounds, ranks)
    ideal = times[WHOLE] / size
    percent = 100 * times[[*ways]].rdiv(ideal, axis="index")
    low, middle, high = (percent.quantile(quantile) for quantile in (0.25, 0.5, 0.75))
    table = pd.DataFrame({"way": [*ways], "ranks": size, "heads": heads, "tokens": tokens, "rounds": rounds})
    found = {"percent_median": middle, "percent_p25": low, "percent_p75": high, "ms_median": times[[*ways]].median()}
    return table.assign(**{name: column.to_numpy() for name, column in found.items()}, ideal_ms_median=ideal.median())


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=at_least(1), default=4096, help="of the whole sequence (default: 4096)")
    parser.add_argument("--heads", type=at_least(1), default=4, help=f"of {FEATURES} features each (default: 4)")
    parser.add_argument("--rounds", type=at_least(1), default=15, help="in which all run in turn (default: 15)")
    add_flags(parser, ("device",))
    add_csv(parser)
    options = parser.parse_args()
    from ddp_lab.runtime.distributed import joined_ranks
    from ddp_lab.runtime.process.environment import silence_libraries

    silence_libraries()
    try:
        with joined_ranks(RunConfig(device=options.device)) as ranks:
            table = measured(options.heads, options.tokens, options.rounds, ranks)
            if ranks.is_main:
                print(table.to_string(index=False, float_format="{:.1f}".format))
                if options.csv:
                    table.to_csv(options.csv, index=False)
    except (UserError, OSError) as error:
        exit_with_error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())

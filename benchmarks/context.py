"""Percent of ideal of attention over tokens that are cut over ranks, forward and backward.

    ddp-lab bench context --ranks 2 --csv FILE

Ideal is a rank's attention over the whole sequence, divided by the ranks. All ranks compute the whole at once, so that
they share caches, memory and, where there are more ranks than cores, cores, as they do when the sequence is cut.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.rounds import Steps, quartiles, run_program, table_parser, time_rounds
from context_parallel.attention import Context
from context_parallel.ulysses import require_heads
from ddp_lab.runtime.cli import at_least
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.settings.mesh import CONTEXT_PARALLEL

FEATURES = 64
"""Of one head's queries, keys and values."""
WHOLE = "whole"


def steps_of(attend: Callable[..., Tensor], heads: int, tokens: int, device: torch.device) -> Steps:
    """One way of attention, forward and backward. On a GPU in bf16, which its fastest kernel takes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, heads, tokens, FEATURES)
    gradient, *qkv = (torch.randn(shape, device=device, dtype=dtype).requires_grad_(index > 0) for index in range(4))

    def steps(count: int) -> None:
        for _ in range(count):
            torch.autograd.grad(attend(*qkv), qkv, gradient)

    return steps


def measured(heads: int, tokens: int, rounds: int, ranks: RankContext) -> pd.DataFrame:
    """A row for each way. Collective over all ranks.

    Raises:
        UserError: heads or tokens do not go with so many ranks.
    """
    group, size = dist.group.WORLD, ranks.world_size
    assert group is not None
    require_heads(heads, size)
    if tokens % (2 * size):
        raise UserError(f"--tokens {tokens}: must be a multiple of twice the {size} ranks, {2 * size}")

    def cut(way: str) -> Callable[..., Tensor]:
        context = Context(group, way)
        return lambda q, k, v: context.attend(q, k, v, None, FEATURES**-0.5, 0.0)

    steps = {way: steps_of(cut(way), heads, tokens // size, ranks.device) for way in CONTEXT_PARALLEL}
    uncut = steps_of(partial(scaled_dot_product_attention, is_causal=True), heads, tokens, ranks.device)
    times = time_rounds({WHOLE: uncut, **steps}, rounds, ranks)
    ideal, ways = times[WHOLE] / size, times.drop(columns=WHOLE)
    table = quartiles(100 * ways.rdiv(ideal, axis="index"), "percent")
    table = table.assign(ms_median=ways.median(), ideal_ms_median=ideal.median(), ranks=size)
    return table.assign(heads=heads, tokens=tokens, rounds=rounds).rename_axis("way").reset_index()


def main(arguments: Sequence[str]) -> int:
    parser = table_parser("context", __doc__)
    parser.add_argument("--tokens", type=at_least(1), default=4096, help="of the whole sequence (default: 4096)")
    parser.add_argument("--heads", type=at_least(1), default=4, help=f"of {FEATURES} features each (default: 4)")
    parser.add_argument("--rounds", type=at_least(1), default=15, help="in which all run in turn (default: 15)")
    add_flags(parser, ("device",))
    options = parser.parse_args(arguments)

    def measure(_: RunConfig, ranks: RankContext) -> pd.DataFrame:
        return measured(options.heads, options.tokens, options.rounds, ranks)

    return run_program(measure, options.csv, device=options.device)

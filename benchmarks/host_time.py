"""What the host does in a step: time of the training thread, and operators that it issues.

    ddp-lab bench host_time --ranks 1 --choices bucket_ddp_async,zero1 \\
        --against pytorch_ddp --rounds 40 --csv FILE

Where a GPU is faster than the thread that feeds it, a step takes as long as the host does. Here the model is so small
that its kernels cost nearly nothing: 32 blocks of 32 features, with the twelve parameters of a transformer's each. The
time is that of the training thread alone; what it waits for, and what other threads do, does not count. Operators are
those below autograd that run a kernel or send: views and allocations are left out, and one over a list of tensors
counts once, as one of FSDP2's own does. A GPU needs some 5 to 10 us to launch each. Choices take turns as in
`benchmarks/strategies.py`.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rounds import quartiles, run_program, time_rounds
from benchmarks.runners import LOCAL, make_runner, parse_variant
from benchmarks.strategies import ALONE, choices_parser
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.synthetic import SyntheticSamples
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import Ranks

LAYERS, WIDTH, SAMPLES = 32, 32, 2


class Thin(nn.Module):
    """Deep and thin: blocks with the twelve parameters of a transformer's, and the fewest kernels between them."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.LayerNorm(WIDTH) for _ in range(2 * LAYERS))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(part for _ in range(2) for part in (next(norms), *(nn.Linear(WIDTH, WIDTH) for _ in "12"))))
            for _ in range(LAYERS)
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        for block in self.blocks:
            inputs = inputs + block(inputs)
        return argparse.Namespace(loss=nn.functional.mse_loss(inputs, targets))


class CountLaunches(TorchDispatchMode):
    """Counts the operators of this thread that run a kernel, or send."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        self.count += not (makes_view or "empty" in func.name() or func.namespace == "profiler")
        return func(*args, **(kwargs or {}))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    options = choices_parser("host_time", __doc__, 1, 40).parse_args(arguments)
    wanted = [options.against, *options.choices.split(","), *ALONE]
    options.variants = {text: parse_variant(text) for text in wanted}
    return options


def measure(options: argparse.Namespace, config: RunConfig, ranks: Ranks) -> pd.DataFrame:
    """One row for each choice; its own time is what it takes beyond `LOCAL`, in ms. Collective."""
    config = config.but(global_batch_size=SAMPLES * ranks.world_size)
    samples = SyntheticSamples(config.global_batch_size, seed=0, width=WIDTH)
    steps, launches = {}, {}
    for label, fields in options.variants.items():
        runner = make_runner(config.but(**fields), ranks, lambda _: Workload(Thin(), samples, samples))
        runner.steps(runner.settling_steps)
        with CountLaunches() as counter:
            runner.steps(1)
        steps[label], launches[label] = runner.steps, counter.count
    times = time_rounds(steps, options.rounds, ranks, time.thread_time)
    medians = {"host_ms_median": times.median(), "own_ms_median": times.sub(times[LOCAL], axis="index").median()}
    table = pd.DataFrame(
        {"choice": list(steps), "against": options.against, **medians, "operators": pd.Series(launches)}
    )
    return table.join(quartiles(times.div(times[options.against], axis="index"), "ratio"))


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    return run_program(partial(measure, options), options.csv, device="cpu", grad_accum_steps=1)

"""What the host does in a step: time of the training thread, and operators that it issues.

    torchrun --standalone --nproc_per_node=1 benchmarks/host_time.py --choices bucket_ddp_async,zero1 \\
        --against pytorch_ddp --rounds 40 --csv FILE

Where a GPU is faster than the thread that feeds it, a step takes as long as the host does. Here the model is so small
that its kernels cost nearly nothing: 32 blocks of 32 features, with the twelve parameters of a transformer's each. The
time is that of the training thread alone; what it waits for, and what other threads do, does not count. Operators are
those below autograd that run a kernel or send: views and allocations are left out, and one over a list of tensors
counts once, as one of FSDP2's own does. A GPU needs some 5 to 10 us to launch each. Choices take turns as in
`benchmarks/strategies.py`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import pandas as pd
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.rounds import time_rounds
from benchmarks.runners import make_runner
from benchmarks.strategies import ALONE, NAMES, load_strategy
from benchmarks.variants import LOCAL, parse_variant
from ddp_lab.runtime.cli import OneLineParser, add_csv, at_least, exit_with_error
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.synthetic import SyntheticSamples
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import Ranks, joined_ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.process.environment import silence_libraries

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
        makes_view = any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        self.count += not (makes_view or "empty" in func.name() or func.namespace == "profiler")
        return func(*args, **(kwargs or {}))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", required=True, help="comma-separated, as those of benchmarks/strategies.py")
    parser.add_argument("--against", default="pytorch_ddp", help="the choice that ratios refer to")
    parser.add_argument("--rounds", type=at_least(1), default=40, help="timed rounds of three steps")
    add_csv(parser)
    options = parser.parse_args(arguments)
    wanted = [options.against, *options.choices.split(","), *ALONE]
    options.variants = {text: parse_variant(text, NAMES) for text in wanted}
    return options


def measure(options: argparse.Namespace, ranks: Ranks) -> pd.DataFrame:
    """One row for each choice; its own time is what it takes beyond `LOCAL`, in ms. Collective."""
    config = RunConfig(global_batch_size=SAMPLES * ranks.world_size, grad_accum_steps=1)
    samples = SyntheticSamples(config.global_batch_size, seed=0, width=WIDTH)
    runners, launches = {}, {}
    for label, fields in options.variants.items():
        runner = make_runner(
            config.but(**fields), ranks, load_strategy, build=lambda _: Workload(Thin(), samples, samples)
        )
        runner.steps(runner.settling_steps)
        with CountLaunches() as counter:
            runner.steps(1)
        runners[label], launches[label] = runner, counter.count
    times = time_rounds(runners, options.rounds, ranks, time.thread_time)
    ratios = times.div(times[options.against], axis="index").quantile([0.25, 0.5, 0.75])
    beyond = times.sub(times[LOCAL], axis="index").median()
    names = {"choice": list(runners), "against": options.against}
    medians = {"host_ms_median": times.median(), "own_ms_median": beyond, "operators": pd.Series(launches)}
    shown = {f"ratio_{name}": ratios.loc[at] for name, at in (("median", 0.5), ("p25", 0.25), ("p75", 0.75))}
    return pd.DataFrame(medians | shown | names)


def show(table: pd.DataFrame, options: argparse.Namespace) -> None:
    headings = {"host_ms_median": "host, ms", "own_ms_median": "own, ms", "operators": "operators"}
    headings |= {"ratio_median": "ratio", "ratio_p25": "p25", "ratio_p75": "p75"}
    print(f"host time of a step, {options.rounds} rounds, ratios to {options.against}")
    print(table.rename(columns=headings)[["choice", *headings.values()]].round(3).to_string(index=False))
    if options.csv:
        table.to_csv(options.csv, index=False)
        print(f"table: {options.csv}")


def main() -> int:
    options = parse()
    silence_libraries()
    try:
        with joined_ranks(RunConfig(device="cpu")) as ranks:
            table = measure(options, ranks)
            if ranks.is_main:
                show(table, options)
    except UserError as error:
        exit_with_error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())

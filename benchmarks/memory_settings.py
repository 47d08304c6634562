"""Memory at the peak of a step, predicted and measured: choice x recomputation x precision x offload.

    torchrun --standalone --nproc_per_node=2 benchmarks/memory_settings.py --csv FILE

Each cell is one strategy on one global batch of the workload, in this process group. Once it has settled, a step is
measured as `benchmarks/strategies.py --rounds 0` measures it. `planner.savings` predicts the same step, without data. A
combination that the choice refuses has no row.
"""

import argparse
import gc
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import sharding
from benchmarks.collectives import names_of
from ddp_lab.runtime.cli import OneLineParser, exit_with_error
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workloads import WORKLOADS
from ddp_lab.runtime.errors import UnsupportedError, UserError

if TYPE_CHECKING:
    import pandas as pd

CHOICES = "baseline,zero1,zero2,zero3,pytorch_zero3"
RECOMPUTED = ("none", "block", "selective")
PRECISIONS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16, fp32 masters": {"param_dtype": "bf16"},
    "bf16": {"param_dtype": "bf16", "master_dtype": "bf16"},
}
OFFLOADS = (None, "optimizer", "parameters")
MIB = 2**20


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(sharding.REGISTRY.sentences)
    parser.add_argument("--choices", type=names_of("strategy", known), default=CHOICES, help=f"default: {CHOICES}")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="sample-lm", help="default: sample-lm")
    parser.add_argument("--global-batch-size", type=int, default=4, help="samples in an optimizer step (default: 4)")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    return parser.parse_args(arguments)


def cells(base: RunConfig, choices: Sequence[str]) -> Iterator[tuple[dict[str, Any], RunConfig]]:
    """What the table says of each combination that its choice takes, and its settings."""
    for choice, recomputed, precision, offload in itertools.product(choices, RECOMPUTED, PRECISIONS, OFFLOADS):
        changes: dict[str, Any] = {"choice": choice, "activation_checkpointing": recomputed, "offload": offload}
        config = replace(base, **changes, **PRECISIONS[precision])
        try:
            sharding.load(choice).require_options(config.strategy_options())
        except UnsupportedError:
            continue
        yield changes | {"offload": offload or "none", "precision": precision}, config


def main() -> int:
    options = parse()
    from ddp_lab.runtime.distributed import joined_ranks
    from ddp_lab.runtime.run import silence_libraries

    silence_libraries()
    base = RunConfig(
        workload=options.workload,
        global_batch_size=options.global_batch_size,
        train_samples=options.global_batch_size,
        eval_samples=1,
    )
    found = list(cells(base, options.choices))
    try:
        with joined_ranks(base) as ranks:
            for row, config in found:
                row["measured_bytes"] = measured(config, ranks)
                row["world_size"] = ranks.world_size
        if ranks.is_main:
            show(predicted(found), options.csv)
    except UserError as error:
        exit_with_error(str(error))
    return 0


def measured(config: RunConfig, ranks: Any) -> int:
    """Bytes at the peak of a step, of the rank that holds most. Collective."""
    from benchmarks.runners import make_runner, measure_memory

    runner = make_runner(config, ranks, sharding.load)
    _, peak = measure_memory(runner, ranks.device)
    del runner
    gc.collect()  # strategies are in reference cycles
    return peak


def predicted(found: Sequence[tuple[dict[str, Any], RunConfig]]) -> "pd.DataFrame":
    """The table, with a prediction for each cell."""
    import pandas as pd

    table = pd.DataFrame([row | {"predicted_bytes": predict(config, row["world_size"])} for row, config in found])
    return table.assign(error_pct=100 * (table["predicted_bytes"] / table["measured_bytes"] - 1))


def predict(config: RunConfig, ranks: int) -> int:
    """Bytes at the peak of a step.

    Raises:
        UserError: it cannot be simulated.
    """
    from ddp_lab.planner.savings import RECORDED, Recorded

    row = Recorded(config, ranks, "cpu", "gloo").row(RECORDED, {})
    if row["note"]:
        raise UserError(row["note"])
    return int(row["peak_bytes"])


def show(table: "pd.DataFrame", path: Path | None) -> None:
    shown = table.assign(measured=table["measured_bytes"] / MIB, predicted=table["predicted_bytes"] / MIB)
    columns = ["choice", "activation_checkpointing", "precision", "offload", "measured", "predicted", "error_pct"]
    print("MiB of the rank that holds most, at the peak of a step")
    print(shown[columns].to_string(index=False, float_format="{:,.2f}".format))
    print(f"largest error: {table['error_pct'].abs().max():.2f} %, of {len(table)} cells")
    if path:
        table.to_csv(path, index=False)


if __name__ == "__main__":
    sys.exit(main())

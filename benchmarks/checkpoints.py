"""What saving costs: steps without, with a checkpoint in the background, and with one in the foreground, in turn.

    torchrun --standalone --nproc_per_node=2 benchmarks/checkpoints.py --ddp-choice zero2 --every 10 --rounds 8

A window is `--every` optimizer steps, after the first of which a checkpoint is saved (or none, or in the foreground).
Each round runs a window of each kind in a new random order, and a kind is judged by the median over rounds of its time
over that of the window without in the same round. What a background save has not done by the end of its window is
waited for outside of it; `complete_ms` says how long it took in all.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import ddp
import sharding
from training.cli import OneLineParser, exit_with_error, unknown_name
from training.config import RunConfig
from training.data.workloads import WORKLOADS
from training.errors import UserError

KINDS = ("none", "background", "foreground")
COLUMNS = (
    "kind",
    "choice",
    "workload",
    "world_size",
    "every",
    "rounds",
    "step_ms_median",
    "ratio_median",
    "ratio_p25",
    "ratio_p75",
    "pause_ms_median",
    "complete_ms_median",
    "saved_bytes",
)
WARMUP_ROUNDS = 1


def parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp-choice", default="zero2", help="the strategy; default: %(default)s")
    parser.add_argument("--workload", default="sample", help="default: %(default)s")
    parser.add_argument(
        "--every", type=int, default=10, help="optimizer steps for each checkpoint; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds; default: %(default)s")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder); emptied afterwards")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    options = parser.parse_args()
    known = {**sharding.REGISTRY.sentences, **ddp.REGISTRY.sentences}
    for kind, name, names in (("strategy", options.ddp_choice, known), ("workload", options.workload, WORKLOADS)):
        if name not in names:
            exit_with_error(unknown_name(kind, name, names))
    if options.every < 1 or options.rounds < 1:
        parser.error("--every and --rounds must be at least 1")
    return options


def main() -> int:
    options = parse()
    from training.distributed import from_rank0, joined_ranks

    config = RunConfig(choice=options.ddp_choice, workload=options.workload, no_profile=True)
    try:
        with joined_ranks(config) as ranks:
            with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as own:
                table = measure(options, Path(from_rank0(lambda: own)), ranks)
            if ranks.is_main:
                print(table.to_string(index=False, float_format="{:.3f}".format))
                if options.csv:
                    table.to_csv(options.csv, index=False)
    except (UserError, OSError) as error:
        exit_with_error(str(error))
    return 0


def measure(options: argparse.Namespace, folder: Path, ranks: Any) -> Any:
    """A row a kind of window. Collective."""
    import pandas as pd
    import torch.distributed as dist

    windows = Windows(options, folder, ranks)
    samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    order = random.Random(0)
    for number in range(-WARMUP_ROUNDS, options.rounds):
        for kind in order.sample(KINDS, len(KINDS)):
            measured = windows.run(kind)
            slowest: list[Any] = [None] * ranks.world_size
            dist.all_gather_object(slowest, measured)
            if number >= 0:
                samples[kind].append({name: max(row[name] for row in slowest) for name in measured})
    windows.close()
    rows = []
    for kind in KINDS:
        ratios = [
            mine["window_ms"] / base["window_ms"] for mine, base in zip(samples[kind], samples["none"], strict=True)
        ]
        quarter = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        median = {name: statistics.median(row[name] for row in samples[kind]) for name in samples[kind][0]}
        rows.append(
            [kind, options.ddp_choice, options.workload, ranks.world_size, options.every, options.rounds]
            + [median["window_ms"] / options.every, quarter[1], quarter[0], quarter[2]]
            + [median["pause_ms"], median["complete_ms"], int(median["bytes"])]
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


class Windows:
    """One strategy on one global batch, with a folder of checkpoints for each kind that saves."""

    def __init__(self, options: argparse.Namespace, folder: Path, ranks: Any) -> None:
        from benchmarks.runners import one_global_batch
        from training.checkpoint.session import Checkpoints
        from training.data.workloads import build_workload
        from training.run import build_strategy, seed_everything

        registry = sharding.REGISTRY if options.ddp_choice in sharding.REGISTRY.sentences else ddp.REGISTRY
        plain = RunConfig(choice=options.ddp_choice, workload=options.workload, no_profile=True)
        seed_everything(0, rank=0)
        workload = build_workload(plain)
        self._batches = one_global_batch(plain, workload, ranks)
        self._strategy = build_strategy(plain, workload, ranks, registry.load(options.ddp_choice))
        self._every, self._samples = options.every, plain.global_batch_size
        self._of_kind: dict[str, Checkpoints] = {}
        for kind in KINDS[1:]:
            config = RunConfig(
                choice=options.ddp_choice,
                workload=options.workload,
                checkpoint_every=1,
                keep_last=1,
                checkpoint_dir=str(folder / kind),
                checkpoint_async=kind == "background",
            )
            self._of_kind[kind] = Checkpoints(config, ranks, "benchmark", {})
            self._of_kind[kind].begin(self._strategy, config, len(workload.train), sys.maxsize, lambda: self._batches)
        self._folder = folder
        self._total = 0

    def run(self, kind: str) -> dict[str, float]:
        """Milliseconds of a window, of the pause that saving made in it, and until the checkpoint was complete."""
        import torch.distributed as dist

        from training.loop import TrainingResult, Unwatched, train

        checkpoints = self._of_kind.get(kind)
        moments: dict[str, float] = {}

        def after_step(result: TrainingResult) -> None:
            if checkpoints is not None and len(result.loss) == 1:
                self._total += 1
                moments["begin"] = time.perf_counter()
                many = self._total
                checkpoints.after_step(TrainingResult(result.loss * many, result.step_time_s * many, [1] * many))
                moments["resumed"] = time.perf_counter()

        dist.barrier()
        start = time.perf_counter()
        train(self._strategy, [(self._samples, self._batches)] * self._every, Unwatched(), None, after_step)
        self._strategy.finish_parameter_synchronization()
        end = time.perf_counter()
        if checkpoints is None:
            return {"window_ms": 1000 * (end - start), "pause_ms": 0.0, "complete_ms": 0.0, "bytes": 0}
        checkpoints.finish()
        done = time.perf_counter()
        saved = max((file.stat().st_size for file in (self._folder / kind).glob("step_*/rank_*")), default=0)
        return {
            "window_ms": 1000 * (end - start),
            "pause_ms": 1000 * (moments["resumed"] - moments["begin"]),
            "complete_ms": 1000 * (done - moments["begin"]),
            "bytes": saved,
        }

    def close(self) -> None:
        for checkpoints in self._of_kind.values():
            checkpoints.close()


if __name__ == "__main__":
    sys.exit(main())

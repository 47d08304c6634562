"""Step times and peaks over shaped links, against predictions from what the same machine was calibrated with."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.predictions.memory_command import MIB, MODELS
from training.cli import unknown_name
from training.communication.rates import Rate
from training.errors import UserError

if TYPE_CHECKING:
    from benchmarks.predictions.held import Held
    from training.config import RunConfig
    from training.strategy import MicroBatch

ROOT = Path(__file__).resolve().parent.parent.parent
HAND_WRITTEN = "simple_ddp,flat_ddp,simple_ddp_hook,simple_ddp_async,bucket_ddp_async,zero1,zero2,zero3"
TIMEOUT_S, MOST_TAKES = 3600, 100


@dataclass(frozen=True)
class Case:
    """A model on so many nodes of one rank, with links of one rate.

    Attributes:
        folder: Of what was measured in one take at this rate with these ranks.
    """

    model: str
    rate: str
    ranks: int
    config: "RunConfig"
    folder: Path

    @property
    def steps(self) -> Path:
        """What `step_ranks.py` measured."""
        return self.folder / f"{self.model}_steps.json"

    @property
    def operators(self) -> Path:
        """Record of the step of the rank with the longest samples."""
        return self.folder / f"{self.model}_record.json"

    @property
    def collectives(self) -> Path:
        return self.folder / "reports" / "collectives" / f"gloo_cpu_{self.ranks}_ranks.json"

    @property
    def contention(self) -> Path:
        return self.folder / "reports" / "collectives" / "contention.json"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", default="mlp-wide", help=f"with commas between, of {', '.join(MODELS)} (default: %(default)s)")
    add("--choices", default=HAND_WRITTEN, help="with commas between (default: %(default)s)")
    add("--rates", default="1gbit", help="of each link, with commas between (default: %(default)s)")
    add("--ranks", default="2", help="numbers of nodes of one rank, with commas between (default: %(default)s)")
    add(
        "--rounds",
        type=int,
        default=5,
        help="of three steps of a choice, whose median counts (default: %(default)s)",
    )
    add("--global-batch-size", type=int, default=8, help="samples in an optimizer step (default: %(default)s)")
    add("--sizes", default="4K,16K,64K,256K,1M,2M,4M,8M,16M", help="of measured collectives (default: %(default)s)")
    add(
        "--seconds", type=float, default=0.5, help="for a size of a collective, and a part of contention (default: 0.5)"
    )
    add("--takes", type=int, default=1, help="times that calibration and steps are measured, in turn; medians count")
    add("--output-dir", type=Path, default=Path("planner_lab"), help="what is there is not measured again")
    add("--csv", type=Path, metavar="FILE", help="write the table there, too")


def run(options: argparse.Namespace) -> None:
    """Measure what is not measured yet, predict and print.

    Raises:
        UserError: the command line makes no sense, or something cannot be measured or predicted.
    """
    from benchmarks.predictions.held import median_of, show, spread_pct, write, wrong_orders
    from planner.plan import choices

    names = choices(options.choices.split(","))
    for case in cases(options):
        measure(case, names, options)
    takes = [row for case in cases(options) for row in compare(case, names)]
    rows = median_of(takes)
    if options.takes > 1:
        print(
            f"measured steps are {spread_pct(takes):.1f} % from the median of their {options.takes} takes, on average"
        )
    times, peaks = ([row for row in rows if row.what == what] for what in ("step", "peak"))
    show(times, "step time", 5, 2)
    pairs, wrong = wrong_orders(times)
    print(f"order of choices more than 5 % apart: {pairs - len(wrong)} of {pairs} right", *wrong, sep="\n  ")
    show(peaks, "\npeak of a step", 2, 0.5)
    write(rows, options.csv)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """All that the command line asks for.

    Raises:
        UserError: it names something that there is not.
    """
    from training.config import RunConfig

    models, rates = options.models.split(","), [Rate.parse(text) for text in options.rates.split(",")]
    for model in models:
        if model not in MODELS:
            raise UserError(f"--models: {unknown_name('model', model, MODELS)}")
    if not all(text.isdecimal() and int(text) > 1 for text in options.ranks.split(",")):
        raise UserError(f"--ranks {options.ranks}: numbers of 2 or more with commas between, such as 2,4")
    if not 1 <= options.takes <= MOST_TAKES:
        raise UserError(f"--takes {options.takes}: must be from 1 to {MOST_TAKES}")
    for take, ranks, rate in product(range(options.takes), map(int, options.ranks.split(",")), rates):
        for model in models:
            batch = {"global_batch_size": options.global_batch_size, "grad_accum_steps": 1}
            samples = {"train_samples": options.global_batch_size, "eval_samples": 1}
            config = RunConfig(**{**MODELS[model], **batch, **samples}, device="cpu", backend="gloo")
            config.micro_batch_size(ranks)
            yield Case(model, str(rate), ranks, config, options.output_dir / f"take_{take}" / f"{rate}_{ranks}_ranks")


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(case: Case, choices: Sequence[str], options: argparse.Namespace) -> None:
    """Everything of a case that no file holds yet: calibration first, then what is held against it."""
    case.folder.mkdir(parents=True, exist_ok=True)
    seconds = str(options.seconds)
    if not case.collectives.exists():
        kinds = "all_reduce,all_gather,broadcast,reduce_scatter,all_to_all,sharding.all_gather"
        flags = ["--collectives", kinds, "--sizes", options.sizes, "--seconds-per-size", seconds]
        # As in training: a link has no time to rest between two calls, and caches hold no gradients.
        flags += ["--in-a-row", "5", "--spread", "64M"]
        in_lab(case, "collectives.py", *flags, "--output-dir", str(case.folder))
    if not case.contention.exists():
        in_lab(case, "contention.py", "--seconds", seconds, "--output-dir", str(case.folder))
    if not case.operators.exists():
        record_operators(case)
    if not case.steps.exists():
        arguments = [str(case.steps.resolve()), ",".join(choices), str(options.rounds), settings_of(case)]
        in_lab(case, "predictions/step_ranks.py", *arguments)


def in_lab(case: Case, script: str, *flags: str) -> None:
    """Run a benchmark on the case's nodes."""
    lab = [sys.executable, str(ROOT / "scripts" / "link_lab.py"), "--nodes", str(case.ranks), "--rate", case.rate]
    command = [*lab, "--", str(ROOT / "benchmarks" / script), *flags]
    finished(f"{script} at {case.rate}, {case.ranks} ranks", command)


def finished(what: str, command: Sequence[str]) -> None:
    """Run a measurement to its end.

    Raises:
        UserError: it failed, or took too long.
    """
    print(f"measuring: {what}", file=sys.stderr, flush=True)
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: not done after {TIMEOUT_S} s") from None
    if answer.returncode:
        said = next((line for line in answer.stderr.splitlines() if line.startswith("error: ")), answer.stderr[-300:])
        raise UserError(f"{what}: {said.removeprefix('error: ')}")


def slowest_rank(case: Case) -> "tuple[int, list[MicroBatch]]":
    """The rank with the longest samples, for which the others wait, and its micro-batches."""
    import torch

    from benchmarks.runners import longest_batch_rank, one_global_batch
    from planner.runs import data_of
    from training.distributed import Ranks

    ranks, data = Ranks(0, case.ranks, torch.device("cpu"), "gloo"), data_of(case.config)
    rank = longest_batch_rank(case.config, data, ranks)
    return rank, one_global_batch(case.config, data, replace(ranks, rank=rank))


def record_operators(case: Case) -> None:
    """The operators of the slowest rank's step, while as many ranks as the case has run it on this machine."""
    script = ROOT / "benchmarks" / "predictions" / "record_ranks.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case.ranks}"]
    about = f"{case.model}, {case.ranks} ranks"
    finished("record", [*command, str(script), str(case.operators.resolve()), about, settings_of(case)])


def settings_of(case: Case) -> str:
    return json.dumps(asdict(case.config))


# Predicting -----------------------------------------------------------------------------------------------------------


def compare(case: Case, choices: Sequence[str]) -> "list[Held]":
    """Step time and peak of every choice, beside what was measured."""
    from benchmarks.predictions.held import Held
    from planner import costs, hardware
    from planner.collective_fits import from_fits
    from planner.contention import load
    from planner.runs import setting
    from planner.simulate import simulate

    table = json.loads(case.steps.read_text())
    missing = [choice for choice in choices if choice not in table]
    if missing:
        raise UserError(f"{case.steps}: holds no {missing[0]}; remove the file to measure it")
    link = case.rate if Rate.parse(case.rate).bits_per_s else "loopback"
    cluster = hardware.cluster(f"{case.ranks}xcpu", link)
    operators = costs.recorded(case.operators, cluster.device)
    collectives, contention = from_fits(case.collectives, cluster), load(case.contention, cluster)
    rank, batches = slowest_rank(case)
    batch_bytes = sum(tensor.untyped_storage().nbytes() for one in batches for tensor in one.values())
    rows, where = [], f"{case.model}, {case.ranks} ranks, {case.rate}"
    for choice in choices:
        asked = setting(replace(case.config, choice=choice), case.ranks, batches)
        found = simulate(asked, cluster, operators, collectives, contention, rank=rank)
        row, peak = table[choice], found.memory.peak_bytes - batch_bytes
        rows += [
            Held(where, choice, "step", "ms", found.step_time_s * 1e3, row["step_ms"]),
            Held(where, choice, "peak", "MiB", peak / MIB, row["peak_bytes"] / MIB),
        ]
    return rows

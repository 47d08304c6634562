"""`ddp-lab parity`: which quantity of a run differs first from one process, from another strategy, or from a "
"recorded run."""

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddp_lab.families import EVERY
from ddp_lab.parity.asked import Asked, asking
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import OneLineParser, at_least, exit_with_error
from ddp_lab.runtime.config import FLAGS, RunConfig
from ddp_lab.runtime.entrypoint import BATCH, ranks_here, require_room
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import gives, parse_config
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.process.torchrun import quiet_torchrun, start_ranks

PROG = "ddp-lab parity"
ORACLE = "simple_ddp"
"""On one rank it sends nothing: plain training."""
SAME = ("model and data", "run")
"""Groups of flags that the oracle takes over, and single flags besides."""
SAME_FLAGS = ("global_batch_size", "precision", "tf32", "loss_scale", "seed", "lr", "clip_grad_norm", "device")
NOT_SAME = ("choice", "output_dir", "no_eval", "no_profile", "max_steps", "lora_rank", "lora_alpha")
STEPS = 3


def build_parser(takes_runs: bool = True) -> argparse.ArgumentParser:
    parser = OneLineParser(
        PROG,
        usage="ddp-lab parity --choice NAME [--against NAME] [--ranks N] [--steps N] [flags of ddp-lab train]\n"
        "       ddp-lab parity RUN_A RUN_B [--yardstick RUN_C]",
        description="Train a few steps in three runs: the choice, one process (or --against), and the second again\n"
        "with other rounding. Name the first quantity that differs beyond rounding, with what usually causes it. Or\n"
        "compare two runs that ddp_lab.parity.watch has recorded (docs/parity.md).",
    )
    if takes_runs:
        parser.add_argument("runs", nargs="*", metavar="RUN", help="recorded runs: the right one, and the other")
    parser.add_argument("--choice", metavar="NAME", help="the strategy that is looked at")
    parser.add_argument("--against", metavar="NAME", help="the strategy that is right (default: one process)")
    parser.add_argument("--ranks", type=at_least(1), metavar="N", help="processes of the strategy (default: 2)")
    parser.add_argument("--steps", type=at_least(1), default=STEPS, metavar="N", help="steps (default: %(default)s)")
    parser.add_argument("--yardstick", metavar="RUN", help="RUN_A again, recorded with another_rounding=True")
    parser.add_argument("--output-dir", default="parity", metavar="DIR", help="for records and page (default: parity)")
    return parser


def main(arguments: Sequence[str]) -> int:
    trains = any(
        argument.partition("=")[0] == "--choice" for argument in arguments
    )  # values of unknown flags are no runs then
    parser = build_parser(takes_runs=not trains)
    options, flags = parser.parse_known_args(arguments)
    try:
        if trains:
            return train_and_compare(options, flags)
        if flags or len(options.runs) != 2:
            parser.error("give --choice NAME, or the folders of two recorded runs")
        folders = [Path(run) for run in options.runs]
        yardstick = Path(options.yardstick) if options.yardstick else None
        return answer_of(folders[0], folders[1], yardstick, Path(options.output_dir), [])
    except UserError as error:
        exit_with_error(f"parity: {error}")


def answer_of(a: Path, b: Path, yardstick: Path | None, output: Path, notes: list[str]) -> int:
    """Print the five lines, and write the page. Answers with 1 if the runs differ."""
    from ddp_lab.parity import comparison, store
    from ddp_lab.parity.answer import Answer, write_page

    runs = [store.read(folder) for folder in (a, b)]
    compared = comparison.compare(runs[0], runs[1], store.read(yardstick) if yardstick else None)
    answer = Answer.of(compared, yardstick is not None, notes)
    write_page(page := output / "parity.html", compared, answer)
    print("\n".join([*answer.lines, f"page: {page}"]))
    return int(answer.differs)


def train_and_compare(options: argparse.Namespace, flags: Sequence[str]) -> int:
    quiet_torchrun()
    flags = ["--max-steps", str(options.steps), "--no-eval", "--no-profile", *flags]
    config = config_of([*flags, "--ddp-choice", options.choice])
    mesh = Mesh.parse(config.mesh) if config.mesh else None
    ranks = options.ranks or ranks_here(config)
    require_room(ranks)
    if mesh:
        mesh.require_ranks(ranks, ranks)
    if not gives(flags, BATCH):
        config = config.but(global_batch_size=config.nearest_batch(config.data_size(ranks)))
    if options.against:
        reference, of_reference = config_of([*flags, "--ddp-choice", options.against]), ranks
        reference = reference.but(global_batch_size=config.global_batch_size)
    else:
        reference, of_reference = oracle(config), 1
    root = Path(options.output_dir) / config.label
    degrees = dict(mesh.degrees) if mesh else {}
    runs = [("b", config, ranks), ("a", reference, of_reference), ("yardstick", reference, of_reference)]
    with long_work(f"parity of {config.label}: three runs of {options.steps} steps", total=len(runs)) as tell:
        for name, of_run, size in runs:
            folder = (root / name).absolute()
            shutil.rmtree(folder, ignore_errors=True)
            with asking(Asked(str(folder), options.steps, name == "yardstick", degrees if name == "b" else {})):
                train(of_run, size, root / "run")
            rounding = " with other rounding, as the yardstick" if name == "yardstick" else ""
            tell(f"{of_run.label} on {size} {'rank' if size == 1 else 'ranks'} is recorded{rounding}")
    named = f"{options.against} on {ranks} ranks" if options.against else "one process"
    notes = [f"{config.label} on {ranks} ranks against {named}, {options.steps} steps, dropout 0"]
    return answer_of(root / "a", root / "b", root / "yardstick", root, notes)


def config_of(flags: Sequence[str]) -> RunConfig:
    return parse_config("", EVERY, arguments=flags, prog=PROG, besides=["--choice", "--against", "--ranks", "--steps"])


def oracle(config: RunConfig) -> RunConfig:
    """The same training in one process: without mesh, accumulation, and what only saves memory or time."""
    shared = {
        field.name
        for field in FLAGS
        if (field.metadata["group"] in SAME or field.name in SAME_FLAGS) and field.name not in NOT_SAME
    }
    settings = {name: value for name, value in config.as_dict().items() if name in shared}
    return RunConfig.of(
        **settings, choice=ORACLE, grad_accum_steps=1, max_steps=config.max_steps, no_eval=True, no_profile=True
    )


def train(config: RunConfig, ranks: int, folder: Path) -> None:
    """Train in `folder`, which stays if the run fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "log"
    with output_into(log):
        is_done = start_ranks(config.but(output_dir=str(folder)), ranks, EVERY)
    if not is_done:
        lines = log.read_text().splitlines()
        why = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "no output")
        raise UserError(f"the run of {config.label} failed: {why.removeprefix('error: ')}; all that it said: {log}")
    shutil.rmtree(folder)


@contextmanager
def output_into(path: Path) -> Iterator[None]:
    """What this process and those that it starts print goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptors = [os.dup(1), os.dup(2)]
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, before in zip((1, 2), descriptors, strict=True):
                os.dup2(before, number)
                os.close(before)

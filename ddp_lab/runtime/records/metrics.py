"""What rank 0 writes of every step while a run trains: JSON lines, and what `--log-to` names.

All sinks get the same figures (`docs/run-record.md`), between two steps, when the step's time is taken already. They
are closed when training ends, well or not.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ddp_lab.runtime.config import RunConfig, choice_folder
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import on_every_rank
from ddp_lab.runtime.loop import TrainingResult

PROJECT = "ddp-lab"
Write = Callable[[dict[str, Any]], None]


@contextmanager
def step_metrics(config: RunConfig, run_id: str, is_main: bool) -> Iterator[Callable[[TrainingResult], None]]:
    """Yields a function to call after each step. It does nothing on ranks other than 0. Entering it is collective."""
    with ExitStack() as stack:
        writes: list[Write] = []

        def open_sinks() -> None:
            names = ["jsonl", *(config.log_to.split(",") if config.log_to else ())] if is_main else []
            writes.extend(stack.enter_context(SINKS[name](config, run_id)) for name in names)

        on_every_rank(open_sinks)
        start = time.perf_counter()

        def after_step(result: TrainingResult) -> None:
            if writes:
                line = latest_step(result, time.perf_counter() - start)
                for write in writes:
                    write(line)

        yield after_step


def latest_step(result: TrainingResult, time_s: float) -> dict[str, Any]:
    """The figures of the latest step. `time_s`: since training began in this process."""
    tokens, step_time_s = result.tokens[-1] or None, result.step_time_s[-1]
    return {
        "step": len(result.loss) - 1,
        "loss": result.loss[-1],
        "lr": result.lr[-1],
        "grad_norm": result.grad_norm[-1],
        "loss_scale": result.loss_scale[-1],
        "skipped": result.skipped[-1],
        "step_time_s": step_time_s,
        "samples": result.samples[-1],
        "tokens": tokens,
        "tokens_per_second": tokens / step_time_s if tokens and step_time_s else None,
        "time_s": time_s,
    }


@contextmanager
def json_lines(config: RunConfig, run_id: str) -> Iterator[Write]:
    """A file to which each step adds a whole line. If that fails once, training goes on without it."""
    path = choice_folder(config) / f"{run_id}.metrics.jsonl"
    problem = ""
    try:
        file = path.open("xb", buffering=0)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error

    def write(figures: dict[str, Any]) -> None:
        nonlocal problem
        if not problem:
            try:
                file.write(json.dumps(figures).encode() + b"\n")
            except OSError as error:
                problem = f"warning: cannot write {path}: {error.strerror}; it ends here"
                print(problem, file=sys.stderr, flush=True)

    with file:
        yield write


@contextmanager
def to_tensorboard(config: RunConfig, run_id: str) -> Iterator[Write]:
    """Scalars, for `tensorboard --logdir profile`."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(choice_folder(config) / f"{run_id}.tensorboard")) as writer:

        def write(figures: dict[str, Any]) -> None:
            for name, value in numbers(figures).items():
                writer.add_scalar(name, value, figures["step"])
            writer.flush()  # or what a killed run has logged last is lost

        yield write


@contextmanager
def to_wandb(config: RunConfig, run_id: str) -> Iterator[Write]:
    """A run of Weights & Biases, by the user's own settings of it; with WANDB_MODE=offline it sends nothing."""
    import wandb

    try:
        run = wandb.init(
            project=PROJECT,
            group=config.label,
            name=f"{config.label} {run_id}",
            config=config.as_dict(),
            dir=choice_folder(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--log-to wandb: {reason}; run wandb login, or set WANDB_MODE=offline") from error
    if not run.offline:
        print(f"{config.label}: {run.url}", flush=True)
    try:
        yield lambda figures: run.log(numbers(figures), step=figures["step"])
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def numbers(figures: dict[str, Any]) -> dict[str, float]:
    """What can be drawn over steps."""
    return {name: value for name, value in figures.items() if name != "step" and value is not None}


SINKS = {"jsonl": json_lines, "tensorboard": to_tensorboard, "wandb": to_wandb}

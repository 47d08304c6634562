"""What rank 0 prints: a progress bar on a terminal and a few plain lines elsewhere, and a last line on the run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp_lab.runtime.link.speed import NONE
from ddp_lab.runtime.loop import TrainingResult

PLAIN_LINES = 6
"""Where the output is no terminal, a run prints about this many lines."""


def describe(result: TrainingResult) -> str:
    """The latest loss and step time, e.g. `loss 1.234  step time 270 ms`, or `loss 1.234  (profiled, not timed)`."""
    step_time = result.step_time_s[-1]
    shown = "(profiled, not timed)" if step_time is None else f"step time {step_time * 1000:.0f} ms"
    loss = result.loss[-1]
    return f"loss {'not finite' if loss is None else f'{loss:.3f}'}  {shown}"


@contextmanager
def training_progress(choice: str, steps: int, is_main: bool) -> Iterator[Callable[[TrainingResult], None]]:
    """Yields a function to call after each step. It does nothing on ranks other than 0."""
    console = Console()
    if not is_main:
        yield lambda result: None
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description:<17}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(choice, total=steps, state="starting")
            yield lambda result: progress.update(task, completed=len(result.loss), state=describe(result))
    else:
        every = max(1, steps // PLAIN_LINES)

        def print_line(result: TrainingResult) -> None:
            done = len(result.loss)
            if done in (1, steps) or done % every == 0:
                print(f"{choice}  step {done}/{steps}  {describe(result)}", flush=True)

        yield print_line


def start_line(start_s: Mapping[str, float]) -> str:
    """Where the time until the first step went, in seconds."""
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in start_s.items())
    return f"start-up took {sum(start_s.values()):.1f} s: {parts}; the first step begins"


def summary_line(label: str, record: dict[str, Any], path: str) -> str:
    """One line on how the run went."""
    evaluation, median = record["eval"], record["step_time_median_s"]
    parts = [f"{label}: done"]
    if record["config"]["link"] != NONE:
        parts[0] += f" over links of {record['config']['link']}"
    if record["config"]["outer_link"] is not None:
        parts[0] += f", and of {record['config']['outer_link']} between {record['config']['nodes']} nodes"
    if record["compile"]:
        parts.append(compiled(record["compile"]))
    parts.append("no timed step" if median is None else f"median step {median * 1000:.0f} ms")
    if median is not None:
        parts.append(f"mean {record['samples_per_second']:.1f} samples/s")
        if record["tokens_per_second"] is not None:
            parts.append(f"mean {record['tokens_per_second']:,.0f} tokens/s")
    if skipped := len(record["skipped_steps"]):
        parts.append(f"{skipped} of {len(record['train_loss'])} steps skipped by the loss scale")
    if evaluation:
        parts.append(f"eval loss {evaluation['loss']:.3f}")
    if evaluation and evaluation["perplexity"] is not None:
        parts.append(f"perplexity {evaluation['perplexity']:.1f} over {evaluation['tokens']:,} tokens")
    if evaluation and evaluation["accuracy"] is not None:
        parts.append(f"accuracy {evaluation['accuracy']:.1%} of {evaluation['samples']} samples")
    return ", ".join(parts) + f"; record: {path}"


def compiled(made: dict[str, Any]) -> str:
    """What was compiled, e.g. `2 graphs compiled in 31 s, 1 of them again, no graph breaks`."""
    graphs, again, breaks = made["graphs"], sum(made["recompilations"].values()), sum(made["graph_breaks"].values())
    said = f"{graphs} graph{'s' * (graphs != 1)} compiled in {made['seconds']:.0f} s, {again} of them again"
    return f"{said}, {breaks or 'no'} graph break{'s' * (breaks != 1)}"

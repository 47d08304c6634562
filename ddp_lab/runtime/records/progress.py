"""What rank 0 prints: a progress bar on a terminal and a few plain lines elsewhere, and a last line on the run. And
what it leaves of a run beside its traces."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ddp_lab.record_format import COMPLETED, Ending
from ddp_lab.runtime.flags import to_toml
from ddp_lab.runtime.link.speed import NONE
from ddp_lab.runtime.loop import TrainingResult
from ddp_lab.runtime.records.run_so_far import RunSoFar
from ddp_lab.runtime.watch.cause import STOPPED
from ddp_lab.writing import write_json, write_text

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
        interval = max(1, steps // PLAIN_LINES)

        def print_line(result: TrainingResult) -> None:
            steps_done = len(result.loss)
            if steps_done in (1, steps) or steps_done % interval == 0:
                print(f"{choice}  step {steps_done}/{steps}  {describe(result)}", flush=True)

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


def compiled(stats: dict[str, Any]) -> str:
    """What was compiled, e.g. `2 graphs compiled in 31 s, 1 of them again, no graph breaks`."""
    graphs, again, breaks = stats["graphs"], sum(stats["recompilations"].values()), sum(stats["graph_breaks"].values())
    line = f"{graphs} graph{'s' * (graphs != 1)} compiled in {stats['seconds']:.0f} s, {again} of them again"
    return f"{line}, {breaks or 'no'} graph break{'s' * (breaks != 1)}"


def leave_config(run: RunSoFar, world_size: int) -> None:
    """Write the file that repeats this run: the settings of its record, and the checkpoint that it resumed from."""
    config, path = run.config, run.file("config.toml")
    if run.resumed_from:
        config = replace(config, resume=run.resumed_from["path"])
    command = f"python -m ddp_lab train --ranks {world_size} --config {path}"
    write_text(path, to_toml(config, f"Repeats run {run.run_id}: {command}"))


def leave_stopped(run: RunSoFar, steps: int, checkpoint: Path) -> None:
    """Write the record of a run that ends because SIGUSR1 asked it to, and say so."""
    steps_done, path = len(run.result.loss), run.file("run.json")
    message = f"stopped by SIGUSR1 after step {steps_done} of {steps}; checkpoint: {checkpoint}"
    write_json(path, run.record(Ending(STOPPED, step=steps_done, message=message)))
    print(f"{run.config.label}: {message}; --resume continues; record: {path}", flush=True)


def leave_record(run: RunSoFar) -> None:
    """Write the record of a run that has completed, and say how it went."""
    record, label, path = run.record(Ending(COMPLETED)), run.config.label, run.file("run.json")
    write_json(path, record)
    for note in record["notes"]:
        print(f"{label}: {note}", flush=True)
    if text := run.generated:
        print(f"{label}: generated after '{text['prompt']}': {text['text']}", flush=True)
    print(summary_line(label, record, str(path)), flush=True)
    for name, line in zip(("what limits a step", "try next"), record["verdict"], strict=True):
        print(f"{label}: {name}: {line}", flush=True)

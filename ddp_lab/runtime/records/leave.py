"""What rank 0 leaves of a run, beside its traces, and says of it."""

from dataclasses import replace
from pathlib import Path

from ddp_lab.runtime.config import choice_folder
from ddp_lab.runtime.records.progress import summary_line
from ddp_lab.runtime.records.record import write_json, write_text
from ddp_lab.runtime.records.run_so_far import RunSoFar
from ddp_lab.runtime.settings.file import to_toml
from ddp_lab.runtime.watch.cause import COMPLETED, STOPPED, Ending


def leave_config(run: RunSoFar, world_size: int) -> None:
    """Write the file that repeats this run: the settings of its record, and the very checkpoint that it resumed from.

    Raises:
        UserError: it cannot be written.
    """
    config, path = run.config, choice_folder(run.config) / f"{run.run_id}.config.toml"
    if run.resumed_from:
        config = replace(config, resume=run.resumed_from["path"])
    command = f"python -m ddp_lab train --ranks {world_size} --config {path}"
    write_text(path, to_toml(config, f"Repeats run {run.run_id}: {command}"))


def leave_stopped(run: RunSoFar, steps: int, checkpoint: Path) -> None:
    """Write the record of a run that ends because SIGUSR1 asked it to, and say so.

    Raises:
        UserError: it cannot be written.
    """
    done, path = len(run.result.loss), choice_folder(run.config) / f"{run.run_id}.run.json"
    message = f"stopped by SIGUSR1 after step {done} of {steps}; checkpoint: {checkpoint}"
    write_json(path, run.record(Ending(STOPPED, step=done, message=message)))
    print(f"{run.config.label}: {message}; --resume continues; record: {path}", flush=True)


def leave_record(run: RunSoFar) -> None:
    """Write the record of a run that has completed, and say how it went.

    Raises:
        UserError: it cannot be written.
    """
    record, label = run.record(Ending(COMPLETED)), run.config.label
    path = choice_folder(run.config) / f"{run.run_id}.run.json"
    write_json(path, record)
    for note in record["notes"]:
        print(f"{label}: {note}", flush=True)
    if text := run.generated:
        print(f"{label}: generated after '{text['prompt']}': {text['text']}", flush=True)
    print(summary_line(label, record, str(path)), flush=True)
    for name, line in zip(("verdict", "try next"), record["verdict"], strict=True):
        print(f"{label}: {name}: {line}", flush=True)

"""Checkpoints of a strategy in a loop that is not the runner's: its parameters, optimizer states and buffers.

They are written in the format of a run's checkpoints, each rank its part, and can be loaded by any choice on any number
of ranks. Random numbers, the scheduler and the place in the data belong to the loop.
"""

import json
import shutil
from pathlib import Path

from training.checkpoint.files import TensorFiles, write_tensors
from training.checkpoint.state import describe_groups, fill, tensors_to_save
from training.distributed import on_every_rank
from training.errors import UserError
from training.strategy import Strategy

GROUPS, STEPS = "parameter_groups", "optimizer_steps"


def save_checkpoint(strategy: Strategy, folder: str | Path) -> None:
    """Save into `folder`, which all ranks see. What was there is replaced when everything is written. Collective.

    Raises:
        OSError: it cannot be written here.
        UserError: it cannot be written on another rank; names the rank.
        UnsupportedError: the optimizer keeps states that belong to no element of a parameter; the choice saves none.
    """
    folder, rank = Path(folder), strategy.data_parallel_rank
    unfinished, before = (folder.with_name(f".{folder.name}.{state}") for state in ("saving", "before"))

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def write() -> None:
        texts = {GROUPS: json.dumps(describe_groups(strategy.optimizer)), STEPS: str(strategy.optimizer_steps)}
        write_tensors(unfinished / f"rank_{rank}.safetensors", tensors_to_save(strategy), texts)

    def finish() -> None:
        if rank != 0:
            return
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        unfinished.rename(folder)
        shutil.rmtree(before, ignore_errors=True)

    for part in (begin, write, finish):
        on_every_rank(part, strategy.process_group)


def load_checkpoint(strategy: Strategy, folder: str | Path) -> None:
    """Load what `save_checkpoint` has saved, whatever choice and number of ranks it was saved with.

    Raises:
        UserError: there is nothing, or it is of another model or optimizer.
    """

    def load() -> None:
        files = TensorFiles(sorted(Path(folder).glob("rank_*.safetensors")))
        _, texts = files.of_file("rank_0.safetensors")
        if GROUPS not in texts:
            raise UserError(f"{folder}: no checkpoint of a strategy")
        fill(strategy, files, json.loads(texts[GROUPS]))
        strategy.optimizer_steps = int(texts.get(STEPS, "0"))  # which seeds stochastic rounding

    on_every_rank(load, strategy.process_group)
    strategy.parameters_are_loaded()

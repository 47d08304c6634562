"""Checkpoints of a strategy in a loop that is not the runner's: its parameters, optimizer states and buffers.

They have the format of a run's, and can be loaded by any choice on any mesh of any number of ranks. Random numbers, the
scheduler and the place in the data belong to the loop.
"""

import shutil
from pathlib import Path

import torch.distributed as dist

from ddp_lab.runtime.checkpoint.files import TensorFiles
from ddp_lab.runtime.checkpoint.manifest import complete_manifest, naming
from ddp_lab.runtime.checkpoint.saver import commit, write_part
from ddp_lab.runtime.checkpoint.state import fill, manifest_of, tensors_to_save
from ddp_lab.runtime.groups import on_every_rank
from ddp_lab.strategy.strategy import Strategy


def save_checkpoint(strategy: Strategy, folder: str | Path) -> None:
    """Save into `folder`, which all ranks see. What was there is replaced when everything is written. Collective.

    Raises:
        OSError: it cannot be written here.
        UserError: it cannot be written on another rank; names the rank.
        UnsupportedError: the optimizer keeps states that belong to no element of a parameter; the choice saves none.
    """
    folder, rank = Path(folder), dist.get_rank(strategy.groups.everyone)
    manifest, unfinished = manifest_of(strategy, strategy.optimizer_steps), folder.with_name(f".{folder.name}.saving")

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def write() -> None:
        write_part(unfinished, rank, tensors_to_save(strategy), {})

    def finish() -> None:
        if rank == 0:
            commit(unfinished, folder, manifest, lambda: True)

    for part in (begin, write, finish):
        on_every_rank(part, strategy.groups.everyone)


def load_checkpoint(strategy: Strategy, folder: str | Path) -> None:
    """Load what `save_checkpoint` or a run has saved, whatever choice and mesh it was saved with. Collective.

    Raises:
        UserError: there is nothing, or it is of another model or optimizer, or damaged.
    """
    folder = Path(folder)
    manifest = complete_manifest(folder, strategy.groups.everyone)
    with naming(folder):
        files = [folder / name for name in manifest.files]
        on_every_rank(lambda: fill(strategy, TensorFiles(files), manifest), strategy.groups.everyone)
    strategy.optimizer_steps = manifest.step
    strategy.parameters_are_loaded()

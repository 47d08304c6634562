"""Checkpoints of a strategy in a loop that is not the runner's: its parameters, optimizer states and buffers.

They are written in the format of a run's checkpoints, each rank its part, and can be loaded by any choice on any mesh
of any number of ranks. Random numbers, the scheduler and the place in the data belong to the loop.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from ddp_lab.runtime.checkpoint.files import TensorFiles, write_tensors
from ddp_lab.runtime.checkpoint.manifest import file_name
from ddp_lab.runtime.checkpoint.parts import OwnParts
from ddp_lab.runtime.checkpoint.state import describe_groups, fill, tensors_to_save
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import on_every_rank
from ddp_lab.strategy.model_parallel import Cut
from ddp_lab.strategy.strategy import Strategy

GROUPS, STEPS, CUTS = "parameter_groups", "optimizer_steps", "cuts"
KINDS: dict[str, Any] = {GROUPS: list[dict[str, float | list[float]]], CUTS: dict[str, Cut], STEPS: int}
"""The metadata of rank 0's file, and their types."""


def save_checkpoint(strategy: Strategy, folder: str | Path) -> None:
    """Save into `folder`, which all ranks see. What was there is replaced when everything is written. Collective.

    Raises:
        OSError: it cannot be written here.
        UserError: it cannot be written on another rank; names the rank.
        UnsupportedError: the optimizer keeps states that belong to no element of a parameter; the choice saves none.
    """
    folder, rank = Path(folder), dist.get_rank(strategy.everyone)
    parts = OwnParts(strategy)
    cuts = parts.of_all_stages(parts.cuts)
    unfinished, before = (folder.with_name(f".{folder.name}.{state}") for state in ("saving", "before"))

    def begin() -> None:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)

    def write() -> None:
        texts = {GROUPS: json.dumps(describe_groups(strategy.optimizer)), STEPS: str(strategy.optimizer_steps)}
        texts[CUTS] = msgspec.json.encode(cuts).decode()
        write_tensors(unfinished / file_name(rank), tensors_to_save(strategy), texts)

    def finish() -> None:
        if rank != 0:
            return
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        unfinished.rename(folder)
        shutil.rmtree(before, ignore_errors=True)

    for part in (begin, write, finish):
        on_every_rank(part, strategy.everyone)


def load_checkpoint(strategy: Strategy, folder: str | Path) -> None:
    """Load what `save_checkpoint` has saved, whatever choice and mesh it was saved with. Collective.

    Raises:
        UserError: there is nothing, or it is of another model or optimizer, or damaged.
    """

    def load() -> None:
        files = TensorFiles(sorted(Path(folder).glob("rank_*.safetensors")))
        _, texts = files.of_file(file_name(0))
        if GROUPS not in texts:
            raise UserError(f"{folder}: no checkpoint of a strategy")
        groups, cuts, steps = (decoded(texts, field, folder) for field in KINDS)
        fill(strategy, files, groups, cuts)
        strategy.optimizer_steps = steps

    on_every_rank(load, strategy.everyone)
    strategy.parameters_are_loaded()


def decoded(texts: Mapping[str, str], field: str, folder: str | Path) -> Any:
    """A field of a file's metadata.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        return msgspec.json.decode(texts.get(field, ""), type=KINDS[field])
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise UserError(f"{folder} is damaged: {file_name(0)}: {field}: {error}") from error

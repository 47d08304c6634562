"""Run records, checked when they are read."""

import functools
import operator
from math import prod
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from ddp_lab.collectives.ranks import Ranks
from ddp_lab.record_format import READABLE, Ending, RunRecord
from ddp_lab.record_rows import Count, Line, Rate
from ddp_lab.runtime.config import FLAGS
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import fitted, json_bytes

SHARE = 1 / 16
"""Largest size of a record, as a share of the limit for a trace."""
Sizes = Annotated[str, Meta(pattern=r"\A[a-z]+=[1-9]\d{0,5}(,[a-z]+=[1-9]\d{0,5})*\Z")]


def of_flag(field: Any) -> tuple[str, Any, Any]:
    """Name, type and default of a flag in a record's config. The record of a run older than the flag lacks it."""
    texts = {"mesh": Sizes, "prompt": str}
    kinds = {str: texts.get(field.name, Line), int: Count, float: Rate if field.metadata["at_least"] is None else float}
    types = (kinds.get(kind, kind) for kind in get_args(field.type) or (field.type,))
    return field.name, functools.reduce(operator.or_, types), field.default


def ranks_exist(settings: Any) -> None:
    Ranks.parse(settings.profile_ranks or "0")


Settings: Any = msgspec.defstruct("Settings", map(of_flag, FLAGS), namespace={"__post_init__": ranks_exist})


class ReadRecord(RunRecord, kw_only=True):
    """A run record as it is read, with checks that its fields fit together."""

    config: Settings

    def __post_init__(self) -> None:
        ranks, mesh = [row.rank for row in self.memory], self.config.mesh
        if len(set(ranks)) < len(ranks) or max(ranks, default=0) >= self.world_size:
            raise ValueError(f"memory: rows of ranks {ranks[:9]} in a run of {self.world_size}")
        if mesh and prod(int(part.partition("=")[2]) for part in mesh.split(",")) != self.world_size:
            raise ValueError(f"config.mesh: {mesh} in a run of {self.world_size} ranks")
        needed = ("memory", "train_loss") if self.config.no_eval else ("eval", "memory", "train_loss")
        empty = [name for name in needed if not getattr(self, name)]
        if empty and not self.ended.problem:
            raise ValueError(f"{empty[0]}: empty, though the run completed")


def read_record(path: Path, failed_too: bool = False) -> dict[str, Any]:
    """The content of a run record. Optional settings and figures that the file lacks have their defaults.

    Args:
        failed_too: Accept the record of a run that did not complete. Its missing figures are empty or None.

    Raises:
        UserError: the file cannot be read or is not a run record, or the run did not complete. Names the field.
    """
    try:
        return checked(msgspec.json.decode(json_bytes(path, SHARE)), path, failed_too)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a run record ({error})") from None


def checked(content: Any, path: object, failed_too: bool = False) -> dict[str, Any]:
    """As `read_record`, from the file's content; raises `UserError`. `path` is for messages."""
    if not isinstance(content, dict) or "run_id" not in content or "choice" not in content:
        raise UserError(f"{path}: not a run record (run_id and choice are missing)")
    if content.get("schema_version") not in READABLE:
        version = str(content.get("schema_version"))[:100]
        raise UserError(f"{path}: a run record of version {version!r}, but this program reads {READABLE}; train again")
    record = fitted(content, ReadRecord, path, "run record")
    if record.ended.problem and not failed_too:
        raise UserError(f"{path}: {record.ended.problem}, so its record is incomplete; train again")
    fields: dict[str, Any] = msgspec.to_builtins(record)
    return fields | {"config": content["config"] | fields["config"]}


def failure_of(record: dict[str, Any]) -> str:
    """How a run ended if it did not complete, in words; else empty."""
    return Ending(**record["ended"]).problem


def leaves_traces(record: dict[str, Any]) -> bool:
    """Whether the run was to leave traces: not with --no-profile."""
    return not record["config"]["no_profile"]


def profiled_ranks(record: dict[str, Any]) -> list[int]:
    """The ranks of which the run was to leave traces: all of them, or those of --profile-ranks."""
    chosen = record["config"]["profile_ranks"]
    return sorted(set(Ranks.parse(chosen))) if chosen else list(range(record["world_size"]))

"""Run records, checked when they are read."""

from pathlib import Path
from typing import Any

import msgspec

from ddp_lab.analysis.layout import RUN_RECORD, Ended
from ddp_lab.collectives.ranks import Ranks
from ddp_lab.record_format import RECORD_VERSION
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import fitted, json_bytes

SHARE = 1 / 16
"""Of the limit for a trace: how large a record may be."""


def read_record(path: Path, failed_too: bool = False) -> dict[str, Any]:
    """The content of a run record. A setting or figure that may be missing is there.

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
    if content.get("schema_version") != RECORD_VERSION:
        version = str(content.get("schema_version"))[:100]
        raise UserError(
            f"{path}: a run record of version {version!r}, but this program reads version {RECORD_VERSION}; train again"
        )
    record = fitted(content, RUN_RECORD, path, "run record")
    if record.ended.problem and not failed_too:
        raise UserError(f"{path}: {record.ended.problem}, so its record is not whole; train again")
    found: dict[str, Any] = msgspec.to_builtins(record)
    return found | content | {"config": found["config"] | content["config"]}


def failure_of(record: dict[str, Any]) -> str:
    """How a run ended if it did not complete, in words; else empty."""
    return msgspec.convert(record["ended"], Ended).problem


def leaves_traces(record: dict[str, Any]) -> bool:
    """Whether the run was to leave traces: not with --no-profile."""
    return not record["config"]["no_profile"]


def profiled_ranks(record: dict[str, Any]) -> list[int]:
    """The ranks of which the run was to leave traces: all of them, or those of --profile-ranks."""
    chosen = record["config"]["profile_ranks"]
    return sorted(set(Ranks.parse(chosen))) if chosen else list(range(record["world_size"]))

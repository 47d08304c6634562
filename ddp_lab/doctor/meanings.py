"""What single warnings mean that are no fault, or not always one: `meanings.toml`."""

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec


class Meaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a warning or an exit code means. `pattern`: a regular expression that its text has."""

    pattern: str
    says: str
    source: str


@cache
def all_meanings() -> list[Meaning]:
    content = Path(__file__).with_name("meanings.toml").read_bytes()
    return msgspec.toml.decode(content, type=dict[Literal["meaning"], list[Meaning]])["meaning"]

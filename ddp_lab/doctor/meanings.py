"""What single warnings mean that are no fault, or not always one: `meanings.toml`."""

import tomllib
from functools import cache
from pathlib import Path

import msgspec


class Meaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a warning or an exit code means. `pattern`: a regular expression that its text has."""

    pattern: str
    says: str
    source: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    meaning: list[Meaning]


@cache
def all_meanings() -> list[Meaning]:
    path = Path(__file__).with_name("meanings.toml")
    return msgspec.convert(tomllib.loads(path.read_text()), _File).meaning

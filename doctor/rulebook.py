"""The rules, as data: `rules/*.toml`, in the order in which they win the first verdict.

A rule fires if one of its `patterns` is found in a line, or if its `predicate` (a function of `predicates`, by name)
says so. Its kind says what it tells, and decides what comes first: a `cause`, a `place` (who is behind, not why), a
`suspicion` (explains a hang or slowness, if there is one) or a `symptom` (that something failed, not why).
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).parent / "rules"
KINDS = ["cause", "place", "suspicion", "symptom"]


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An environment variable to set: exactly what, what it does, and what it costs."""

    name: str
    value: str
    does: str
    costs: str


class Advice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to try, in order."""

    steps: list[str]
    variables: list[Variable] = []


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    verdict: str
    kind: Literal["cause", "place", "suspicion", "symptom"]
    confidence: Literal["certain", "likely", "possible"]
    why: str
    advice: Advice
    confirm: list[str]
    sources: list[str]
    patterns: list[str] = []
    predicate: str | None = None
    in_vm: Advice | None = None

    @property
    def compiled(self) -> list[re.Pattern[str]]:
        return [re.compile(pattern, re.MULTILINE) for pattern in self.patterns]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rule: list[Rule]


@cache
def all_rules() -> list[Rule]:
    """Every rule, in the order of file names and of rules in a file."""
    rules = []
    for path in sorted(FOLDER.glob("*.toml")):
        rules += msgspec.convert(tomllib.loads(path.read_text()), _File).rule
    return rules

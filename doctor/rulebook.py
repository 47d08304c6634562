"""The rules, as data: `rules/*.toml`, in the order in which they win the verdict.

A rule applies if one of its `patterns` is found in a line, or if its `predicate` (a function of `predicates`, by name)
says so. Its kind decides what comes first: a `cause`, a `place` (which rank is behind, not why), a `suspicion` (it
explains a hang or slowness, if there is one) or a `symptom` (something failed, not why).
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

FOLDER = Path(__file__).parent / "rules"
KINDS = {
    "cause": "names a cause",
    "place": "says where to look",
    "suspicion": "explains a hang or slowness, if there is one",
    "symptom": "says that something failed, not why",
}
"""Kinds of rules, the first of which come first, and what they tell."""


class Variable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An environment variable to set: its exact value, what it does, and what it costs."""

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


def rules_as_markdown() -> str:
    """A section for each rule; within a kind, the first rule that applies is the verdict."""
    return "\n\n".join(map(_section, all_rules()))


def _section(rule: Rule) -> str:
    parts = [f"### {rule.name}", f"**{rule.verdict}** ({KINDS[rule.kind]}; {rule.confidence})", rule.why]
    parts.append(_advice("Try", rule.advice))
    if rule.in_vm:
        parts.append(_advice("In a virtual machine", rule.in_vm))
    parts.append("\n".join(["To confirm:", "", *(f"- {step}" for step in rule.confirm)]))
    parts.append("Source: " + ", ".join(f"<{source}>" for source in rule.sources))
    return "\n\n".join(parts)


def _advice(heading: str, advice: Advice) -> str:
    lines = [f"{heading}:", "", *(f"- {step}" for step in advice.steps)]
    if advice.variables:
        lines += ["", "| variable | value | does | costs |", "|---|---|---|---|"]
        lines += [f"| `{v.name}` | {v.value} | {v.does} | {v.costs} |" for v in advice.variables]
    return "\n".join(lines)

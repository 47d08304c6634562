"""The rules, as data: `rules/*.toml`. Of rules of one kind, the surest wins the verdict, and of these the first.

A rule applies if one of its `patterns` is found in a line, if each of its `all_of` is found in some line, or if its
`predicate` (a function of `predicates`, by name) says so; not if one of `unless` is found in any line. Its kind decides
what comes first: a `cause`, a `place` (which rank is behind, not why), a `suspicion` (it explains a hang, if there is
one) or a `symptom` (something failed).
"""

import re
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

CONFIDENCES = ("certain", "likely", "possible")
"""Of a verdict, the surest first."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule.

    Attributes:
        confidence: Of the verdict. A symptom has none.
        to_try: Shell commands, the best first, each with `  # what it shows or does, and what it costs`.
        in_vm: The same for a virtual machine, where that differs.
        own: The same for a run of this project, with its flags.
        more: Sentences behind `--all`.
        beside_failure: The rule applies only if something failed or hung.
        explains: Lines of the same failure: they do not make the rule apply, and are not complaints if it does.
    """

    name: str
    verdict: str
    kind: Literal["cause", "place", "suspicion", "symptom"]
    why: str
    to_try: list[str] = msgspec.field(name="try")
    sources: list[str]
    confidence: Literal["certain", "likely", "possible", None] = None
    in_vm: list[str] = []
    own: list[str] = []
    more: list[str] = []
    patterns: list[str] = []
    all_of: list[str] = []
    predicate: str | None = None
    unless: list[str] = []
    explains: list[str] = []
    beside_failure: bool = False

    @property
    def how_sure(self) -> str:
        """`certain`, `possible, to be confirmed`, or `a symptom, not a cause`."""
        if self.confidence is None:
            return "a symptom, not a cause"
        return f"{self.confidence}, to be confirmed" if self.confidence == "possible" else self.confidence


@cache
def compiled(patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
    return [re.compile(pattern, re.MULTILINE) for pattern in patterns]


@cache
def all_rules() -> list[Rule]:
    """Every rule, in the order of file names and of rules in a file."""
    kind = dict[Literal["rule"], list[Rule]]
    files = [msgspec.toml.decode(path.read_bytes(), type=kind) for path in sorted(FOLDER.glob("*.toml"))]
    return [rule for file in files for rule in file["rule"]]


def rules_as_markdown() -> str:
    """A section for each rule."""
    return "\n\n".join(map(_section, all_rules()))


def _section(rule: Rule) -> str:
    parts = [f"### {rule.name}", f"**{rule.verdict}** ({KINDS[rule.kind]}; {rule.how_sure})", rule.why]
    newline = "\n"
    for heading, commands in (
        ("Try", rule.to_try),
        ("In a virtual machine", rule.in_vm),
        ("In a run of this project", rule.own),
    ):
        parts += [f"{heading}:\n\n```bash\n{newline.join(commands)}\n```"] if commands else []
    parts += ["\n".join(f"- {sentence}" for sentence in rule.more)] if rule.more else []
    parts.append("Source: " + ", ".join(f"<{source}>" for source in rule.sources))
    return "\n\n".join(parts)

"""The guide of variables and the doctor's rules name each other rightly."""

import re
from pathlib import Path

from ddp_lab.doctor.rulebook import all_rules

DOCS = Path(__file__).parents[2] / "docs"
RULES = {rule.name: rule for rule in all_rules()}


def rows(page):
    """Variables and rules of each row of the tables of a page whose last column is "checked by"."""
    pairs = []
    for table in re.findall(
        r"^\|[^\n]*\| checked by \|\n\|[-|]+\|\n((?:\|.*\|\n)+)", (DOCS / page).read_text(), re.MULTILINE
    ):
        for row in table.splitlines():
            cells = row.strip("|").split(" | ")
            pairs.append((re.findall(r"`([A-Z][A-Z0-9_]+)", cells[0]), re.findall(r"`([a-z0-9-]+)`", cells[-1])))
    return pairs


def test_rules_that_are_named_exist():
    guide, recipes = rows("nccl-environment.md"), rows("gpu.md")
    assert len(guide) > 25 and len(recipes) > 15
    explained = {variable for variables, _ in guide for variable in variables}
    for variables, rules in guide + recipes:
        assert not set(rules) - set(RULES), f"{variables}: no such rule"
        assert not {v for v in variables if v.startswith(("NCCL_", "FI_"))} - explained


def test_every_variable_that_a_rule_advises_is_in_the_guide_with_that_rule():
    """What the doctor tells people to set must be explained, and lead back to the rule."""
    guide = {variable: rules for variables, rules in rows("nccl-environment.md") for variable in variables}
    for rule in RULES.values():
        for command in [*rule.to_try, *rule.in_vm]:
            for variable in re.findall(r"\b((?:NCCL|GLOO|FI|TORCH_FR|TORCH_NCCL)_[A-Z0-9_]+)=", command):
                assert rule.name in guide[variable], f"{variable} in nccl-environment.md lacks {rule.name}"

"""The guide of variables and the doctor's rules name each other rightly."""

import re
from pathlib import Path

from doctor.rulebook import all_rules

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| (`[A-Z][A-Z0-9_=]+`.*?) \| .* \| ([^|]*) \|$", re.MULTILINE)
RULES = {rule.name: rule for rule in all_rules()}


def rows(page: str) -> list[tuple[list[str], list[str]]]:
    """Variables and rules of each row of a page's tables."""
    found = ROW.findall((DOCS / page).read_text())
    return [(re.findall(r"`([A-Z0-9_]+)", names), re.findall(r"`([a-z0-9-]+)`", rules)) for names, rules in found]


def test_rules_that_are_named_exist() -> None:
    guide = rows("nccl-environment.md")
    assert len(guide) > 25
    for variables, rules in guide + rows("gpu.md"):
        assert not set(rules) - set(RULES), f"{variables}: no such rule"


def test_every_variable_that_a_rule_advises_is_in_the_guide_with_that_rule() -> None:
    """What the doctor tells people to set must be explained, and lead back to the rule."""
    guide = {variable: rules for variables, rules in rows("nccl-environment.md") for variable in variables}
    for rule in RULES.values():
        for variable in rule.advice.variables:
            if variable.name.startswith(("NCCL_", "GLOO_", "FI_", "TORCH_FR_", "TORCH_NCCL_")):
                assert rule.name in guide[variable.name], f"{variable.name} in nccl-environment.md lacks {rule.name}"

"""Rules held against facts: what was found, the verdict first."""

from dataclasses import dataclass

from doctor.facts import Facts
from doctor.predicates import PREDICATES
from doctor.rulebook import KINDS, Advice, Rule, all_rules
from doctor.texts import Line, first_lines


@dataclass(frozen=True)
class Finding:
    """A rule that fired, with the lines that made it fire and what they say in this case."""

    rule: Rule
    lines: list[Line]
    details: list[str]
    advice: list[tuple[str, Advice]]


def diagnose(facts: Facts) -> list[Finding]:
    """Everything that rules find, the verdict first; empty if nothing is known to be wrong."""
    found = [finding for rule in all_rules() if (finding := _apply(rule, facts))]
    return sorted(found, key=lambda finding: KINDS.index(finding.rule.kind))  # stable: the rules' own order within


def _apply(rule: Rule, facts: Facts) -> Finding | None:
    lines, details = [line for pattern in rule.compiled for line in facts.search(pattern)], []
    if rule.predicate:
        match = PREDICATES[rule.predicate](facts)
        if match:
            lines += match.lines
            details += match.details
    if not lines and not details:
        return None
    return Finding(rule, first_lines(lines), details, _advice(rule, facts.is_virtual))


def _advice(rule: Rule, is_virtual: bool | None) -> list[tuple[str, Advice]]:
    """The advice with a heading each; both kinds where nobody knows whether this is a virtual machine."""
    if rule.in_vm is None:
        return [("Try", rule.advice)]
    if is_virtual is None:
        return [("Try, on bare metal", rule.advice), ("Try, in a virtual machine", rule.in_vm)]
    return [("Try, in a virtual machine", rule.in_vm)] if is_virtual else [("Try", rule.advice)]

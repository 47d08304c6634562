"""Rules applied to facts: what was found, the verdict first."""

from dataclasses import dataclass

from doctor.facts import Facts, Match
from doctor.predicates import PREDICATES
from doctor.reading.texts import Line
from doctor.rulebook import KINDS, Advice, Rule, all_rules


@dataclass(frozen=True)
class Finding:
    """A rule that applies: the lines that show it, what they mean in this case, and the advice with a heading each."""

    rule: Rule
    lines: list[Line]
    details: list[str]
    advice: list[tuple[str, Advice]]


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, the verdict first; empty if no rule applies."""
    found = [finding for rule in all_rules() if (finding := _apply(rule, facts))]
    order = list(KINDS)
    return sorted(found, key=lambda finding: order.index(finding.rule.kind))  # stable: the rules' own order within


def _apply(rule: Rule, facts: Facts) -> Finding | None:
    lines = [line for pattern in rule.compiled for line in facts.search(pattern)]
    match = (PREDICATES[rule.predicate](facts) if rule.predicate else None) or Match([])
    lines = list(dict.fromkeys(lines + match.lines))
    if not lines and not match.details:
        return None
    return Finding(rule, lines, match.details, _advice(rule, facts.is_virtual))


def _advice(rule: Rule, is_virtual: bool | None) -> list[tuple[str, Advice]]:
    """The advice for this machine; both kinds if it is unknown whether it is virtual."""
    if rule.in_vm is None:
        return [("Try", rule.advice)]
    if is_virtual is None:
        return [("Try, on bare metal", rule.advice), ("Try, in a virtual machine", rule.in_vm)]
    return [("Try, in a virtual machine", rule.in_vm)] if is_virtual else [("Try", rule.advice)]

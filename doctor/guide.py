"""The rules as the guide for hangs has them (docs/hangs.md)."""

from doctor.rulebook import Advice, Rule, all_rules

TELLS = {
    "cause": "names a cause",
    "place": "says where to look",
    "suspicion": "explains a hang or slowness, if there is one",
    "symptom": "says that something failed, not why",
}


def rules_as_markdown() -> str:
    """A section a rule, in the order in which they win the verdict within their kind."""
    return "\n\n".join(_section(rule) for rule in all_rules())


def _section(rule: Rule) -> str:
    parts = [f"### {rule.name}", f"**{rule.verdict}** ({TELLS[rule.kind]}; {rule.confidence})", rule.why]
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

"""Rules applied to facts: what was found, the verdict first."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_lab.doctor.facts import Facts, Match
from ddp_lab.doctor.predicates import PREDICATES
from ddp_lab.doctor.reading.texts import Line
from ddp_lab.doctor.rulebook import CONFIDENCES, KINDS, Rule, all_rules, compiled


@dataclass(frozen=True)
class Finding:
    """A rule that applies: the lines that show it, what they mean in this case, and further lines that it explains."""

    rule: Rule
    lines: list[Line]
    details: list[str]
    explained: list[Line]


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, the verdict first; empty if no rule applies."""
    findings = [finding for rule in all_rules() if (finding := _apply(rule, facts))]
    kinds, sure = list(KINDS), [*CONFIDENCES, None]
    findings.sort(
        key=lambda finding: (kinds.index(finding.rule.kind), sure.index(finding.rule.confidence))
    )  # stable: then by file
    for raised in (finding for finding in findings if finding.rule.predicate == "program_exception"):
        named = next(
            (finding for finding in findings if finding is not raised and {*raised.lines} <= {*finding.lines}), raised
        )
        named.details[:] = named.details or raised.details  # which rank raised what a rule names, and where
    return [finding for index, finding in enumerate(findings) if not _says_less(finding, findings[:index])]


def _apply(rule: Rule, facts: Facts) -> Finding | None:
    match = (PREDICATES[rule.predicate](facts) if rule.predicate else None) or Match([])
    every = [_search(facts, [pattern]) for pattern in rule.all_of]
    together = [line for lines in every for line in lines] if all(every) else []
    lines = list(dict.fromkeys(_search(facts, rule.patterns) + together + match.lines))
    if not (lines or match.details) or _search(facts, rule.unless):
        return None
    if rule.beside_failure and not (facts.failures or facts.hangs or facts.complaints):
        return None
    if rule.kind != "suspicion" and not match.lines and not match.details and not facts.ended_with(lines):
        return None  # a program goes on after it: it was caught, or it is said of something else
    return Finding(rule, lines, match.details, _search(facts, rule.explains))


def _says_less(finding: Finding, before: Sequence[Finding]) -> bool:
    """Whether a place or a symptom has only lines that an earlier finding quotes."""
    quoted = {line for earlier in before for line in earlier.lines + earlier.explained}
    return finding.rule.kind in ("place", "symptom") and bool(finding.lines) and quoted.issuperset(finding.lines)


def _search(facts: Facts, patterns: Sequence[str]) -> list[Line]:
    return [line for pattern in compiled(tuple(patterns)) for line in facts.search(pattern)]


_FOR_HIP = {
    r"nvidia-smi --query-compute-apps=pid --format=csv,noheader": "rocm-smi --showpids | grep -oE '^[0-9]+'",
    r"nvidia-smi --query-compute-apps\S* \S+": "rocm-smi --showpids",
    r"nvidia-smi topo -\w+(?: \w\b)?": "rocm-smi --showtopo",
    r"nvidia-smi -L(?: \| wc -l)?": "rocm-smi -i",
    r"nvidia-smi(?: \| head -\d)?(?=  #|;)": "rocm-smi",
    r"whl/cu\d+": "whl/rocm6.4",
    "CUDA_LAUNCH_BLOCKING=1": "AMD_SERIALIZE_KERNEL=3",
    "CUDA_VISIBLE_DEVICES": "HIP_VISIBLE_DEVICES",
    r"torch\.version\.cuda": "torch.version.hip",
}
"""AMD's tools for NVIDIA's; the first entry that fits counts. A command with any other tool of NVIDIA is left out."""
_NVIDIA = re.compile(r"nvidia|dcgmi|compute-sanitizer|TORCH_CUDA_ARCH|GPU-UUID")


def advice(rule: Rule, facts: Facts) -> list[tuple[str, list[str]]]:
    """Commands with a heading, for this machine, its GPUs and this program; both kinds if it is unknown whether it is
    virtual."""
    advices = _advice(rule, facts)
    return [(heading, list(filter(None, map(_for_hip, of)))) for heading, of in advices] if facts.is_hip else advices


def _for_hip(command: str) -> str | None:
    for pattern, with_hip in _FOR_HIP.items():
        command = re.sub(pattern, with_hip, command)
    return None if _NVIDIA.search(command) else command


def _advice(rule: Rule, facts: Facts) -> list[tuple[str, list[str]]]:
    in_project = [("In this project", rule.own)] if rule.own and facts.is_own_run else []
    if not rule.in_vm:
        return [("Try", rule.to_try), *in_project]
    if facts.is_virtual is None:
        return [("Try, on bare metal", rule.to_try), ("Try, in a virtual machine", rule.in_vm), *in_project]
    return [("Try, in a virtual machine", rule.in_vm) if facts.is_virtual else ("Try", rule.to_try), *in_project]

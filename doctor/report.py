"""The doctor's report: the verdict first, then what to do about it, then everything else that was found and read."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text as Styled

from doctor.complaints import Complaint
from doctor.diagnosis import Finding
from doctor.live.results import Live
from doctor.reading.inputs import Inputs, looked_for
from doctor.reading.nccl_log import differences
from doctor.reading.texts import count_of
from doctor.views import print_matrix, process_table, topology_table, write_live

MOST_LINES = 6
"""Quoted lines of evidence; further lines are counted."""
MOST_COMPLAINTS = 8
SCHEMA_VERSION = 2


def write_report(
    console: Console,
    findings: Sequence[Finding],
    complaints: Sequence[Complaint],
    inputs: Inputs,
    live: Live | None = None,
) -> None:
    """`complaints`: those that no finding explains."""
    if findings:
        _write_finding(console, findings[0], is_verdict=True)
    elif complaints:
        _say(console, "Verdict: unknown.", "bold")
        _say(console, "No rule explains what the log says:")
        _write_complaints(console, complaints)
        _say(console, "docs/hangs.md says what else to collect, and how.")
    else:
        seen = ", ".join(looked_for(inputs.facts))
        _say(console, "Verdict: unknown.", "bold")
        _say(console, f"No rule found anything wrong in {seen}.")
        _say(console, "If the job still hangs: docs/hangs.md says what to collect, and how.")
    if len(findings) > 1:
        _say(console, "\nFound as well", "bold")
        for finding in findings[1:]:
            _write_finding(console, finding, is_verdict=False)
    if findings and complaints:
        _say(console, "\nSaid as well, and not explained by a rule", "bold")
        _write_complaints(console, complaints)
    if live:
        write_live(console, live)
    facts = inputs.facts
    if facts.processes:
        _say(console, "\nRanks in NCCL's log", "bold")
        console.print(process_table(facts.processes))
        for sentence in differences(facts.processes):
            _say(console, f"  {sentence}")
    for topology in facts.topologies:
        _say(console, f"\nTopology, {topology.path}", "bold")
        print_matrix(console, topology_table(topology))
        for gpu in topology.gpus if topology.nics else []:
            best = topology.best_nics(gpu)
            others = f" ({', '.join(best[1:])} as near)" if len(best) > 1 else ""
            _say(console, f"  {gpu}: nearest network card {best[0]}{others}" if best else f"  {gpu}: no card near")
        pairs = topology.pairs_across_numa()
        names = ", ".join(f"{a}-{b}" for a, b in pairs[:12])
        more = f" and {len(pairs) - 12} more" if len(pairs) > 12 else ""
        _say(console, f"  pairs across NUMA nodes, over PCIe: {names or 'none'}{more}")
    if inputs.looked_at:
        _say(console, "\nLooked at", "bold")
        for sentence in inputs.looked_at:
            _say(console, f"  {sentence}")


def _write_finding(console: Console, finding: Finding, is_verdict: bool) -> None:
    rule, most = finding.rule, MOST_LINES if is_verdict else 2
    to_confirm = ", to be confirmed" if rule.confidence == "possible" else ""
    _say(console, f"Verdict: {rule.verdict}" if is_verdict else f"\n- {rule.verdict}", "bold")
    for text in (f"{rule.confidence}{to_confirm}; rule {rule.name}", *finding.details):
        _say(console, f"  {text}")
    for line in finding.lines[:most]:
        _say(console, f"  {line.place}: {line.text.strip()}", "cyan")
    if len(finding.lines) > most:
        _say(console, f"  and {count_of(len(finding.lines) - most, 'more such line')}")
    if is_verdict:
        _say(console, f"\nWhy\n  {rule.why}")
    for heading, advice in finding.advice:
        _say(console, f"\n{heading}" if is_verdict else f"  {heading}")
        for step in advice.steps:
            _say(console, f"  {'-' if is_verdict else '  -'} {step}")
        for variable in advice.variables:
            _say(console, f"  {variable.name}: {variable.value}", "green")
            _say(console, f"      does: {variable.does}\n      costs: {variable.costs}")
    if is_verdict:
        _say(console, "\n".join(["\nTo confirm", *(f"  - {step}" for step in rule.confirm)]))
        _say(console, "\n".join(["\nSource", *(f"  {source}" for source in rule.sources)]))
    else:
        _say(console, f"  more: python scripts/doctor.py --rules, under {rule.name}, with source and how to confirm")


def _write_complaints(console: Console, complaints: Sequence[Complaint]) -> None:
    for complaint in complaints[:MOST_COMPLAINTS]:
        _say(console, f"  {complaint.text}", "cyan")
        _say(console, f"    {complaint.kind}; {complaint.summary}")
    if len(complaints) > MOST_COMPLAINTS:
        _say(console, f"  and {count_of(len(complaints) - MOST_COMPLAINTS, 'other complaint')}; --json has them all")


def _say(console: Console, text: str, style: str = "") -> None:
    """Print a text as it is: nothing in a log is markup, and no quoted line is wrapped."""
    console.print(Styled(text, style=style), soft_wrap=True)


def to_json(
    findings: Sequence[Finding], complaints: Sequence[Complaint], inputs: Inputs, live: Live | None = None
) -> str:
    """The report for machines. docs/command-line.md has its fields."""
    facts = inputs.facts
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": findings[0].rule.name if findings else "unknown",
        "findings": [_finding_as_json(finding) for finding in findings],
        "unexplained": [_complaint_as_json(complaint) for complaint in complaints],
        "looked_at": inputs.looked_at,
        "problems": inputs.problems,
        "processes": [
            {
                "rank": process.rank,
                "host": process.host,
                "pid": process.pid,
                "version": process.version,
                "network": process.fabric,
                "cards": process.cards,
                "interface": process.interface,
                "gpu_direct_rdma": process.gdr,
                "transports": {f"{a}-{b}": sorted(names) for (a, b), names in process.transports.items()},
                "warnings": len(process.warnings),
            }
            for process in facts.processes
        ],
        "differences": differences(facts.processes),
        "topologies": [
            {
                "gpus": topology.gpus,
                "nics": topology.nics,
                "links": topology.links,
                "nearest_nics": {gpu: topology.best_nics(gpu) for gpu in topology.gpus},
                "pairs_across_numa": topology.pairs_across_numa(),
            }
            for topology in facts.topologies
        ],
        "live": live,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def _complaint_as_json(complaint: Complaint) -> dict[str, Any]:
    first = complaint.lines[0]
    return {
        "kind": complaint.kind,
        "text": complaint.text,
        "times": len(complaint.lines),
        "ranks": sorted(complaint.ranks),
        "file": first.path,
        "line": first.number,
    }


def _finding_as_json(finding: Finding) -> dict[str, Any]:
    rule = finding.rule
    return {
        "rule": rule.name,
        "verdict": rule.verdict,
        "kind": rule.kind,
        "confidence": rule.confidence,
        "details": finding.details,
        "evidence": [{"file": line.path, "line": line.number, "text": line.text} for line in finding.lines],
        "why": rule.why,
        "try": [{"when": heading, "steps": a.steps, "variables": a.variables} for heading, a in finding.advice],
        "confirm": rule.confirm,
        "sources": rule.sources,
    }

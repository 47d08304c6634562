"""The doctor's report: the verdict first, then what to do about it, then everything else that was found and read."""

from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text as Styled

from ddp_lab.doctor.complaints import Complaint
from ddp_lab.doctor.diagnosis import Finding, advice
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.live.results import Live
from ddp_lab.doctor.reading.complaints import END
from ddp_lab.doctor.reading.inputs import Inputs, looked_for
from ddp_lab.doctor.reading.nccl_log import differences
from ddp_lab.doctor.reading.texts import count_of, printable
from ddp_lab.doctor.rulebook import compiled
from ddp_lab.doctor.views import in_words, print_matrix, process_table, topology_table, write_live

MOST_LINES, MOST_COMPLAINTS, MOST_SENTENCES = 2, 5, 4
"""Shown without `--all`: quoted lines of evidence, complaints that no rule explains, and sentences on what was found or
read."""
WIDEST = 300
"""Characters of a quoted line where the output is no terminal."""
SCHEMA_VERSION = 3


class Report:
    """Writes what was found. Without `everything`: the verdict, two lines of evidence, five commands, and what is left.

    Args:
        complaints: Those that no finding explains.
    """

    def __init__(
        self,
        console: Console,
        findings: Sequence[Finding],
        complaints: Sequence[Complaint],
        inputs: Inputs,
        live: Live | None = None,
        everything: bool = False,
    ) -> None:
        self.console, self.findings, self.complaints = console, findings, complaints
        self.inputs, self.live, self.everything = inputs, live, everything

    def write(self) -> None:
        names_cause = bool(self.findings) and self.findings[0].rule.kind in ("cause", "place")
        may_be_cause = any(complaint.kind != END for complaint in self.complaints)
        comes_first = not self.findings or (may_be_cause and not names_cause)
        if comes_first and self.complaints:
            self._write_complaints("The log says, and no rule explains:")
            self._say("")
        if self.findings:
            self._write_verdict(self.findings[0])
        else:
            self._write_unknown()
        self._write_further(self.findings[1:])
        if not comes_first and self.complaints:
            self._write_complaints("\nThe log says as well, and no rule explains:")
        if self.live:
            write_live(self.console, self.live)
        sentences = differences(self.inputs.facts.processes)
        if sentences:
            self._say("\nRanks differ", "bold")
            self._list(sentences)
        if self.everything or not self.findings:
            self._write_tables()
        if self.inputs.looked_at:
            self._say("\nLooked at", "bold")
            self._list_some(self.inputs.looked_at)
        if not self.everything and (self.findings or len(self.complaints) > MOST_COMPLAINTS):
            self._say("\n--all prints the rest: why, all evidence, sources, and tables of ranks and topology.")

    def _write_unknown(self) -> None:
        self._say("Verdict: unknown.", "bold")
        if self.complaints:
            self._say("docs/hangs.md says what else to collect, and how.")
        else:
            self._say(f"No rule found anything wrong in {', '.join(looked_for(self.inputs.facts))}.")
            self._say("If the job still hangs: docs/hangs.md says what to collect, and how.")

    def _write_verdict(self, finding: Finding) -> None:
        rule, facts = finding.rule, self.inputs.facts
        self._say(f"Verdict: {rule.verdict}", "bold")
        self._say(f"  {rule.how_sure}; rule {rule.name}")
        self._list_some(finding.details)
        self._quote(finding)
        for heading, commands in advice(rule, facts):
            self._say(f"\n{heading}", "bold")
            self._list(commands, "green")
        if self.everything:
            self._say("\nWhy")
            self._say(f"  {rule.why}")
            self._list(rule.more)
            self._say("\nSource")
            self._list(rule.sources)

    def _write_further(self, findings: Sequence[Finding]) -> None:
        if findings:
            self._say("\nFound as well", "bold")
        for finding in findings:
            rule = finding.rule
            self._say(f"- {rule.verdict} ({rule.how_sure}; rule {rule.name})")
            self._list(finding.details[: None if self.everything else 1])
            if self.everything:
                self._quote(finding)
                for heading, commands in advice(rule, self.inputs.facts):
                    self._say(f"  {heading}")
                    self._list(commands, "green")

    def _quote(self, finding: Finding) -> None:
        """Evidence: the part of each line that fits, around what the rule found."""
        lines = finding.lines if self.everything else finding.lines[:MOST_LINES]
        patterns = compiled(tuple(finding.rule.patterns))
        for line in lines:
            match = next((match for pattern in patterns if (match := pattern.search(line.text))), None)
            room = (self.console.width if self.console.is_terminal else WIDEST) - len(line.place) - len("  : ")
            self._say(
                f"  {line.place}: {cut(line.full, max(40, room), len(line.before) + match.start() if match else 0)}",
                "cyan",
            )
        if len(finding.lines) > len(lines):
            self._say(f"  and {count_of(len(finding.lines) - len(lines), 'more such line')}")

    def _write_complaints(self, heading: str) -> None:
        self._say(heading, "bold")
        shown = self.complaints if self.everything else self.complaints[:MOST_COMPLAINTS]
        for complaint in shown:
            self._say(f"  {cut(complaint.text, WIDEST)}", "cyan")
            self._say(f"    {complaint.kind}; {complaint.summary}")
            if complaint.meaning:
                self._say(f"    {complaint.meaning.says} ({complaint.meaning.source})")
        if len(self.complaints) > len(shown):
            self._say(f"  and {count_of(len(self.complaints) - len(shown), 'other complaint')}")

    def _write_tables(self) -> None:
        facts = self.inputs.facts
        if facts.processes:
            self._say("\nRanks in NCCL's log", "bold")
            self.console.print(process_table(facts.processes))
        for topology in facts.topologies:
            self._say(f"\nTopology, {topology.path}", "bold")
            print_matrix(self.console, topology_table(topology))
            self._list(in_words(topology))

    def _list_some(self, sentences: Sequence[str]) -> None:
        """All of them, or the first and how many more there are."""
        shown = sentences if self.everything else sentences[:MOST_SENTENCES]
        self._list([cut(sentence, WIDEST) for sentence in shown])
        if len(sentences) > len(shown):
            self._say(f"  and {len(sentences) - len(shown):,} more")

    def _list(self, sentences: Sequence[str], style: str = "") -> None:
        for sentence in sentences:
            self._say(f"  {sentence}", style)

    def _say(self, text: str, style: str = "") -> None:
        """Print a text as it is: nothing in a log is markup, and no quoted line is wrapped."""
        start = "\n" * (len(text) - len(text.lstrip("\n")))
        self.console.print(Styled(start + printable(text[len(start) :]), style=style), soft_wrap=True)


def cut(text: str, room: int, place: int = 0) -> str:
    """At most `room` characters of a text, among them the one at `place`, if the text is longer."""
    text, lost = text.strip(), len(text) - len(text.lstrip())
    if len(text) <= room:
        return text
    start = max(0, min(place - lost - room // 3, len(text) - room))
    part = text[start : start + room]
    return ("..." + part[3:] if start else part)[: room - 3] + ("..." if start + room < len(text) else part[-3:])


def to_json(
    findings: Sequence[Finding], complaints: Sequence[Complaint], inputs: Inputs, live: Live | None = None
) -> str:
    """The report for machines. docs/command-line.md has its fields."""
    facts = inputs.facts
    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "verdict": findings[0].rule.name if findings else "unknown",
        "findings": [_finding_as_json(finding, facts) for finding in findings],
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
        "meaning": complaint.meaning,
        "file": first.path,
        "line": first.number,
    }


def _finding_as_json(finding: Finding, facts: Facts) -> dict[str, Any]:
    rule = finding.rule
    return {
        "rule": rule.name,
        "verdict": rule.verdict,
        "kind": rule.kind,
        "confidence": rule.confidence,
        "details": finding.details,
        "evidence": [{"file": line.path, "line": line.number, "text": line.full} for line in finding.lines],
        "why": rule.why,
        "try": [{"when": heading, "commands": commands} for heading, commands in advice(rule, facts)],
        "more": rule.more,
        "sources": rule.sources,
    }

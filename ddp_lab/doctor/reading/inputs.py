"""From paths to facts. The content of a file decides what it is, never its name.

Nothing that is read can run: pickles and archives are refused, JSON is checked against a layout, text is bounded.
"""

import codecs
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading.content import Content, read_content
from ddp_lab.doctor.reading.flight_recorder import is_dump, read_dump
from ddp_lab.doctor.reading.nccl_json import is_answer, read_answer, read_inspector
from ddp_lab.doctor.reading.texts import Text, count_of, encoding_of, printable, to_text
from ddp_lab.doctor.reading.topology import find_topologies
from ddp_lab.record_format import RunEnd
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import fitted

MOST_FILES = 5000
"""Files of a folder that are read."""
SKIPPED = (
    ".pt.trace.json",
    ".trace.json.gz",
    ".safetensors",
    ".pt",
    ".pth",
    ".bin",
    ".npy",
    ".csv",
    ".html",
    ".png",
    ".py",
)
"""Ends of names of the many files in a run's folder that say nothing about a hang."""

_OF_A_RUN = re.compile(r"(.*?)\.(?:rank_\d{1,6}\.flight\.json|run\.json|traceback\.txt)")


class ForeignFile(UserError):
    """A file of another kind. It gets a line if the user named it, but not if it only lies in a folder."""


@dataclass
class Inputs:
    """`looked_at`: a sentence for each file that was used. `problems`: a line for each that was not."""

    facts: Facts = field(default_factory=Facts)
    looked_at: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_inputs(paths: Sequence[str]) -> Inputs:
    """Everything in the named files and folders; `-` is standard input."""
    inputs = Inputs()
    for name in paths:
        try:
            _take_path(inputs, name)
        except OSError as error:
            inputs.problems.append(f"{printable(name)}: {error.strerror}")
    return inputs


def _take_path(inputs: Inputs, name: str) -> None:
    path = Path(name)
    if name == "-" and sys.stdin is None:
        inputs.problems.append("-: standard input is closed")
    elif name == "-":
        take(inputs, "standard input", sys.stdin.buffer)
    elif path.is_dir():
        _take_folder(inputs, path)
    elif not path.exists():
        inputs.problems.append(f"{printable(name)}: no such file or folder")
    elif not path.is_file() and not path.is_fifo():  # a pipe: <(dmesg)
        inputs.problems.append(f"{printable(name)}: neither a file nor a folder")
    else:
        _take_file(inputs, path)


def _take_folder(inputs: Inputs, folder: Path) -> None:
    """Everything useful in a folder. Of run records and this project's flight records, those of the latest run."""
    names = (Path(where) / name for where, _, files_here in os.walk(folder) for name in files_here)
    files = sorted(path for path in names if not path.name.endswith(SKIPPED) and path.is_file())
    if len(files) > MOST_FILES:
        inputs.looked_at.append(f"{folder}: only the first {MOST_FILES:,} of {len(files):,} files")
        files = files[:MOST_FILES]
    of_run = {path: match[1] for path in files if (match := _OF_A_RUN.fullmatch(path.name))}
    latest = max(of_run.values(), default="")
    older = [path for path, run in of_run.items() if run != latest]
    if older:
        inputs.looked_at.append(
            f"{folder}: run {latest}, the latest, and not {len(set(of_run.values())) - 1} older runs"
        )
    before = len(inputs.looked_at)
    for path in files:
        if path not in older:
            _take_file(inputs, path, is_wanted=False)
    if len(inputs.looked_at) == before:
        inputs.problems.append(f"{folder}: has no log, topology, run record or flight-recorder dump")


def _take_file(inputs: Inputs, path: Path, is_wanted: bool = True) -> None:
    try:
        with path.open("rb") as file:
            take(inputs, printable(str(path)), file, is_wanted)
    except OSError as error:
        inputs.problems.append(f"{path}: {error.strerror}")


def take(inputs: Inputs, name: str, file: BinaryIO, is_wanted: bool = True) -> None:
    try:
        content = read_content(name, file)
        sentence = _read(inputs, name, content)
        inputs.looked_at.append(f"{name}: {sentence}{f'; {content.note}' if content.note else ''}")
    except UserError as error:
        if is_wanted or not isinstance(error, ForeignFile):
            inputs.problems.append(str(error))


def _read(inputs: Inputs, name: str, content: Content) -> str:
    """Add what `content` is to the facts, and say what it is."""
    head = content.head.removeprefix(codecs.BOM_UTF8)
    _refuse_binary(name, head if head.strip() else content.tail)
    if head.lstrip()[:1] == b"{" and (sentence := _read_json(inputs, name, head + content.tail)):
        return sentence
    text = to_text(name, head, content.tail, content.left_out)
    inputs.facts.texts.append(text)
    topologies = []
    try:
        topologies = find_topologies(text)
    except UserError as error:
        inputs.problems.append(str(error))
    inputs.facts.topologies += topologies
    kinds = [f"topology of {count_of(len(topology.gpus), 'GPU')}" for topology in topologies]
    count = sum("NCCL " in line.text for line in text.lines)
    kinds += [f"{count_of(count, 'line')} of NCCL"] if count else []
    kinds += [f"{count_of(_count_lines(text), 'line')} of text"]
    return ", ".join(kinds)


def _count_lines(text: Text) -> int:
    return len({line.number for line in text.lines if line.text.strip()})


def _refuse_binary(name: str, content: bytes) -> None:
    if not content.strip():
        raise ForeignFile(f"{name}: empty")
    start = content[:2]
    if start == b"PK":
        raise ForeignFile(f"{name}: a zip archive, or what torch.save has written; unpack logs first")
    if start in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise UserError(
            f"{name}: a pickle, which is not loaded because it can run code; use torchfrtrace for it, or have the "
            "flight recorder dump JSON (torch._C._distributed_c10d._dump_nccl_trace_json)"
        )
    text = content[:4096].replace(b"\0", b"").decode(encoding="utf-8", errors="replace")
    strange = sum(char == "\ufffd" or (char < " " and char not in "\t\n\r\b\f\x1b") for char in text)
    if encoding_of(content) == "utf-8" and strange > len(text) / 10:
        raise ForeignFile(f"{name}: a binary file; this doctor reads text and JSON")


def _read_json(inputs: Inputs, name: str, content: bytes) -> str | None:
    """What a JSON file is; None for text that only begins with a brace."""
    if (timed := read_inspector(name, content)) is not None:
        inputs.facts.timed += timed
        ranks = {collective.rank for collective in timed}
        return f"NCCL's Inspector, {count_of(len(timed), 'collective')} of {count_of(len(ranks), 'rank')}"
    try:
        decoded = json.loads(content)
    except (ValueError, RecursionError):
        if name.endswith(".json"):
            raise UserError(f"{name}: not whole JSON; was the file cut off?") from None
        return None
    if is_dump(decoded):
        dump = read_dump(name, decoded)
        if any(previous.rank == dump.rank for previous in inputs.facts.dumps):
            raise UserError(f"{name}: another dump of rank {dump.rank} was read already; give the dumps of one run")
        inputs.facts.dumps.append(dump)
        more = f" and {dump.point_to_point:,} sends and receives" if dump.point_to_point else ""
        return f"flight recorder of rank {dump.rank}, {count_of(len(dump.calls), 'collective')}{more}"
    if is_answer(decoded):
        answer = read_answer(name, decoded)
        inputs.facts.answers.append(answer)
        return f"answer of NCCL's RAS on {count_of(len(answer.communicators), 'communicator')}"
    if isinstance(decoded, dict) and "run_id" in decoded and "choice" in decoded:
        run = fitted(decoded, RunEnd, name, "run record")
        inputs.facts.runs.append((name, run))
        return f"record of run {printable(run.run_id)}, {printable(run.choice)}"
    raise ForeignFile(f"{name}: JSON, but neither a flight-recorder dump, a run record nor what NCCL writes")


def looked_for(facts: Facts) -> list[str]:
    """What was examined, for the verdict `unknown`."""
    counts = (
        ("NCCL's log of ", len(facts.processes), "rank"),
        ("the topology of ", len(facts.topologies), "machine"),
        ("the flight records of ", len(facts.dumps), "rank"),
        ("", len(facts.runs), "run record"),
        ("", len(facts.answers), "answer of NCCL's RAS"),
        ("the times of ", len(facts.timed), "collective"),
        ("", sum(map(_count_lines, facts.texts)), "line"),
    )
    kinds = [f"{before}{count_of(count, thing)}" for before, count, thing in counts if count]
    return kinds + ["this machine"] * (facts.machine is not None)

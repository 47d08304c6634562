"""Stacks of processes as `py-spy dump` prints them: one process after the other, in one file or one each."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ddp_lab.doctor.reading.texts import Line, Text

_PROCESS = re.compile(r"^Process (\d{1,10}): \S")
_THREAD = re.compile(r"^Thread (?:\d{1,20}|0x[0-9A-Fa-f]{1,16}) \(([a-z+ ]{1,20})\)(?:: \"(\w{1,60}))?")
_FRAME = re.compile(r"^ {4}(\S.{0,200}? \([^()]{1,300}:\d{1,7}\))$")


@dataclass
class Stack:
    """Of a main thread. `frames`: `all_reduce (torch/distributed/distributed_c10d.py:2050)`, the inner first."""

    pid: int
    line: Line
    frames: list[str] = field(default_factory=list)


def stacks_in(text: Text) -> Iterator[Stack]:
    """Those of all processes with a main thread of Python."""
    for start, line in text.find(re.compile(_PROCESS.pattern, re.MULTILINE)):
        match, is_main = _PROCESS.match(line.text), False
        stack = Stack(int(match[1]) if match else 0, line)
        for other in text.lines[start + 1 :]:
            if _PROCESS.match(other.text):
                break
            if thread := _THREAD.match(other.text):
                is_main = thread[2] == "MainThread"
            elif is_main and (frame := _FRAME.match(other.text)):
                stack.frames.append(frame[1])
        if stack.frames:
            yield stack

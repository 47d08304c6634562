"""Stacks of processes, in one file or in one file each. `py-spy dump` prints them, and the server of
`torch.distributed.debug` dumps them for each rank (`stacks`, from Python's faulthandler, and `pyspy_dump`)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ddp_lab.doctor.reading.texts import Line, Text

_PROCESS = re.compile(r"^(?:Process (\d{1,10}): \S|=== Rank (\d{1,6}): \S)", re.MULTILINE)
_THREAD = re.compile(r"^Thread (?:\d{1,20}|0x[0-9A-Fa-f]{1,16}) \(([a-z+ ]{1,20})\)(?:: \"(\w{1,60}))?")
_FRAME = re.compile(r"^ {4}(\S.{0,200}? \([^()]{1,300}:\d{1,7}\))$")
_FAULTHANDLER_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9A-Fa-f]{1,16} .{0,60}\(most recent call first\):")
_FAULTHANDLER_FRAME = re.compile(r'^ {2}File "([^"\n]{1,300})", line (\d{1,7}) in (\S.{0,200})$')


@dataclass
class Stack:
    """Of a main thread.

    Attributes:
        name: `process 4242` or `rank 3`.
        frames: `all_reduce (torch/distributed/distributed_c10d.py:2050)`, the inner first.
    """

    name: str
    line: Line
    frames: list[str] = field(default_factory=list)


def stacks_in(text: Text) -> Iterator[Stack]:
    """The stacks of all processes that have a main thread of Python."""
    for start, line in text.find(_PROCESS):
        if match := _PROCESS.match(line.text):
            name, is_main = f"process {match[1]}" if match[1] else f"rank {match[2]}", False
            stack = Stack(name, line)
            for stack_line in text.lines[start + 1 :]:
                if _PROCESS.match(stack_line.text):
                    break
                if thread := _THREAD.match(stack_line.text):
                    is_main = thread[2] == "MainThread"
                elif _FAULTHANDLER_THREAD.match(stack_line.text):
                    stack.frames.clear()  # the main thread is the last
                elif is_main and (frame := _FRAME.match(stack_line.text)):
                    stack.frames.append(frame[1])
                elif frame := _FAULTHANDLER_FRAME.match(stack_line.text):
                    stack.frames.append(f"{frame[3]} ({frame[1]}:{frame[2]})")
            if stack.frames:
                yield stack

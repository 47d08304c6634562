"""What a log complains of, whatever rules say: NCCL's warnings, last errors, exceptions and exit codes."""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from ddp_lab.doctor.reading.texts import Line, Text

WARNING, LAST_ERROR, EXCEPTION = "NCCL warning", "last error of NCCL", "exception"
TORCH, LAUNCHER, END = "error in torch's log", "error of the launcher", "end of a process"
KINDS = (WARNING, LAST_ERROR, EXCEPTION, TORCH, LAUNCHER, END)
"""In the order in which they are quoted: what is nearest to the reason comes first."""

_PREFIX = r"^(?>\[\w{1,20}\]:? {0,4})*+"
"""Of a line: its rank, or how grave it is."""
_START = re.compile(_PREFIX)
_WORDINGS = {
    WARNING: r"(?::\d{1,10}:\d{1,10} \[\d{1,3}\] .{0,120}?(?:NCCL )?|NCCL |\w\.(?:cc|cu|h):\d{1,5} )WARN (\S.*)",
    LAST_ERROR: r"Last error:(?![ \t]{0,4}[\d.e-]{1,20}\s*$)(.*)",
    EXCEPTION: _PREFIX
    + r"[ \t]{0,4}((?:[A-Za-z_]\w{0,60}\.){0,6}(?:Exception|[A-Z]\w{0,60}(?:Error|Exception|Interrupt))"
    r"(?:\(\w{1,60}\))?(?:: \S.*|:?[ \t]*$))"
    r"|terminate called after throwing an instance of (\S.*)|" + _PREFIX + r"[ \t]{0,4}what\(\): {1,4}(\S.*)"
    r"|((?:[Cc]uda|CUDA|HIP) failure .*'[^'\n]{1,200}'|(?<![\w./-])[\w./-]{1,100}\.py: error: \S.*)",
    TORCH: r"\[E(?:\d{3,4})?(?: [\d:.]{1,20})? ?[\w./-]{1,60}\.(?:cpp|cc|py|hpp|h):\d{1,5}\] ?(\S.*)|\[ERROR\] (\S.*)"
    r"|\[c10d\] .{0,300}? (timed out after \d.*)",
    LAUNCHER: r"^(?:srun|slurmstepd|sbatch|salloc|mpirun|mpiexec|prterun)\b[\w.\[\]-]{0,60}: ((?:error|fatal): \S.*)"
    r"|\bMPICH ERROR\b:? {0,4}(\S.*)|(MPI_ABORT was invoked.*)",
    END: r"(?:exitcode {0,4}:|return code =|errorcode) {0,4}-?[1-9]\d{0,3}"
    r"|[Ee]xit(?:ed with)?(?: exit)? (?:code|status):? -?[1-9]\d{0,3}|Sending process \d{1,10} closing signal \w{1,12}"
    r"|Signal \d{1,2} \(SIG\w{1,8}\)|exited on signal \d{1,2}|[Ss]egmentation fault|Aborted \(core dumped\)"
    r"|^\S{1,60}: line \d{1,6}: {1,3}\d{1,10} (?:Killed|Aborted|Bus error).*",
}
"""The complaint is the first group that matches; without a group, the whole match."""
_PATTERNS = {kind: re.compile(pattern, re.MULTILINE) for kind, pattern in _WORDINGS.items()}
_ECHO = re.compile(r"ChildFailedError")
"""What torchrun says of the exceptions of others."""
_FRAME = re.compile(r'File "(?P<file>[^"\n]{1,300})", line (?P<line>\d{1,7}), in (?P<where>\S{1,100})')
_OF_ANY_NAME = re.compile(r"[A-Za-z_][\w.]{2,120}(?:\(\w{1,60}\))?(?:: \S.*)?$")
"""What follows the last frame of a traceback, not indented: an exception, whatever its name."""
FARTHEST_FRAME = 12
"""Lines between the last frame of a traceback and the exception."""


class Said(NamedTuple):
    """A line that complains, and what it says. `where`: of an exception, the frame that raised it."""

    kind: str
    text: str
    line: Line
    where: str


def read_complaints(text: Text) -> Iterator[Said]:
    for kind, pattern in _PATTERNS.items():
        indices = set()
        for index, line in text.find(pattern):
            if (match := pattern.search(line.text)) is None:
                continue
            indices.add(index)
            message = next((part for part in match.groups() if part is not None), match[0]).strip()
            after = _START.sub("", text.lines[index + 1].text).strip() if index + 1 < len(text.lines) else ""
            if kind == LAST_ERROR and not message:
                message = after
            if "terminate called" in line.text and "what():" in after:
                continue
            if not _ECHO.search(message):
                yield Said(kind, message, line, _raised_at(text, index) if kind == EXCEPTION else "")
        if kind == EXCEPTION:
            yield from _of_any_name(text, indices)


def _of_any_name(text: Text, indices: set[int]) -> Iterator[Said]:
    """Exceptions behind a traceback whose class has no usual name, except those at indices `seen`."""
    frames = [index for index, _ in text.find(_FRAME)]
    for index, following in pairwise([*frames, len(text.lines)]):
        for place in range(index + 1, min(following, index + FARTHEST_FRAME, len(text.lines))):
            message = _START.sub("", text.lines[place].text)
            if place in indices:
                break
            if _OF_ANY_NAME.match(message):
                if not _ECHO.search(message):
                    yield Said(EXCEPTION, message.strip(), text.lines[place], _raised_at(text, place))
                break


def _raised_at(text: Text, index: int) -> str:
    """Where the last frame above an exception is."""
    for line in reversed(text.lines[max(0, index - FARTHEST_FRAME) : index]):
        if match := _FRAME.search(line.text):
            return f"{match['file']}:{match['line']} ({match['where']})"
    return ""

"""Failures of the program, and what tells them from those that it survived or that follow from others."""

import re
from collections.abc import Callable

from doctor.facts import Facts, Match
from doctor.reading.complaints import EXCEPTION
from doctor.reading.texts import Line, Text, ranks_in_words

LAST_LINES = 30
"""An exception in the last lines of a text was not survived, even if nothing else says so."""
_OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP) out of memory\b|(?<!ray\.exceptions\.)\bOutOfMemoryError: (?!Task was killed)"
)
_MEMORY_REFUSED = re.compile(
    r"(?:Cuda|CUDA|HIP) failure (?:2 )?'out of memory'|(?:CUDA|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
)
_SURVIVED = re.compile(
    r"\btry(?:ing)? again\b"
    r"|\bretr(?:y|ies|ying)\b|\bskipp|\bhalv|\breduc\w{0,4} (?:the )?(?:\w+ )?batch|[Ff]all(?:ing|s)? ?back|\bcaught\b"
)
_COMMUNICATION = re.compile(
    r"nccl|rccl|gloo|c10d|c10::|'std::|\bDist\w{0,20}Error|rendezvous|TCPStore|process ?group"
    r"|connection (?:reset|closed|refused)|broken pipe|watchdog|timed? ?out"
    r"|(?:CUDA|HIP) (?:error|failure|driver|runtime|unknown|out of)|CUBLAS_|CUDNN_|OutOfMemory"
    r"|KeyboardInterrupt|SignalException|DataLoader worker|No space left|undefined symbol|\bEOFError\b|RemoteError"
    r"|(?:server|client) socket|monitoredBarrier|DDP expects|gradient reduction",
    re.IGNORECASE,
)
"""Exceptions that come from the communication or the device, or that say that something else ended."""
_RANK = re.compile(r"\[rank(\d{1,6})\]")
_BARRIER = re.compile(
    r"(Timed out|Waiting).{0,40} store based barrier.{0,40} rank:? ?(\d{1,6}), (?:for )?key: ?\S{1,80} "
    r"\(world_size=(\d{1,6}), (?:worker_count|num_workers_joined)=(\d{1,6})"
)


def program_exception(facts: Facts) -> Match | None:
    """An exception of the program that no failure of the communication precedes: the first, and who raised it."""
    consequences = facts.hangs + [said.line for said in facts.complaints if _COMMUNICATION.search(said.text)]
    for text in facts.texts:
        first = min((line.number for line in consequences if line.path == text.path), default=text.lines[-1].number)
        own = [said for said in facts.complaints if said.kind == EXCEPTION and said.line.path == text.path]
        own = [
            said for said in own if not _COMMUNICATION.search(said.text) and not (first and said.line.number > first)
        ]
        own = [said for said in own if facts.failures or _RANK.search(said.line.text) or _is_last(text, said.line)]
        if own:
            said = own[0]
            ranks = {
                int(match[1]) for each in own if each.text == said.text and (match := _RANK.search(each.line.text))
            }
            who = f"{ranks_in_words(ranks).capitalize()} raised" if ranks else "The first is"
            return Match([said.line], [f"{who} {said.text[:200]}{f', in {said.where}' if said.where else ''}."])
    return None


def out_of_memory(facts: Facts) -> Match | None:
    """Torch's allocator says so, and the program did not catch it and try a smaller batch."""
    return _not_survived(facts, _OUT_OF_MEMORY)


def memory_refused(facts: Facts) -> Match | None:
    """The driver says so, to NCCL or in another call than torch's allocator."""
    return _not_survived(facts, _MEMORY_REFUSED)


def _not_survived(facts: Facts, pattern: re.Pattern[str]) -> Match | None:
    found = [(text, index, line) for text in facts.texts for index, line in text.find(pattern)]
    ended = bool(facts.failures) or any("WARN" in line.text or _RANK.search(line.text) for _, _, line in found)
    lines = [line for text, index, line in found if (ended or _is_last(text, line)) and not _survived(text, index)]
    return Match(lines) if lines else None


def _survived(text: Text, index: int) -> bool:
    return any(_SURVIVED.search(line.text) for line in text.lines[max(0, index - 1) : index + 3])


def _is_last(text: Text, line: Line) -> bool:
    return line.number > text.lines[-1].number - LAST_LINES


def store_barrier_too_many(facts: Facts) -> Match | None:
    return _barrier(facts, lambda said, size, came: came > size)


def store_barrier_too_few(facts: Facts) -> Match | None:
    return _barrier(facts, lambda said, size, came: said == "Timed out" and came < size)


def _barrier(facts: Facts, is_wrong: Callable[[str, int, int], bool]) -> Match | None:
    found = {line: match for line in facts.search(_BARRIER) if (match := _BARRIER.search(line.text))}
    wrong = {line: match for line, match in found.items() if is_wrong(match[1], int(match[3]), int(match[4]))}
    if not wrong:
        return None
    match = next(iter(wrong.values()))
    return Match(list(wrong), [f"{match[4]} processes came to the barrier of {match[3]} ranks."])

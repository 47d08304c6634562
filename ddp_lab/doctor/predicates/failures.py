"""Failures of the program. The predicates leave out those that it survived and those that follow from others."""

import re
from bisect import bisect, bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from ddp_lab.collectives.ranks import ranks_in_words
from ddp_lab.doctor.facts import LAST_LINES, Facts, Match
from ddp_lab.doctor.reading.complaints import EXCEPTION, Said
from ddp_lab.doctor.reading.texts import JOB_RANK, Line, Text

SOON = 100
"""A job that does not survive an error fails within this many lines."""
NOTHING_MORE = 3
"""Lines that a program may write after the exception that ended it."""
_OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP) out of memory\b|(?<!ray\.exceptions\.)\bOutOfMemoryError: (?!Task was killed)"
)
_IMPOSSIBLE = re.compile(r"Tried to allocate more\s+than\s+1EB")
_MEMORY_REFUSED = re.compile(
    r"(?:Cuda|CUDA|HIP) failure (?:2 )?'out of memory'|(?:CUDA|HIP) error: out of memory|CUDA_ERROR_OUT_OF_MEMORY"
)
_SURVIVED = re.compile(
    r"\btry(?:ing)? again\b|\bretr(?:y|ies|ying)\b|\bskipp|\bhalv|\breduc\w{0,4} (?:the )?(?:\w+ )?batch"
    r"|[Ff]all(?:ing|s)? ?back|\bcaught\b|\brecover"
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
_CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
_IGNORED = re.compile("Exception ignored in")
_BARRIER = re.compile(
    r"(Timed out|Waiting).{0,40} store based barrier.{0,80}rank:? ?(\d{1,6}), (?:for )?key: ?\S{1,80} "
    r"\(world_size=(\d{1,6}), (?:worker_count|num_workers_joined)=(\d{1,6})"
)


_COMPLETED = re.compile("Completed store-based barrier")
_BUILDS = re.compile(r"Using \S{0,20} {0,2}\S{0,200}torch_extensions\S{0,80} as PyTorch extensions root")
_MEETS_IN_FILE = re.compile(r"\b(?:init_method|dist_url|init-method|dist-url)\b\W{1,6}file:/")
_NO_FILE = re.compile(r"Error: open\(/[^)\n]{1,300}\): (?:No such file or directory|Permission denied|Is a directory)")
_NOT_MET = re.compile(r"connectFullMesh failed|Timeout waiting for key: \S")
_CONNECTED = re.compile(r"\[c10d\b[^\]\n]{0,12}\] The client socket has connected to ")


def program_exception(facts: Facts) -> Match | None:
    """The exception of the program that ended a rank before anything of the communication failed, and who raised it."""
    consequences = _numbers_by_path(
        facts.hangs + [complaint.line for complaint in facts.complaints if _COMMUNICATION.search(complaint.text)]
    )
    ends = _numbers_by_path(line for line in facts.failures if "Traceback" not in line.text)
    exceptions = defaultdict[str, list[Said]](list)
    for complaint in facts.complaints:
        if complaint.kind == EXCEPTION:
            exceptions[complaint.line.path].append(complaint)
    for text in facts.texts:
        raised = exceptions[text.path]
        ignored = _ignored(text, raised)
        raised = [s for s in raised if s.line.number not in ignored and not _COMMUNICATION.search(s.text)]
        failed = min(ends[text.path], default=None)
        end = text.lines[-1].number if text.lines and failed is None else failed or 0
        last = min((number for number in consequences[text.path] if number > end - SOON), default=end)
        last_raised = _that_ended(
            text, [complaint for complaint in raised if complaint.line.number <= last], failed, ignored
        )
        if last_raised:
            lines = [complaint.line.text for complaint in raised if complaint.text == last_raised.text]
            ranks = {int(match[1]) for line in lines if (match := JOB_RANK.search(line))}
            subject = f"{ranks_in_words(ranks).capitalize()} raised" if ranks else "It is"
            where = f", in {last_raised.where}" if last_raised.where else ""
            return Match([last_raised.line], [f"{subject} {last_raised.text[:200].rstrip('.')}{where}."])
    return None


def _numbers_by_path(lines: Iterable[Line]) -> defaultdict[str, list[int]]:
    """The numbers of these lines in each text, in order."""
    numbers = defaultdict[str, list[int]](list)
    for path, number in sorted((line.path, line.number) for line in lines):
        numbers[path].append(number)
    return numbers


def _ignored(text: Text, exceptions: Sequence[Said]) -> set[int]:
    """Numbers of the lines that Python writes of an error while an object is removed: it ends nothing."""
    raised = sorted(exception.line.number for exception in exceptions)
    begins = [line.number for line in text.search(_IGNORED)]
    ends = [raised[at] if (at := bisect(raised, begin)) < len(raised) else begin for begin in begins]
    blocks = (range(b, e + 1) for b, e in zip(begins, ends, strict=True) if e - b < SOON)
    return {number for block in blocks for number in block}


def _that_ended(text: Text, exceptions: Sequence[Said], failed: int | None, ignored: set[int]) -> Said | None:
    """Of exceptions in the order of the text the first that a rank did not survive: by torch's prefix of uncaught ones,
    the line at which the job `failed`, or the end of the text."""
    if uncaught := [exception for exception in exceptions if JOB_RANK.search(exception.line.text)]:
        return uncaught[0]
    if not exceptions:
        return None
    after = sum(line.number > exceptions[-1].line.number and line.number not in ignored for line in text.lines)
    if failed is None and after > NOTHING_MORE:
        return None
    chained = [line.number for line in text.search(_CHAINED)]
    last = len(exceptions) - 1
    while last and bisect(chained, exceptions[last - 1].line.number) < bisect_left(
        chained, exceptions[last].line.number
    ):
        last -= 1  # the first of a chain is the reason of the others
    return exceptions[last]


def out_of_memory(facts: Facts) -> Match | None:
    """Torch's allocator says so, and the program did not catch it and try a smaller batch."""
    return _not_survived(facts, _OUT_OF_MEMORY, unless=_IMPOSSIBLE)


def memory_refused(facts: Facts) -> Match | None:
    """The driver says so, to NCCL or in another call than torch's allocator."""
    return _not_survived(facts, _MEMORY_REFUSED)


def _not_survived(facts: Facts, pattern: re.Pattern[str], unless: re.Pattern[str] | None = None) -> Match | None:
    """Lines after which the text ends or the job fails soon, or that torch or NCCL print last. `unless`: finds
    lines that do not count, even if they are wrapped."""
    lines, failures = [], _numbers_by_path(facts.failures)
    for text in facts.texts:
        failed = failures[text.path]
        for index, line in text.find(pattern):
            if unless and unless.search(" ".join(near.text.strip() for near in text.lines[index : index + 3])):
                continue
            is_last = line.number > text.lines[-1].number - LAST_LINES
            fails_soon = bisect_left(failed, line.number) < bisect(failed, line.number + SOON)
            is_word = bool(JOB_RANK.search(line.text)) or "NCCL WARN" in line.text
            if is_word or ((is_last or fails_soon) and not _survived(text, index)):
                lines.append(line)
    return Match(lines) if lines else None


def _survived(text: Text, index: int) -> bool:
    return any(_SURVIVED.search(line.text) for line in text.lines[max(0, index - 1) : index + 3])


def store_barrier_too_many(facts: Facts) -> Match | None:
    return _barrier(facts, lambda wording, size, came: came > size)


def store_barrier_too_few(facts: Facts) -> Match | None:
    """Ranks gave up, or the log ends while they wait."""
    if match := _barrier(facts, lambda wording, size, came: wording == "Timed out" and came < size):
        return match
    waits = _barrier(facts, lambda wording, size, came: came < size)
    is_over = facts.search(_COMPLETED) or store_barrier_too_many(facts)
    return waits if waits and not is_over and facts.ended_with(waits.lines) else None


def file_store_misleads(facts: Facts) -> Match | None:
    """A rank that meets the others in a file cannot open it; or it finds nobody where the file says, or no key, and no
    rank has failed by itself."""
    if not (named := facts.search(_MEETS_IN_FILE)):
        return None
    failed = facts.search(_NO_FILE) or ([] if program_exception(facts) else facts.search(_NOT_MET))
    return Match(named[:1] + failed) if failed else None


def store_answers_nothing(facts: Facts) -> Match | None:
    """The last line of a text says that its rank has connected to the store (torch's log at level INFO)."""
    return _ends(facts, _CONNECTED)


def extension_build_waits(facts: Facts) -> Match | None:
    return _ends(facts, _BUILDS)


def _ends(facts: Facts, pattern: re.Pattern[str]) -> Match | None:
    last = [next((line for line in reversed(text.lines) if line.text.strip()), None) for text in facts.texts]
    lines = [line for line in last if line and pattern.search(line.text)]
    return Match(lines) if lines else None


def _barrier(facts: Facts, is_wrong: Callable[[str, int, int], bool]) -> Match | None:
    matches: dict[Line, re.Match[str]] = {}
    for line in facts.search(_BARRIER):
        match = _BARRIER.search(line.text)
        if match and is_wrong(match[1], int(match[3]), int(match[4])):
            matches[line] = match
    if not matches:
        return None
    match = max(matches.values(), key=lambda match: int(match[4]))
    return Match(list(matches), [f"{match[4]} processes came to the barrier of {match[3]} ranks."])

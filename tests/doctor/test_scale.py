"""Logs of many ranks: what the doctor does grows as their number does."""

import sys

from ddp_lab.doctor.complaints import unexplained
from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading.texts import to_text
from tests.tables import each_row

INIT = "host:{rank}:7 [0] NCCL INFO comm 0x5 rank {rank} nranks 999 cudaDev 0 - Init START"
FAILED = "exitcode: 1 (pid: {rank})"


def lines_run(part, log, ranks, is_one_file):
    """How many lines of `part` of the doctor run for a log of `ranks` ranks; each iteration of a loop counts."""
    logs = [log.format(rank=1000 + rank) for rank in range(ranks)]
    logs, count = ["\n".join(logs)] if is_one_file else logs, 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace if f"/ddp_lab/doctor/{part}/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        facts = Facts(texts=[to_text(f"{number}.log", text.encode()) for number, text in enumerate(logs)])
        unexplained(facts, diagnose(facts))
    finally:
        sys.settrace(before)
    return count


@each_row(
    ("part", "log", "is_one_file"),
    [
        ("reading", INIT, True),
        ("predicates", INIT + "\nhost:{rank}:7 [0] NCCL INFO cuMem host allocations do not appear to be working", True),
        (
            "reading",
            "[rank{rank}]:[E ProcessGroupNCCL.cpp:1] [Rank {rank}] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600) ran for 600029 milliseconds\n"
            "[rank{rank}]:[E ProcessGroupNCCL.cpp:2] [PG 0 Rank {rank}] Timeout at NCCL work: 7, last enqueued NCCL "
            "work: 9, last completed NCCL work: 6.",
            True,
        ),
        ("predicates", "x torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {rank} MiB\n" + FAILED, True),
        ("predicates", "ValueError: bad\nDuring handling of the above exception, another exception occurred:", True),
        ("predicates", "Traceback (most recent call last):\nRuntimeError: NCCL aborted\n" + FAILED, False),
    ],
)
def test_work_grows_with_the_ranks(part, log, is_one_file):
    lines_run(part, log, 2, is_one_file)  # what is kept of patterns
    few, medium, many = (lines_run(part, log, ranks, is_one_file) for ranks in (25, 50, 100))
    assert (many - medium) / (medium - few) < 2.4, "2 if it grows as the ranks do, 4 if as their square"

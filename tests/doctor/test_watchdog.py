"""What torch's watchdog prints: which rank, which group, which number; and who is behind or did something else."""

from ddp_lab.doctor.diagnosis import diagnose
from tests.doctor.test_look_alikes import facts_of
from tests.tables import each_row

FILE = "ProcessGroupNCCL.cpp:632"


def gave_up(rank, seq, kind, local=None, elements=8):
    """`local`: rank in the group."""
    return (
        f"[rank{rank}]:[E109 22:46:25.9335 {FILE}] [Rank {rank if local is None else local}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={kind}, NumelIn={elements}, NumelOut={elements}, "
        "Timeout(ms)=600000) ran for 600044 milliseconds before timing out."
    )


def status(rank, group, seq, enqueued, local=None):
    return (
        f"[rank{rank}]:[E109 22:46:25.9336 {FILE}] [PG ID 2 PG GUID {group} Rank {rank if local is None else local}]  "
        f"failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, "
        f"last completed work: {seq - 1}"
    )


def was_told(rank, group, enqueued):
    """A rank on which nothing ran out of time."""
    return (
        f"[rank{rank}]:[E109 22:46:25.9337 {FILE}] [PG ID 0 PG GUID {group} Rank {rank}] Received a dump signal due to "
        "a collective timeout from  rank 7 and we will try our best to dump the debug info. Last enqueued NCCL work: "
        f"{enqueued}, last completed NCCL work: {enqueued}.This is most likely caused by incorrect usages"
    )


def verdict(*lines):
    return diagnose(facts_of(*lines))[0]


def test_rank_of_the_job_and_group():
    (timeout,) = facts_of(gave_up(5, 40, "ALLREDUCE", local=1), status(5, "3(mesh_tp)", 40, 41, local=1)).timeouts
    assert (timeout.rank, timeout.in_job, timeout.group, timeout.seq) == (5, True, "3(mesh_tp)", 40)


def test_different_collectives_in_one_group():
    lines = [gave_up(0, 40, "ALLREDUCE"), status(0, "0(default_pg)", 40, 40)]
    finding = verdict(*lines, gave_up(1, 40, "BROADCAST"), status(1, "0(default_pg)", 40, 40))
    assert finding.rule.name == "different-collectives"
    assert finding.details == [
        "Under number 40 of group 0(default_pg): rank 0 ALLREDUCE of 8, rank 1 BROADCAST of 8 elements."
    ]


@each_row(
    ("first", "second", "groups"),
    [
        (("ALLREDUCE", 8), ("BROADCAST", 8), ("1(mesh_dp)", "2(mesh_tp)")),  # two groups with equal numbers
        (("SEND", 8), ("RECV", 16), ("5(mesh_pp)", "5(mesh_pp)")),  # a pair
        (("COALESCED", 8), ("RECV", 16), ("5(mesh_pp)", "5(mesh_pp)")),
        (("ALLTOALL_BASE", 8), ("ALLTOALL_BASE", 24), ("6(ep)", "6(ep)")),  # experts get different numbers of tokens
        (("GATHER", 8), ("GATHER", 24), ("0(default_pg)", "0(default_pg)")),
    ],
)
def test_what_is_no_different_collective(first, second, groups):
    lines = []
    for rank, ((kind, elements), group) in enumerate(zip((first, second), groups, strict=True)):
        lines += [gave_up(rank, 40, kind, elements=elements), status(rank, group, 40, 40)]
    assert [finding.rule.name for finding in diagnose(facts_of(*lines))] == ["watchdog-timeout"]


def test_what_was_issued_as_one_is_named_by_its_elements():
    gather = gave_up(0, 40, "COALESCED").replace("NumelOut=8", "NumelOut=32")
    finding = verdict(gather, status(0, "0(default_pg)", 40, 40))
    assert (
        finding.details[0] == "rank 0 gave up; the first is COALESCED (all-gather), number 40 of group 0(default_pg)."
    )
    second = [gave_up(1, 40, "ALLREDUCE"), status(1, "0(default_pg)", 40, 40)]
    assert verdict(gather, status(0, "0(default_pg)", 40, 40), *second).rule.name == "different-collectives"


@each_row("received", [8, 32])
def test_what_was_issued_as_one_has_equal_elements(received):
    calls = [gave_up(rank, 40, "COALESCED", elements=elements) for rank, elements in enumerate((8, 16))]
    calls = [call.replace("NumelOut=8", f"NumelOut={received}") for call in calls]
    finding = verdict(calls[0], status(0, "0(default_pg)", 40, 40), calls[1], status(1, "0(default_pg)", 40, 40))
    assert finding.rule.name == "different-collectives"


def test_of_ranks_that_give_up_at_neighbouring_numbers_the_first_is_behind():
    lines = [gave_up(0, 57, "ALLREDUCE"), status(0, "0(default_pg)", 57, 60)]
    finding = verdict(*lines, gave_up(1, 56, "ALLREDUCE"), status(1, "0(default_pg)", 56, 60))
    assert finding.rule.name == "rank-behind"
    assert finding.details == ["Rank 1 waits in collective 56 of group 0(default_pg), rank 0 waits in a later one."]
    unrelated = verdict(*lines, gave_up(1, 56, "ALLREDUCE"), status(1, "1(mesh_tp)", 56, 60))
    assert unrelated.rule.name == "watchdog-timeout", "numbers of two groups say nothing about each other"


@each_row("breaks", [("operation ",), ("=57, ",), ("operation ", "=57, ")])
def test_a_line_that_somebody_has_broken(breaks):
    line = gave_up(1, 57, "ALLREDUCE")
    for words in breaks:
        line = line.replace(words, words.strip() + "\n")
    finding = verdict(line)
    assert finding.rule.name == "watchdog-timeout"
    assert finding.details[0] == "rank 1 gave up; the first is ALLREDUCE, number 57 of its group."


def test_a_rank_is_behind_what_ran_out_of_time():
    group = "0(default_pg)"
    lines = [
        gave_up(0, 57, "ALLREDUCE"),
        status(0, group, 57, 90),
        gave_up(1, 57, "ALLREDUCE"),
        status(1, group, 57, 57),
    ]
    assert diagnose(facts_of(*lines))[0].rule.name == "watchdog-timeout", (
        "what is enqueued behind number 57 does not count"
    )
    finding = verdict(*lines, was_told(2, group, 56))
    assert finding.rule.name == "rank-behind"
    assert finding.details == [
        "Collective 57 of group 0(default_pg) ran out of time; rank 2 issued only 56 of that group."
    ]
    assert diagnose(facts_of(*lines, was_told(2, "4(mesh_tp)", 56)))[0].rule.name == "watchdog-timeout", "another group"

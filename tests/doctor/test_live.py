"""`doctor --live`: this machine, and pairs of ranks over Gloo."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from doctor.diagnosis import diagnose
from doctor.facts import Facts
from doctor.live import Live, Pair, describe, flag_slow_pairs, take_up
from doctor.machine import examine
from doctor.pairs import MeasureError, _collect, _measure
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]


def pairs(times: dict[tuple[int, int], float | None], across: bool = False) -> list[Pair]:
    return [Pair(ranks, time_ms, "" if time_ms else "no answer", across) for ranks, time_ms in times.items()]


def test_one_slow_rank_of_four() -> None:
    """It makes half of all pairs slow, so a median of all would not show it."""
    times = {(a, b): 50.0 if b == 3 else 4.0 for a in range(4) for b in range(a + 1, 4)}
    measured = pairs(times)
    sentences = flag_slow_pairs(measured)
    assert [pair.ranks for pair in measured if pair.is_slow] == [(0, 3), (1, 3), (2, 3)]
    assert sentences[0] == "Ranks 0 and 3: 50.00 ms, 12 times the 4.00 ms of fast pairs."
    assert sentences[-1] == "All of them have rank 3 in common."


def test_nine_times_is_not_slow_and_hosts_are_not_compared_with_one_another() -> None:
    assert flag_slow_pairs(pairs({(0, 1): 1.0, (0, 2): 9.9, (1, 2): 1.0})) == []
    assert flag_slow_pairs(pairs({(0, 1): 0.1}) + pairs({(0, 2): 5.0, (1, 2): 5.0}, across=True)) == []


def test_slow_and_failed_pairs_are_findings() -> None:
    live = Live({}, pairs=pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): None}))
    facts = Facts()
    take_up(facts, examine(), live)
    facts.machine = None
    (finding,) = diagnose(facts)
    assert finding.rule.name == "slow-pair" and finding.details == ["Ranks 1 and 2: no answer."]


def answers(*messages: Any) -> Any:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    for message in messages:
        theirs.send(message)
    return ours, theirs


def test_a_pair_that_falls_silent_is_named() -> None:
    (zero, keep), (one, keep_too) = (
        answers(("begin", (0, 1), None), ("time", (0, 1), 2.0), ("begin", (0, 2), None)),
        answers(),
    )
    found = _collect([zero, one], 3, timeout_s=0.1)
    assert [(pair.ranks, pair.time_ms, pair.problem) for pair in found] == [
        ((0, 1), 2.0, ""),
        ((0, 2), None, "no answer within the timeout"),
        ((1, 2), None, ""),
    ]
    assert flag_slow_pairs(found) == ["Ranks 0 and 2: no answer within the timeout."]
    keep.close()
    keep_too.close()


def test_ranks_that_do_not_come_up() -> None:
    (zero, theirs) = answers(("here", None, 0), ("failed", None, "no address"))
    with pytest.raises(MeasureError, match="the 2 processes did not come up: no address; rank 1 never answered"):
        _collect([zero], 2, timeout_s=0.1)
    theirs.close()


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("MASTER_PORT", "abc")
    machine = examine()
    said = describe(machine)
    assert "lo" in machine.interfaces and said["port"].startswith("MASTER_PORT=abc is no port")
    assert "NCCL_SOCKET_IFNAME=eth7" in said["variables"] and "torch 2" in said["versions"]
    assert "interface-not-found" in [finding.rule.name for finding in diagnose(Facts(machine=machine))]


def measure_as_a_rank(ranks: int) -> list[Any]:
    rank = dist.get_rank()
    return list(_measure(rank, ranks, "cpu", 100_000, 60, None))


def test_every_pair_is_measured_by_its_lower_rank(ranks: RankPool) -> None:
    answers = ranks.run(3, measure_as_a_rank, 3)
    assert [[pair for pair, _ in of_rank] for of_rank in answers] == [[(0, 1), (0, 2)], [(1, 2)], []]
    assert all(seconds > 0 for of_rank in answers for _, seconds in of_rank)


@pytest.mark.slow
def test_processes_of_its_own() -> None:
    command = [sys.executable, "scripts/doctor.py", "--live", "--ranks", "3", "--size-mib", "0.1", "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.stderr == "", answer.stderr
    live = json.loads(answer.stdout)["live"]
    assert [pair["ranks"] for pair in live["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["time_ms"] > 0 for pair in live["pairs"]) and live["backend"] == "Gloo"


@pytest.mark.slow
def test_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, "scripts/doctor.py", "--live", "--size-mib", "0.1", "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    content = json.loads(answer.stdout)
    assert answer.returncode == (3 if content["findings"] else 0) and len(content["live"]["pairs"]) == 1

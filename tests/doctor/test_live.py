"""`doctor --live`: this machine, and pairs of ranks over Gloo."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.live.machine import examine
from ddp_lab.doctor.live.measure import MeasureError, _collect
from ddp_lab.doctor.live.results import Pair, flag_slow_pairs

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
    measured = pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): None})
    (finding,) = diagnose(Facts(slow_pairs=flag_slow_pairs(measured)))
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
    with pytest.raises(MeasureError, match="the 2 processes did not start: no address; rank 1 never answered"):
        _collect([zero], 2, timeout_s=0.1)
    theirs.close()


def test_this_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("MASTER_PORT", "abc")
    machine = examine()
    said = machine.describe()
    assert "lo" in machine.interfaces and said["port"].startswith("MASTER_PORT=abc is not a port")
    assert "NCCL_SOCKET_IFNAME=eth7" in said["variables"] and "torch 2" in said["versions"]
    assert "interface-not-found" in [finding.rule.name for finding in diagnose(Facts(machine=machine))]


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

"""`doctor --live`: this machine, and pairs of ranks over Gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.live.machine import examine
from ddp_lab.doctor.live.results import Pair, flag_slow_pairs

ROOT = Path(__file__).parents[2]


def pairs(times: dict[tuple[int, int], float | None], across: bool = False) -> list[Pair]:
    return [Pair(ranks, time_ms, "" if time_ms else "no answer", across) for ranks, time_ms in times.items()]


def test_slow_and_failed_pairs_are_findings() -> None:
    measured = pairs({(0, 1): 1.0, (0, 2): 1.0, (1, 2): None})
    (finding,) = diagnose(Facts(slow_pairs=flag_slow_pairs(measured)))
    assert finding.rule.name == "slow-pair" and finding.details == ["Ranks 1 and 2: no answer."]


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
    command = [sys.executable, "-m", "ddp_lab", "doctor", "--live", "--ranks", "3", "--size-mib", "0.1", "--json"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.stderr == "", answer.stderr
    live = json.loads(answer.stdout)["live"]
    assert [pair["ranks"] for pair in live["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["time_ms"] > 0 for pair in live["pairs"]) and live["backend"] == "Gloo"

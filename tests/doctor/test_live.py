"""`doctor --live`: this machine, and pairs of ranks over Gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.live.results import Pair, flag_slow_pairs
from ddp_lab.machine import examine

ROOT = Path(__file__).parents[2]


def test_slow_pairs_are_findings():
    measured = [Pair((0, 1), 1.0), Pair((0, 2), 30.0), Pair((1, 2), 1.0), Pair((0, 3), 40.0, across_hosts=True)]
    (finding,) = diagnose(Facts(slow_pairs=flag_slow_pairs(measured)))
    assert finding.rule.name == "slow-pair"
    assert finding.details == ["Ranks 0 and 2: 30.00 ms, 30 times the 1.00 ms of fast pairs."]
    assert flag_slow_pairs([Pair((0, 1), 1.0), Pair((0, 2), 9.0), Pair((1, 2), 9.0)]) == []


def test_this_machine_is_described(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("MASTER_PORT", "abc")
    machine = examine()
    described = machine.describe()
    assert "lo" in machine.interfaces and described["port"].startswith("MASTER_PORT=abc is not a port")
    assert "NCCL_SOCKET_IFNAME=eth7" in described["variables"] and "torch 2" in described["versions"]
    assert "interface-not-found" in [finding.rule.name for finding in diagnose(Facts(machine=machine))]


@pytest.mark.slow
def test_under_torchrun():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", "-m", "ddp_lab"]
    answer = subprocess.run([*launcher, "doctor", "--live", "--json"], cwd=ROOT, capture_output=True, timeout=120)
    live = json.loads(answer.stdout)["live"]
    assert [pair["ranks"] for pair in live["pairs"]] == [[0, 1], [0, 2], [1, 2]]
    assert all(pair["time_ms"] > 0 for pair in live["pairs"]) and live["backend"] == "Gloo"

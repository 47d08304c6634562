"""A short soak; the one of 2,000 steps is run by hand (`docs/reliability.md`)."""

import subprocess
import sys

import pytest

from tests.faults.scenarios import ROOT


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_random_signals_cost_nothing_but_time() -> None:
    command = [sys.executable, "benchmarks/soak.py", "--steps", "120", "--every", "10", "--faults", "2"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.endswith("equal losses, no growth of files, threads, nothing left\n")
    assert answer.stdout.count("error: zero2: ") == 2

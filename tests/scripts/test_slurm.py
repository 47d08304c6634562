"""The batch scripts, on a real slurmctld and two slurmd where they can be had."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slurm_cluster import why_no_cluster
from scripts.slurm import try_cluster
from tests.in_process import run_in_process

ROOT = Path(__file__).resolve().parents[2]
NO_CLUSTER = why_no_cluster()
TIMEOUT_S = 560


def test_scripts_are_valid_bash() -> None:
    scripts = sorted((ROOT / "scripts" / "slurm").glob("*.*sh")) + sorted((ROOT / "scripts" / "slurm").glob("*.sbatch"))
    assert len(scripts) >= 7
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)


def test_without_slurm_it_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("benchmarks.slurm_cluster.SBIN", "")
    done = run_in_process(try_cluster)
    assert done.returncode == try_cluster.SKIPPED
    assert done.stdout.startswith("skipped: no SLURM cluster here: munged, slurmctld, slurmd, sbatch, srun not found;")


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + 30)
@pytest.mark.skipif(bool(NO_CLUSTER), reason=f"no SLURM cluster here: {NO_CLUSTER}")
def test_on_a_real_cluster(tmp_path: Path) -> None:
    """Time limit, drained node, preemption, requeue, resume to the last bit, a sweep with its report."""
    command = [sys.executable, "scripts/slurm/try_cluster.py", "--output-dir", str(tmp_path / "jobs")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.send_signal(signal.SIGTERM)  # it then removes the cluster
        process.wait(timeout=30)
    assert process.returncode == 0, said
    assert said.count("equal to the last bit") == 3 and "the report on them" in said

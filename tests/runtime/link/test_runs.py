"""Whole runs over a paced link: the record, the pages, and what the figures say of the link."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.analysis.command import main as analyse
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows

ROOT = Path(__file__).resolve().parents[3]
LINK, BYTES_PER_S = "40mbit,1ms", 5e6
FLAGS = "--workload mlp --depth 4 --width 128 --train-samples 96 --eval-samples 8 --max-steps 12 --bucket-cap-mb 0.1"


def train(script: str, choice: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(ROOT / script)]
    command = [*start, "--ddp-choice", choice, "--output-dir", str(folder), *FLAGS.split(), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("script", "choice"),
    [
        ("main_ddp.py", "bucket_ddp_async"),
        pytest.param("main_ddp.py", "pytorch_ddp", marks=pytest.mark.slow),
        pytest.param("main_shard.py", "pytorch_zero3", marks=pytest.mark.slow),
    ],
)
def test_a_run_is_as_slow_as_its_link(tmp_path: Path, script: str, choice: str) -> None:
    done = train(script, choice, tmp_path, "--link", LINK)
    assert done.returncode == 0, done.stderr
    assert f"{choice}: done over links of {LINK}" in done.stdout
    (window,) = find_windows(tmp_path / "profile" / choice)
    analysis = analyse_window(window)
    record = analysis.record
    assert record is not None and record["config"]["link"] == LINK and record["link_bits_per_s"] == 40_000_000
    sent = sum(
        call["payload_bytes"] * (1 if call["kind"] in ("all_reduce", "reduce_scatter") else 0.5)
        for call in record["expected_traffic"]
        if call["purpose"] != "bookkeeping"
    )
    timed = [seconds for seconds in record["step_time_s"] if seconds is not None]
    assert min(timed) >= sent / BYTES_PER_S > 0.01
    assert (analysis.exposure.steps["step_ms"] / 1e3 >= sent / BYTES_PER_S).all()
    spans = analysis.timelines[0].collectives.query("bytes >= 50_000")
    rates = spans["bytes"] / (spans["end"] - spans["issued"]) * 1e6  # of a busy machine, a span may begin late
    assert len(spans) and (rates <= 2 * BYTES_PER_S).all()  # an all-gather between two ranks sends half of its bytes
    assert analyse("", "reports", ["--trace-dir", str(tmp_path / "profile" / choice)]) == 0
    page = next(tmp_path.rglob("summary.html")).read_text()
    assert f"Every rank had a link of {LINK} (--link)" in page


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    done = train("main_ddp.py", "flat_ddp", tmp_path, "--link", "fast")
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "--link: rate 'fast': give a number above 0" in said[0]

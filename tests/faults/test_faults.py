"""Real ranks under torchrun with a fault in them: one message with the true cause, a record, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenarios import (
    MARK,
    ON_MESH,
    ROOT,
    SCENARIOS,
    TINY,
    Scenario,
    processes_of,
    run_scenario,
)
from tests.runtime.test_run import record_of

NAMED = {scenario.name: scenario for scenario in SCENARIOS}
QUICK = [("rank 0 killed in forward", "pytorch_ddp")]
FLAT_DDP = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "main_ddp.py"]
FLAT_DDP += ["--ddp-choice", "flat_ddp", *TINY]


def require_ends_well(scenario: Scenario, choice: str, folder: Path) -> None:
    outcome = run_scenario(scenario, choice, folder)
    assert outcome.problems(scenario) == [], outcome.output


@pytest.mark.parametrize(("name", "choice"), QUICK)
def test_a_fault_is_named_and_ends_the_run(tmp_path: Path, name: str, choice: str) -> None:
    require_ends_well(NAMED[name], choice, tmp_path)
    flights = sorted(path.name.split(".", 1)[1] for path in tmp_path.glob(f"profile/{choice}/*.flight.json"))
    assert flights == ["rank_0.flight.json", "rank_1.flight.json"]  # also of the rank that was killed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in NAMED if name not in dict(QUICK)])
def test_every_fault(tmp_path: Path, name: str) -> None:
    require_ends_well(NAMED[name], "simple_ddp", tmp_path)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.exhaustive if number > 0 else pytest.mark.slow)
        for number in range(len(ON_MESH))
    ],
)
def test_a_fault_on_a_mesh_ends_all_dimensions(tmp_path: Path, number: int) -> None:
    """The message names the rank with its place."""
    require_ends_well(ON_MESH[number], "tp", tmp_path)


@pytest.mark.parametrize(
    ("sent", "to"),
    [
        pytest.param(
            sent, to, marks=pytest.mark.slow if (sent, to) == (signal.SIGTERM, "torchrun") else pytest.mark.exhaustive
        )
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        for to in ("torchrun", "rank 1")
    ],
)
def test_signals(tmp_path: Path, sent: signal.Signals, to: str) -> None:
    """To torchrun or to a rank: one line, a record, and no process that continues without torchrun."""
    mark = f"signal-{os.getpid()}-{tmp_path.name}"
    command = [*FLAT_DDP, "--epochs", "100000", "--no-profile", "--output-dir", str(tmp_path)]
    output_path = tmp_path / "output"
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
    with output_path.open("w") as output, (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=errors)
        wait_for(lambda: "step 1/" in output_path.read_text())
        os.kill(process.pid if to == "torchrun" else rank_processes(mark)[1], sent)
        assert process.wait(timeout=15) != 0
        wait_for(lambda: not processes_of(mark))
    said = [line for line in (tmp_path / "errors").read_text().splitlines() if line.startswith("error: ")]
    ended = record_of(tmp_path, "flat_ddp")["ended"]
    assert len(said) == 1 and ended["message"] in said[0]
    assert ended["how"] == ("killed" if (sent, to) == (signal.SIGKILL, "rank 1") else "interrupted")
    if to == "rank 1":
        assert ended["rank"] == 1 and "rank 1 was" in ended["message"]


def test_sigusr1(tmp_path: Path) -> None:
    """To one rank: all save and end, with exit code 0."""
    mark = f"sigusr1-{os.getpid()}-{tmp_path.name}"
    length = ["--epochs", "100000", "--checkpoint-every", "1000000"]
    command = [*FLAT_DDP, *length, "--no-profile", "--output-dir", str(tmp_path)]
    output_path = tmp_path / "output"
    with output_path.open("w") as output:
        environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
        try:
            wait_for(lambda: "step 1/" in output_path.read_text())
            os.kill(rank_processes(mark)[1], signal.SIGUSR1)
            assert process.wait(timeout=90) == 0
        finally:
            process.terminate()
    ended, said = record_of(tmp_path, "flat_ddp")["ended"], output_path.read_text()
    (checkpoint,) = tmp_path.glob("checkpoints/flat_ddp/step_*")
    assert ended["how"] == "stopped" and ended["step"] == int(checkpoint.name.removeprefix("step_"))
    assert f"flat_ddp: {ended['message']}; --resume continues; record: " in said and str(checkpoint) in said


def rank_processes(mark: str) -> dict[int, int]:
    """Process ids by rank."""
    found = {}
    for pid in processes_of(mark):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {int(value[5:]): pid for value in variables if value.startswith(b"RANK=")}
    return found


def wait_for(holds: Any, limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)

"""Real ranks under torchrun with a fault in them: one message with the true cause, a record, nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ddp
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.process.launcher import stop_requests
from ddp_lab.runtime.records.run_so_far import RunSoFar
from ddp_lab.runtime.run import train_and_record
from tests.checkpoints import here
from tests.faults.scenarios import (
    IN_STAGES,
    MARK,
    OF_OURS,
    ON_MESH,
    ROOT,
    SCENARIOS,
    TINY,
    Scenario,
    kill_processes_of,
    processes_of,
    run_scenario,
    wait_for,
)
from tests.ranks import RankPool
from tests.runtime.test_run import record_of
from tests.tables import each_row

NAMED = {scenario.name: scenario for scenario in (*SCENARIOS, *OF_OURS)}
OFTEN = ("SIGHUP in forward, ddp-lab train", "exception whose __str__ raises", "exception in data after a save")
QUICK = [("rank 0 killed in forward", "pytorch_ddp")]
FLAT_DDP = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "main_ddp.py"]
FLAT_DDP += ["--ddp-choice", "flat_ddp", *TINY]
SIGNALS_TRIED = [(signal.SIGTERM, "torchrun"), (signal.SIGINT, "ddp-lab")]


can_mount = subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode == 0
needs_mounts = pytest.mark.skipif(not can_mount, reason="no mounts of our own here")


def require_ends_well(scenario: Scenario, choice: str, folder: Path):
    outcome = run_scenario(scenario, choice, folder)
    assert outcome.problems(scenario) == [], outcome.output


@pytest.mark.slow
@pytest.mark.parametrize(("name", "choice"), QUICK)
def test_a_fault_is_named_and_ends_the_run(tmp_path, name, choice):
    require_ends_well(NAMED[name], choice, tmp_path)
    flights = sorted(path.name.split(".", 1)[1] for path in tmp_path.glob(f"profile/{choice}/*.flight.json"))
    assert flights == ["rank_0.flight.json", "rank_1.flight.json"]  # also of the rank that was killed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.exhaustive)
        for name in NAMED
        if name not in dict(QUICK)
    ],
)
def test_every_fault(tmp_path, name):
    require_ends_well(NAMED[name], "simple_ddp", tmp_path)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=pytest.mark.exhaustive if n else pytest.mark.slow) for n in range(len(ON_MESH))],
)
def test_a_fault_on_a_mesh_ends_all_dimensions(tmp_path, number):
    """The message names the rank with its place."""
    require_ends_well(ON_MESH[number], "tp", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", IN_STAGES, ids=lambda scenario: scenario.name)
def test_a_fault_in_a_stage_ends_all(tmp_path, scenario):
    require_ends_well(scenario, "tp", tmp_path)


@pytest.mark.parametrize(
    ("sent", "to"),
    [
        pytest.param(sent, to, marks=pytest.mark.slow if (sent, to) in SIGNALS_TRIED else pytest.mark.exhaustive)
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
        for to in ("torchrun", "rank 1", "ddp-lab")
    ],
)
def test_signals(tmp_path, sent, to):
    """To torchrun, ddp-lab train or a rank: one line, a record, and no process that continues without torchrun."""
    mark = f"signal-{os.getpid()}-{tmp_path.name}"
    launcher = (
        [sys.executable, "-m", "ddp_lab", "train", "flat_ddp", "--ranks", "2", *TINY] if to == "ddp-lab" else FLAT_DDP
    )
    command = [*launcher, "--epochs", "100000", "--no-profile", "--output-dir", str(tmp_path)]
    output_path = tmp_path / "output"
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with output_path.open("w") as output, (tmp_path / "errors").open("w") as errors, ExitStack() as ends:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=errors)
        ends.callback(kill_processes_of, mark)
        wait_for(lambda: "step 1/" in output_path.read_text())
        os.kill(rank_processes(mark)[1] if to == "rank 1" else process.pid, sent)
        assert process.wait(timeout=15) != 0
        wait_for(lambda: not processes_of(mark))
    lines = (tmp_path / "errors").read_text().splitlines()
    messages = lines if to == "ddp-lab" else [line for line in lines if line.startswith("error: ")]
    ended = record_of(tmp_path, "flat_ddp")["ended"]
    assert len(messages) == 1 and ended["message"] in messages[0]
    assert ended["how"] == ("killed" if (sent, to) == (signal.SIGKILL, "rank 1") else "interrupted")
    if ended["how"] == "interrupted":
        expected = f"stopped by {sent.name}," if sent != signal.SIGKILL else "torchrun has gone, so the ranks ended"
        assert expected in messages[0] and f", after step {ended['step']} of " in messages[0]
    if to == "rank 1":
        assert ended["rank"] == 1 and "rank 1 was" in ended["message"]


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)])
def test_a_signal_while_torch_loads(tmp_path, sent):
    command = [sys.executable, "-m", "ddp_lab", "train", "flat_ddp", *TINY, "--output-dir", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and "load torch" in process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(sent)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + sent
    assert errors == f"error: flat_ddp: stopped by {sent.name} before training began\n"


LOST = "warning: cannot write to standard output: {}; the run goes on without"
HANGS_UP = "trap '' HUP; \"$@\" & while pkill -HUP -P $$; do sleep 0.2; done; wait $!"
LITTLE_SHM = 'unshare -Urm sh -c \'mount -t tmpfs -o size=4k none /dev/shm && $0 "$@"\' "$@"'


@pytest.mark.parametrize(
    ("shell", "code", "says"),
    [
        ('ulimit -n 40; "$@"', 2, "raise ulimit -n"),
        pytest.param(HANGS_UP, 0, "", marks=pytest.mark.slow),
        pytest.param('"$@" >&-', 0, "", marks=pytest.mark.slow),
        pytest.param('set -o pipefail; "$@" | true', 0, LOST.format("Broken pipe"), marks=pytest.mark.slow),
        pytest.param(LITTLE_SHM, 1, "df -h /dev/shm", marks=[pytest.mark.slow, needs_mounts]),
    ],
)
def test_what_a_shell_withholds(tmp_path, shell, code, says):
    """At most one line, and a record where the run can go on."""
    command = [sys.executable, "-m", "ddp_lab", "train", "flat_ddp", "--ranks", "2", *TINY, "--max-steps", "2"]
    answer = subprocess.run(
        ["bash", "-c", shell, "bash", *command, "--no-eval", "--no-profile", "--output-dir", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    assert answer.returncode == code and says in answer.stderr and answer.stderr.count("\n") == bool(says)
    assert code or record_of(tmp_path, "flat_ddp")["ended"]["how"] == "completed"


FULL = "error: cannot write to standard output: No space left on device\n"
GOES_ON = "from ddp_lab.runtime.process.environment import guard_output as g; g(True); print(1, flush=True); print(2)"


@each_row(
    "shell, code, says",
    [
        ('"$0" -m ddp_lab --version >/dev/full', 1, FULL),
        ('set -o pipefail; "$0" -m ddp_lab --help | true', 1, ""),
        ('"$0" -m ddp_lab --version >&-', 0, ""),
        (f"\"$0\" -c '{GOES_ON}' >/dev/full", 0, LOST.format("No space left on device") + "\n"),
        (f"\"$0\" -c '{GOES_ON}' >/dev/full 2>/dev/full", 0, ""),
    ],
)
def test_a_lost_output_shows_no_traceback(shell, code, says):
    answer = subprocess.run(["bash", "-c", shell, sys.executable], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert (answer.returncode, answer.stderr) == (code, says)


def stopped_by_a_signal(settings: dict[str, Any]):
    """Rank 1 gets SIGUSR1."""
    config = RunConfig.of(**settings)
    so_far = RunSoFar(config)
    with stop_requests(saves=True) as so_far.stop_request:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        train_and_record(config, here(), ddp.load, so_far)


def test_sigusr1(ranks: RankPool, tmp_path):
    """To one rank: all save, and end as a run does that is done. Under torchrun: `test_elastic.py`."""
    settings = {"choice": "flat_ddp", "workload": "mlp", "depth": 2, "width": 8, "epochs": 100_000, "no_profile": True}
    ranks.run(2, stopped_by_a_signal, settings | {"checkpoint_every": 1_000_000, "output_dir": str(tmp_path)})
    ended = record_of(tmp_path, "flat_ddp")["ended"]
    (checkpoint,) = tmp_path.glob("checkpoints/flat_ddp/step_*")
    assert ended["how"] == "stopped" and ended["step"] == int(checkpoint.name.removeprefix("step_"))
    assert "stopped by SIGUSR1" in ended["message"] and str(checkpoint) in ended["message"]


def rank_processes(mark: str) -> dict[int, int]:
    """Process ids by rank."""
    pid_by_rank = {}
    for pid in processes_of(mark):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        pid_by_rank |= {int(value[5:]): pid for value in variables if value.startswith(b"RANK=")}
    return pid_by_rank

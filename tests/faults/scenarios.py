"""Faults to plant, what must come of each, and one run of it."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddp_lab.runtime.checkpoint.saver import LOCK
from ddp_lab.runtime.mesh import Mesh

ROOT = Path(__file__).parent.parent.parent
SCRIPT = "tests/faults/main_faulty.py"
TINY = ["--workload", "mlp", "--depth", "4", "--width", "64", "--train-samples", "240", "--eval-samples", "4"]
FAULT_STEP = 5
WINDOW = ["--profile-wait", "1", "--profile-warmup", "1", "--profile-active", "1", "--profile-repeat", "2"]
"""The first ends after step 2, the second with step `FAULT_STEP`."""
IN_ORDER = ("simple_ddp", "simple_ddp_ga")
"""Choices that all-reduce gradients one by one in Python."""
BY_HAND = (*IN_ORDER, "flat_ddp", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async", "zero1", "zero2", "zero3")
"""Choices whose collectives can be replaced in Python."""
SAVING = ("--checkpoint-every", "2", "--no-profile")
AFTER_SAVE = ("--checkpoint-every", str(FAULT_STEP), "--no-profile")
HANG_TIMEOUT_S = 30.0 if torch.cuda.is_available() else 6.0
"""Of a collective. The first ones on a GPU take seconds: connections are made, kernels and the profiler are loaded."""
MARK = "DDP_LAB_FAULT_RUN"
"""A variable that every process of a run inherits, so that processes that are left can be found."""


@dataclass(frozen=True)
class Scenario:
    """A fault on rank `rank` in step `FAULT_STEP`, after the first profile window.

    Attributes:
        fault: The variable `FAULT` of `main_faulty`, without rank and step.
        how: `ended.how` of the record.
        says: Must be in the message.
        names_place: Whether the message must name rank and step (`rank 1`, `step 5`).
        hangs: Whether the run ends by the timeout of collectives.
        only: The choices in which it can be planted; empty for all.
        flags: Of the run, in addition to the usual ones.
        mesh: Of the ranks, which the message must then name with their places. Default: two ranks without a mesh.
        starter: What starts the ranks: `torchrun`, or `ddp-lab train`, which prints the message alone.
    """

    name: str
    fault: str
    how: str
    says: str
    names_place: bool = True
    hangs: bool = False
    rank: int = 1
    only: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    mesh: str = ""
    starter: str = "torchrun"

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.mesh).size if self.mesh else 2

    @property
    def named(self) -> str:
        """The rank in the message."""
        return f"rank {self.rank}" + (f" ({Mesh.parse(self.mesh).describe(self.rank)})" if self.mesh else "")

    def fits(self, choice: str) -> bool:
        """Whether the fault can be planted in `choice`."""
        return not self.only or choice in self.only

    @property
    def plan(self) -> str:
        return f"{self.fault}:rank={self.rank}:step={FAULT_STEP}"


SCENARIOS = (
    Scenario("killed in forward", "kill:at=forward", "killed", "was killed"),
    Scenario("rank 0 killed in forward", "kill:at=forward", "killed", "was killed", rank=0),
    Scenario("killed in a collective", "kill:at=collective", "killed", "was killed"),
    Scenario("killed while it writes a trace", "kill:at=trace", "killed", "writing a trace"),
    Scenario("crashed (segmentation fault)", "crash:at=forward", "killed", "crashed (Segmentation fault)"),
    Scenario("exit code 0 in forward", "exit:at=forward", "killed", "exited without an error"),
    *(
        Scenario(f"{number} in forward", f"{number}:at=forward", "interrupted", f"was stopped by {number}, after")
        for number in ("SIGHUP", "SIGQUIT", "SIGXCPU")
    ),
    Scenario("exception in forward", "raise:at=forward", "failed", "ValueError: planted"),
    Scenario("exception that is not UTF-8", "bytes:at=forward", "failed", "ValueError: planted \\udcff"),
    Scenario("exception whose __str__ raises", "mute:at=forward", "failed", "Mute: (its text cannot be read"),
    Scenario("exception in data after a save", "raise:at=data", "failed", "during loading data", flags=AFTER_SAVE),
    Scenario("data hang after a save", "loop:at=data", "hung", "during loading data", hangs=True, flags=AFTER_SAVE),
    Scenario("stopped (SIGSTOP)", "stop:at=forward", "hung", "is stopped (SIGSTOP)", hangs=True),
    Scenario("endless loop", "loop:at=optimizer", "hung", "hangs", hangs=True),
    Scenario("another collective", "extra:at=forward", "mismatched", "differs between ranks"),
    Scenario("another dtype", "dtype:at=collective", "mismatched", "differs between ranks", only=BY_HAND),
    Scenario("another order", "order:at=collective", "mismatched", "differs between ranks", only=IN_ORDER),
    Scenario("NaN on one rank", "nan:at=forward", "failed", "is not finite"),
    Scenario("infinity in a gradient", "inf:at=forward", "failed", "is not finite"),
    Scenario("out of memory", "memory:at=forward", "failed", "out of memory"),
    Scenario("folder deleted", "vanish:at=optimizer", "failed", "cannot write", names_place=False),
    Scenario("disk full, checkpoint", "disk:at=forward", "failed", "checkpoint", names_place=False, flags=SAVING),
    Scenario("slow rank", "slow:at=forward", "completed", "", names_place=False),
)

OF_OURS = tuple(
    replace(scenario, name=f"{scenario.name}, ddp-lab train", starter="ddp-lab train")
    for scenario in (
        *SCENARIOS[:1],
        Scenario("exit code 7 in forward", "exit 7:at=forward", "killed", "exited without an error"),
        Scenario("aborted (SIGABRT)", "SIGABRT:at=forward", "killed", "crashed (Aborted)"),
        *(scenario for scenario in SCENARIOS if scenario.fault in ("crash:at=forward", "SIGHUP:at=forward")),
    )
)
"""A rank ends without an error file: `torchrun` would blame it, though another rank has said why."""

SMALL_LM = ("--workload", "sample-lm", "--sequence-length", "16", "--no-profile")
ON_MESH = tuple(
    Scenario(name, fault, how, says, rank=3, flags=SMALL_LM, mesh="dp=2,tp=2")
    for name, fault, how, says in (
        ("killed in backward", "kill:at=backward", "killed", "was killed"),
        ("exception in forward", "raise:at=forward", "failed", "ValueError: planted"),
        ("another collective in tp", "extra_in_model:at=forward", "mismatched", "rank 3 (dp 1, tp 1) broadcast of 5"),
    )
)
"""No collective times out: the ranks end since they watch each other."""
IN_STAGES = tuple(
    replace(scenario, rank=3, flags=(*SMALL_LM, "--grad-accum-steps", "4"), mesh="dp=2,pp=2")
    for scenario in (ON_MESH[0], next(scenario for scenario in SCENARIOS if scenario.hangs))
)
"""A stage is killed while others wait for its messages, or stands still until these time out."""


@dataclass(frozen=True)
class Outcome:
    """What came of a run.

    Attributes:
        seconds: From the fault to the end of torchrun.
        errors: Lines on standard error that begin with `error: `.
        record: The run record; None if there is none.
        traces: Finished traces.
        rubbish: Temporary files that are left behind.
        processes: Those that are left behind.
        output: Standard error.
    """

    exit_code: int
    seconds: float
    errors: list[str]
    record: dict[str, Any] | None
    traces: int
    rubbish: list[str]
    processes: list[int]
    output: str

    def problems(self, scenario: Scenario, most_s: float = 15.0) -> list[str]:
        """What is not as it should be; empty if everything is."""
        flaws = []
        fails = scenario.how != "completed"
        record = self.record or {}
        ended = record.get("ended", {})
        allowed = most_s + (HANG_TIMEOUT_S if scenario.hangs else 0.0)
        if self.exit_code != int(fails):
            flaws.append(f"exit code {self.exit_code}")
        if self.seconds > allowed:
            flaws.append(f"took {self.seconds:.1f} s")
        if len(self.errors) != int(fails):
            flaws.append(f"{len(self.errors)} messages")
        if fails and self.errors and scenario.says not in self.errors[0]:
            flaws.append(f"the message lacks '{scenario.says}': {self.errors[0]}")
        if scenario.names_place and self.errors:
            words = [f"step {FAULT_STEP}"] + [scenario.named] * (scenario.how != "mismatched")
            flaws += [f"the message lacks '{word}': {self.errors[0]}" for word in words if word not in self.errors[0]]
        if scenario.starter != "torchrun":
            flaws += ["more is said than the message"] * (self.output.count("\n") > 1)
        elif fails and self.errors and self.errors[0] not in self.output.rpartition("Root Cause")[2]:
            flaws.append("torchrun's root cause is not the message")
        if ended.get("traceback") and "; traceback: " not in self.errors[0]:
            flaws.append("its traceback is in no file")
        if ended.get("how") != scenario.how:
            flaws.append(f"recorded as {ended.get('how')}")
        unread = record.get("device") == "cuda"  # the latest loss, which the host reads a step later
        if fails and len(record.get("train_loss", [])) < FAULT_STEP - unread:
            flaws.append("steps are missing in the record")
        loses_traces = scenario.fault.split(":")[0] in ("disk", "vanish") or "--no-profile" in scenario.flags
        if fails and not loses_traces and self.traces < 2:
            flaws.append(f"{self.traces} traces kept")
        if self.rubbish:
            flaws.append(f"left behind: {', '.join(self.rubbish)}")
        if self.processes:
            flaws.append(f"processes left: {self.processes}")
        return flaws


def run_scenario(scenario: Scenario, choice: str, folder: Path, limit_s: float = 120.0) -> Outcome:
    """One run of `choice` under torchrun, with the fault in it."""
    mark, moment = uuid.uuid4().hex, folder / "fault_time"
    flags = ["--ddp-choice", choice, *TINY, *WINDOW, *scenario.flags, "--output-dir", str(folder)]
    flags += ["--mesh", scenario.mesh] if scenario.mesh else []
    if scenario.hangs:
        flags += ["--timeout-minutes", str(HANG_TIMEOUT_S / 60)]
    environment = os.environ | {"FAULT": scenario.plan, "FAULT_TIME_FILE": str(moment)}
    environment |= {MARK: mark, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, *flags, "--ranks", str(scenario.ranks)]
    if scenario.starter == "torchrun":
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={scenario.ranks}"]
        command = [sys.executable, *launcher, SCRIPT, *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill_processes_of(mark)
        _, errors = process.communicate()
    ended_s = time.time()
    processes = kill_processes_of(mark)
    return Outcome(
        process.returncode,
        ended_s - float(moment.read_text()) if moment.exists() else 0.0,
        [line for line in errors.splitlines() if line.startswith("error: ")],
        next((json.loads(path.read_text()) for path in folder.glob("profile/*/*.run.json")), None),
        len(list(folder.glob("profile/*/rank_*/*.pt.trace.json.gz"))),
        [path.name for path in folder.rglob(".*") if path.name != LOCK],
        processes,
        errors,
    )


def kill_processes_of(mark: str) -> list[int]:
    """Kill what lives of a run. torchrun gives each rank a session of its own, so no process group holds them all."""
    pids = processes_of(mark)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def processes_of(mark: str) -> list[int]:
    """Living processes of the run with this mark."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue  # it has ended, or belongs to another user
    return pids


def wait_for(holds, limit_s: float = 90.0):
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)

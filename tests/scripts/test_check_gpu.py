"""`ddp-lab check-gpu`, here over Gloo, so that it works on the day it counts; and how its tests judge what GPUs say."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

import ddp
from ddp_lab.commands import check_gpu
from ddp_lab.commands.check_gpu import PARTS, ROOT
from ddp_lab.runtime.data.batches import planned_steps
from ddp_lab.runtime.flags import parse_config
from ddp_lab.runtime.share_gpu import PIPES
from tests.faults.scenarios import Outcome, wait_for
from tests.in_process import run_in_process
from tests.on_gpu import test_device, test_machine, test_runs, test_speed
from tests.on_gpu.conftest import FAILS, HOLDS, SKIPPED, Page
from tests.on_gpu.host_waits import COUNTED
from tests.on_gpu.place import Place
from tests.tables import each_row


def place(folder, has_gpus=False, **more):
    return Place(2, has_gpus, folder, is_quick=True, **more)


def test_the_page_tells_what_a_failed_command_said(tmp_path):
    lines, where = [], place(tmp_path)
    page = Page(where, lines.append)
    says = "print('an early error'); print(*range(90), sep='\\n'); print('last line'); raise SystemExit(1)"
    where.run_well("good", ["-c", "print('of no interest')"], limit_s=30)
    with pytest.raises(AssertionError, match=r"exit code 1: an early error; see bad\.txt"):
        where.run_well("bad", ["-c", says], limit_s=30)
    crash = SimpleNamespace(reprcrash=SimpleNamespace(message="exit code 1"))
    page.add("resume", "resume", SimpleNamespace(outcome="failed", longrepr=crash, longreprtext="in run", duration=1.0))
    where.begin("backends")
    where.rows.append({"choice": "a|b"})
    where.says("fine")
    page.add("backends", "backends", SimpleNamespace(outcome="passed", duration=1.0))
    skip = SimpleNamespace(outcome="skipped", longrepr=("", 1, "Skipped: no GPU"), duration=0.0)
    page.add("topology", "topology", skip)
    report = (tmp_path / "report.md").read_text()
    assert [line[:9].strip() for line in lines] == ["2 ranks", FAILS, HOLDS, SKIPPED]
    assert "| resume | FAIL | exit code 1 |" in report and "| backends | pass | fine |" in report
    assert "| topology | skipped |" in report and "| a/b |" in report and "in run" in report
    assert "    an early error\n    ...\n" in report and "    89\n    last line\n" in report
    assert "good.txt" not in report and report.count("bad.txt:") == 1


def test_a_command_that_takes_too_long_leaves_no_process(tmp_path):
    """Its children neither, in sessions of their own, as torchrun's ranks are."""
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    says = f"import subprocess as s; c = s.Popen({child}, start_new_session=True); print(c.pid, flush=True); c.wait()"
    with pytest.raises(AssertionError, match="not done"):
        place(tmp_path).run("slow", ["-c", says], limit_s=2)
    pid = int((tmp_path / "slow.txt").read_text())
    wait_for(lambda: not lives(pid), limit_s=10)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update")

    monkeypatch.setattr(check_gpu, "has_gpu", lambda: True)
    monkeypatch.setattr(check_gpu, "run_tests", lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    arguments = ("--only", "topology", "--output-dir", str(tmp_path / "out"))
    answer = run_in_process(check_gpu, *arguments)
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1
    assert "too old (found version 12040)" in answer.stderr and "--cpu" in answer.stderr
    assert run_in_process(check_gpu, *arguments, "--cpu").returncode == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


class Pretended(Place):
    """A place whose commands do nothing."""

    def run(self, log, command, *_, **__):
        self.texts[log] = " ".join(command)
        (self.folder / f"{log}.txt").write_text("")
        return subprocess.CompletedProcess(command, 0, "")

    def newest_record(self, folder):
        return {"train_loss": [1.0]}


def test_ranks_that_share_a_card_say_so_in_every_command(tmp_path, monkeypatch):
    def run_scenario(scenario, choice, folder):
        assert scenario.flags[-1:] == ("--share-gpu",) and not list(folder.parents[0].glob("no multi*/*"))
        assert os.environ[PIPES].startswith(str(tmp_path))
        return Outcome(1, 1.0, [], None, 0, [], [], "")

    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(test_runs, "run_scenario", run_scenario)
    card = Pretended(2, True, tmp_path, is_quick=True, shares_gpu=True)
    assert "0 messages" in holds(test_runs.test_faults, card), "a run that says nothing is no pass"
    test_runs.test_resume(card)
    card.rows.clear()
    for test in (test_speed.test_all_reduce, test_speed.test_originals, test_speed.test_sweep):
        with pytest.raises((AssertionError, StopIteration)):  # nothing was measured
            test(card)
    assert len(card.texts) == 10 and all("--share-gpu" in command for command in card.texts.values())
    assert PIPES not in os.environ


@each_row("size", range(1, 9))
def test_batches_fit_any_number_of_ranks(size, tmp_path):
    where = Pretended(size, True, tmp_path, is_quick=False)
    test_runs.test_resume(where)
    where.rows.clear()
    for test in (test_speed.test_sweep, test_speed.test_sweep_bf16):
        with pytest.raises(AssertionError, match="no run"):
            test(where)
    for command in (text.split() for text in where.texts.values()):
        flags = command[command.index("--workload") :]
        config = parse_config("", ddp.REGISTRY, arguments=["--ddp-choice", "simple_ddp", *flags])
        assert config.micro_batch_size(size) == 2
        if "--no-profile" in command:
            assert config.train_samples and planned_steps(config, config.train_samples)[1] == config.max_steps


def holds(test, *args):
    try:
        test(*args)
    except AssertionError as error:
        return str(error).split("\n")[0]
    return ""


CLEAN = {"zero1": {}, "pytorch_ddp": {"ddp.py:3": 4}}
WAIT = {test_device.PLANTED: {"ranks.py:9": 8}}
RACE = {"zero1": "CUDASanitizerErrors: CSAN detected"}


@each_row(
    ("test", "without", "planted", "says"),
    [
        (test_device.test_waits, CLEAN, WAIT, ""),
        (test_device.test_waits, CLEAN, {test_device.PLANTED: {}}, "the wait that was planted is not seen"),
        (
            test_device.test_waits,
            CLEAN,
            {test_device.PLANTED: "ValueError: planted"},
            "the wait that was planted is not seen: ValueError",
        ),
        (test_device.test_waits, {"zero1": {"zero1.py:9": 8}}, WAIT, f"zero1: 8 in {COUNTED} steps zero1.py:9"),
        (test_device.test_waits, {"pytorch_ddp": "ValueError: planted"}, WAIT, "pytorch_ddp: ValueError: planted"),
        (test_device.test_sanitizer, {"zero1": 1.0}, RACE, ""),
        (test_device.test_sanitizer, {"zero1": 1.0}, {"zero1": 1.0}, "the race that was planted is not reported"),
        (test_device.test_sanitizer, RACE, RACE, "zero1: CUDASanitizerErrors"),
    ],
)
def test_what_is_planted_alone_is_seen(test, without, planted, says, tmp_path):
    """`pool` stands for ranks on GPUs."""
    pool = SimpleNamespace(
        run=lambda size, function, names, count, is_planted=False, **_: [planted if is_planted else without],
        close=lambda: None,
    )
    problem = holds(test, place(tmp_path, has_gpus=True), lambda backend: pool)
    assert says in problem and bool(says) == bool(problem)


def check_row(unit, result):
    return {"subject": "x", "rank": "1", "unit": unit, "expected": "9", "measured": "0.0", "result": result}


@each_row(
    ("checks", "says"),
    [
        ([check_row("bytes", "pass"), check_row("calls/step", "pass"), check_row("bytes/step", "unknown")], ""),
        ([check_row("bytes", "pass"), check_row("calls/step", "fail")], "1 of 2 checks fail"),
        ([check_row("bytes", "pass"), check_row("calls/step", "unknown")], "nothing was checked in calls/step"),
        ([], "nothing was checked in bytes and calls/step"),
    ],
)
def test_a_run_that_nobody_checked_is_no_pass(checks, says):
    problem = test_speed.problem_of(checks, {"bytes", "calls/step"})
    assert problem.startswith(says) and bool(problem) == bool(says)


def test_a_device_is_asked_for_by_its_own_number(tmp_path, monkeypatch):
    def properties(index):
        assert index == 0, "Invalid device id"
        return SimpleNamespace(name="H100", total_memory=2**36, major=9, minor=0)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    card = place(tmp_path, has_gpus=True, shares_gpu=True)
    test_machine.test_environment(card)
    assert card.line.startswith("1 x H100 of 64 GiB")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param("environment,backends,parity,resume", marks=pytest.mark.slow),
        pytest.param(",".join(PARTS), marks=pytest.mark.exhaustive),
    ],
)
def test_parts_on_ranks(tmp_path, parts):
    """As a user would run them. All take ten minutes on two cores that do nothing else; the limit is for a hang."""
    started = [sys.executable, "-m", "ddp_lab", "check-gpu", "--only", parts, "--output-dir", str(tmp_path / "out")]
    started += ["--cpu", "--share-gpu", "2"]
    answer = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.startswith("2 ranks that share the CPU")
    assert FAILS not in answer.stdout and all(f" {part}" in answer.stdout for part in parts.split(","))

"""The script that checks a rented machine: here over Gloo, so that it works on the day it counts."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from ddp_lab.gpu_check import check, command
from ddp_lab.gpu_check.parts import FAIL, PASS, ROOT, Broken, Machine, Part, Verdict
from tests.in_process import run_in_process
from tests.tables import each_row


def machine(folder: Path, ranks: int = 2, has_gpus: bool = False) -> Machine:
    return Machine(ranks, has_gpus, folder, is_quick=True)


def raising(error: Exception) -> Part:
    def look(_: Machine) -> Verdict:
        raise error

    return Part("broken", look)


@each_row("error", [Broken("not done after 3 s"), ZeroDivisionError("planted"), OSError("planted")])
def test_a_part_that_fails_stops_no_other(error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = Part("whole", lambda _: Verdict(PASS, "fine", [{"choice": "a|b", "": PASS}]))
    assert check.check(machine(tmp_path), [raising(error), whole]) == 1
    said = capsys.readouterr().out
    assert "FAIL      broken" in said and str(error) in said
    assert "pass      whole" in said and "broken failed; send the folder" in said
    report = (tmp_path / "report.md").read_text()
    assert "| broken | FAIL |" in report and "| whole | pass | fine |" in report and "| a/b | pass |" in report


def test_the_page_tells_what_a_failed_command_said(tmp_path: Path) -> None:
    says = "print('an early error'); print(*range(90), sep='\\n'); print('last line'); raise SystemExit(1)"

    def fails(where: Machine) -> Verdict:
        where.run_well("good", ["-c", "print('of no interest')"], limit_s=30)
        where.run_well("bad", ["-c", says], limit_s=30)
        return Verdict(PASS, "")

    check.check(machine(tmp_path), [Part("commands", fails), raising(ZeroDivisionError("planted"))])
    report = (tmp_path / "report.md").read_text()
    assert "bad.txt:" in report and "    an early error\n    ...\n" in report and "    89\n    last line\n" in report
    assert "good.txt" not in report and report.count("bad.txt:") == 1
    assert "    Traceback (most recent call last)" in report and "in look" in report


def test_a_command_that_takes_too_long_leaves_no_process(tmp_path: Path) -> None:
    """Its children neither, in sessions of their own, as torchrun's ranks are."""
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    says = f"import subprocess as s; c = s.Popen({child}, start_new_session=True); print(c.pid, flush=True); c.wait()"
    with pytest.raises(Broken, match="not done"):
        machine(tmp_path).run("slow", ["-c", says], limit_s=3)
    pid, deadline = int((tmp_path / "slow.txt").read_text()), time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nPlease update")

    monkeypatch.setattr(command, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    arguments = ("--only", "topology", "--output-dir", str(tmp_path / "out"))
    done = run_in_process(command, *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "too old (found version 12040)" in done.stderr and "--cpu" in done.stderr
    assert run_in_process(command, *arguments, "--cpu").returncode == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_every_part_is_documented() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    missing = [part for part in command.PARTS if f"| `{part}` |" not in text]
    assert not missing


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param("environment,parity", marks=pytest.mark.slow),
        pytest.param(",".join(command.PARTS), marks=pytest.mark.exhaustive),
    ],
)
def test_parts_on_ranks(tmp_path: Path, parts: str) -> None:
    """As a user would run them. All take ten minutes on two cores that do nothing else; the limit is for a hang."""
    started = [sys.executable, "-m", "ddp_lab", "check-gpu", "--only", parts, "--output-dir", str(tmp_path / "out")]
    done = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert FAIL not in done.stdout and all(part in done.stdout for part in parts.split(","))

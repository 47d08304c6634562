"""The script that checks a rented machine: here over Gloo, so that it works on the day it counts."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from ddp_lab.gpu_check import check, command, proofs
from ddp_lab.gpu_check.page import page
from ddp_lab.gpu_check.parts import FAIL, MEASURED, PASS, ROOT, SKIPPED, Broken, Machine, Part, Verdict
from ddp_lab.runtime.share_gpu import PIPES
from tests.faults.scenarios import Outcome
from tests.gpu_check.pretended import Pretended
from tests.in_process import run_in_process


def machine(folder, ranks=2, gpus=0):
    return Machine(ranks, gpus, folder, is_quick=True)


def raising(error):
    def look(_):
        raise error

    return Part("broken", look)


def test_a_part_that_fails_stops_no_other(tmp_path, capsys):
    """And the page tells what a failed command said."""
    says = "print('an early error'); print(*range(90), sep='\\n'); print('last line'); raise SystemExit(1)"

    def fails(where):
        where.run_well("good", ["-c", "print('of no interest')"], limit_s=30)
        where.run_well("bad", ["-c", says], limit_s=30)
        return Verdict(PASS, "")

    whole = Part("whole", lambda _: Verdict(PASS, "fine", [{"choice": "a|b", "": PASS}]))
    errors = [Broken("not done after 3 s"), ZeroDivisionError("planted"), OSError("no disk")]
    assert check.check(machine(tmp_path), [*map(raising, errors), Part("commands", fails), whole]) == 1
    said, report = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    assert "FAIL      broken" in said and all(str(error) in said for error in errors) and "pass      whole" in said
    assert "| broken | FAIL |" in report and "| whole | pass | fine |" in report and "| a/b | pass |" in report
    assert "    an early error\n    ...\n" in report and "    89\n    last line\n" in report and "in look" in report
    assert "good.txt" not in report and report.count("bad.txt:") == 1


def test_a_command_that_takes_too_long_leaves_no_process(tmp_path):
    """Its children neither, in sessions of their own, as torchrun's ranks are."""
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    says = f"import subprocess as s; c = s.Popen({child}, start_new_session=True); print(c.pid, flush=True); c.wait()"
    with pytest.raises(Broken, match="not done"):
        machine(tmp_path).run("slow", ["-c", says], limit_s=2)
    pid, deadline = int((tmp_path / "slow.txt").read_text()), time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_gpu_that_torch_cannot_use(monkeypatch, tmp_path):
    def init():
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


class OneCard(Pretended):
    """It has no second device; what starts ranks must say that they share it."""

    def answer(self, log, command):
        assert "--share-gpu" in command, log
        if "collectives.py" in str(command):
            (self.folder / log / "reports" / "collectives").mkdir(parents=True)
            (self.folder / log / "reports" / "collectives" / "x_ranks.csv").write_text(
                "size_bytes,p50_us,busbw_gb_per_s\n4096,30,1\n"
            )
        if "strategies.py" in str(command):
            choice = command[command.index("--choices") + 1].split(",")[0]
            header = "choice,step_ms_median,ratio_median,ratio_p25,ratio_p75"
            Path(command[command.index("--csv") + 1]).write_text(f"{header}\n{choice},3,1.1,1.05,1.2\n")
        return '{"class": "ProcessGroupNCCL2", "nccl": "2.30.7", "simple_ddp": "pretended"}\n'


def test_two_ranks_on_one_card_do_every_part(tmp_path, monkeypatch):
    def properties(index):
        if index:
            raise AssertionError("Invalid device id")
        return SimpleNamespace(name="H100", total_memory=2**36, major=9, minor=0)

    def run_scenario(scenario, choice, folder):
        assert scenario.flags[-1:] == ("--share-gpu",) and not list(Path(os.environ[PIPES]).iterdir())
        return Outcome(1, 1.0, [], None, 0, [], [], "")

    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(proofs, "run_scenario", run_scenario)
    monkeypatch.setattr(proofs, "newest_record", lambda folder: {"train_loss": [1.0]})
    card = OneCard(2, 1, tmp_path, is_quick=True, shares_gpu=True)
    verdicts = {part.name: check.look(part, card) for part in check.parts(command.PARTS)}
    crashed = {name: one.line for name, one in verdicts.items() if "Error" in one.line}
    assert not crashed and verdicts["environment"].line.startswith("1 x H100") and PIPES not in os.environ
    assert {name for name, one in verdicts.items() if one.how == SKIPPED} == {"topology"}
    assert verdicts["originals"].how == MEASURED and page(card, verdicts, 1).startswith(
        "# GPU check\n\n2 ranks that share"
    )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param("environment,parity", marks=pytest.mark.slow),
        pytest.param(",".join(command.PARTS), marks=pytest.mark.exhaustive),
    ],
)
def test_parts_on_ranks(tmp_path, parts):
    """As a user would run them. All take ten minutes on two cores that do nothing else; the limit is for a hang."""
    started = [sys.executable, "-m", "ddp_lab", "check-gpu", "--only", parts, "--output-dir", str(tmp_path / "out")]
    started += ["--cpu", "--share-gpu", "2"]
    done = subprocess.run(started, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 ranks that share the CPU")
    assert FAIL not in done.stdout and all(part in done.stdout for part in parts.split(","))

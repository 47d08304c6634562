"""Threads of entrypoints wait for their turn."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.runtime.process import environment
from ddp_lab.runtime.process.environment import prepare_process
from tests.tables import each_row

ROOT = Path(__file__).resolve().parents[3]
of_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies are Linux's")


@of_linux
@pytest.mark.parametrize("gpu", [True, False])
def test_others_are_left_alone(monkeypatch, tmp_path, gpu):
    monkeypatch.delenv(environment.KINETO, raising=False)
    monkeypatch.setattr(environment, "OF_GPUS", [tmp_path] if gpu else [])
    policies = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda _, policy, __: policies.append(policy))
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    prepare_process()
    assert policies == ([] if gpu else [os.SCHED_BATCH])
    warning = 2  # the level at which libkineto says that CUPTI lacks a permission
    assert (int(os.environ[environment.KINETO]) <= warning) == gpu


@each_row(
    ("visible", "build", "sees_gpu"),
    [("0,1", "2.15.0", True), ("", "2.15.0", False), ("-1", "2.15.0", False), ("0", "2.15.0+cpu", False)],
)
def test_a_gpu_that_torch_does_not_see_is_none(monkeypatch, visible, build, sees_gpu):
    monkeypatch.setattr(environment, "OF_GPUS", [ROOT])
    monkeypatch.setattr(environment, "version", lambda _: build)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.sees_gpu() == sees_gpu


OF_A_THREAD = f"""
import os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from ddp_lab.runtime.process.environment import prepare_process, scheduling
prepare_process()
thread = threading.Thread(target=lambda: print(scheduling()))
thread.start()
thread.join()
"""


@pytest.mark.skipif(any(map(os.path.exists, environment.OF_GPUS)), reason="a GPU")
@of_linux
@pytest.mark.parametrize(("chosen", "expected"), [("SCHED_OTHER", "batch"), ("SCHED_IDLE", "idle")])
def test_threads_wait_for_their_turn(chosen, expected):
    """Not where the user has chosen a policy."""
    answer = subprocess.run(
        [sys.executable, "-c", OF_A_THREAD],
        preexec_fn=lambda: os.sched_setscheduler(0, getattr(os, chosen), os.sched_param(0)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout == f"{expected}\n", answer.stderr

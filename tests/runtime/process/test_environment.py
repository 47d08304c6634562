"""Entrypoints start themselves anew with glibc's allocator told to keep freed memory, and lose nothing by that; their
threads wait for their turn.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.runtime.process import environment
from ddp_lab.runtime.process.environment import (
    TUNABLES,
    VARIABLE,
    has_glibc,
    prepare_process,
    schedule_as_batch,
    scheduling,
)

ROOT = Path(__file__).resolve().parents[3]
needs_glibc = pytest.mark.skipif(
    not has_glibc() or any(map(os.path.exists, environment.OF_GPUS)), reason="glibc, and no GPU"
)
of_linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies are Linux's")
SCRIPT = f"""
import json, os, sys
print("started", file=sys.stderr)
sys.path.insert(0, {str(ROOT)!r})
from ddp_lab.runtime.process.environment import prepare_process
prepare_process()
print(json.dumps([os.getpid(), os.environ.get({VARIABLE!r}), sys.argv[1:], sys.flags.optimize, sys.stdin.read()]))
"""


@needs_glibc
@pytest.mark.parametrize(("preset", "expected", "starts"), [({}, TUNABLES, 2), ({VARIABLE: ""}, "", 1)])
def test_a_process_starts_anew_once(tmp_path: Path, preset: dict[str, str], expected: str, starts: int) -> None:
    """With its number, arguments, flags of the interpreter and what it reads; not where the user has set something."""
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE} | preset
    process = subprocess.Popen(
        [sys.executable, "-O", str(tmp_path / "script.py"), "--a", "b c"],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    answer, said = process.communicate("typed", timeout=60)
    assert json.loads(answer) == [process.pid, expected, ["--a", "b c"], 1, "typed"]
    assert said == "started\n" * starts


@of_linux
@pytest.mark.parametrize(("gpu", "library"), [(True, "glibc 2.36"), (False, "musl"), (False, None)])
def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, library: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(environment.KINETO, raising=False)
    monkeypatch.setattr(environment, "OF_GPUS", [tmp_path] if gpu else [])
    monkeypatch.setattr(os, "confstr", lambda name: library)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started anew"))
    asked: list[int] = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda _, policy, __: asked.append(policy))
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    prepare_process()
    assert VARIABLE not in os.environ
    assert asked == ([] if gpu else [os.SCHED_BATCH])
    warning = 2  # the level at which libkineto says that CUPTI lacks a permission
    assert (int(os.environ[environment.KINETO]) <= warning) == gpu


OF_A_THREAD = f"""
import os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from ddp_lab.runtime.process.environment import prepare_process, scheduling
prepare_process()
thread = threading.Thread(target=lambda: print(scheduling()))
thread.start()
thread.join()
"""


@needs_glibc
@of_linux
@pytest.mark.parametrize(("chosen", "expected"), [("SCHED_OTHER", "batch"), ("SCHED_IDLE", "idle")])
def test_threads_wait_for_their_turn(chosen: str, expected: str) -> None:
    """In the process that is started anew, too; but not where the user has chosen a policy."""
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    answer = subprocess.run(
        [sys.executable, "-c", OF_A_THREAD],
        env=variables,
        preexec_fn=lambda: os.sched_setscheduler(0, getattr(os, chosen), os.sched_param(0)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout == f"{expected}\n", answer.stderr


@of_linux
def test_where_policies_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may refuse; and where there are no policies, there is nothing to say."""

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    schedule_as_batch()
    assert scheduling() == "other"
    monkeypatch.setattr(os, "sched_getscheduler", refuse)
    schedule_as_batch()
    assert scheduling() is None
    monkeypatch.delattr(os, "SCHED_BATCH")
    schedule_as_batch()
    assert scheduling() is None

"""Entrypoints start themselves anew with glibc's allocator told to keep freed memory, and lose nothing by that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training import environment
from training.environment import TUNABLES, VARIABLE, has_glibc, keep_freed_memory

ROOT = Path(__file__).resolve().parent.parent
needs_glibc = pytest.mark.skipif(
    not has_glibc() or any(map(os.path.exists, environment.OF_GPUS)), reason="glibc, and no GPU"
)
SCRIPT = f"""
import json, os, sys
print("started", file=sys.stderr)
sys.path.insert(0, {str(ROOT)!r})
from training.environment import keep_freed_memory
keep_freed_memory()
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


@pytest.mark.parametrize(("gpu", "library"), [(True, "glibc 2.36"), (False, "musl"), (False, None)])
def test_others_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: bool, library: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(environment, "OF_GPUS", [tmp_path] if gpu else [])
    monkeypatch.setattr(os, "confstr", lambda name: library)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("started anew"))
    keep_freed_memory()
    assert VARIABLE not in os.environ

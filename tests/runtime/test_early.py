"""What is wrong with a command line is one line, before torch is imported; so is the first line of a run."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.runtime.early import cores_here, require_room
from ddp_lab.runtime.errors import UserError
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
TRY = """
import contextlib, io, json, os, sys
from unittest import mock
from ddp_lab.__main__ import main
rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
for arguments in json.loads(sys.argv[1]):
    for environ, flags in ((rank, arguments), ({}, [*arguments, "--ranks", "2"])):
        error = io.StringIO()
        with mock.patch.dict(os.environ, environ), contextlib.redirect_stderr(error):
            try:
                code = main(["train", *flags])
            except SystemExit as left:
                code = left.code
        assert "torch" not in sys.modules, arguments
        print(json.dumps([code, error.getvalue()]))
"""
BEGIN = """
import sys
from unittest import mock
from ddp_lab.commands import train
with mock.patch.object(train, "start_ranks", lambda label, ranks, started: print(started[-1])):
    train.main(sys.argv[1:])
assert "torch" not in sys.modules
"""
BAD = [
    (["zero9"], "unknown strategy 'zero9'"),
    (["zero3", "--max-step", "3"], "unknown argument '--max-step'"),
    (["zero3", "--overlap-optimizer", "--clip-grad-norm", "1"], "must be one or the other"),
    (["zero3", "--global-batch-size", "7"], "the nearest that does: 4 or 8"),
    (["zero3", "--mesh", "dp=3"], "3 ranks, and the job has 2"),
    (["zero3", "--profile-ranks", "5"], "there is no rank 5"),
    (["zero3", "--resume", "nothing"], "--resume: no checkpoint in nothing; leave --resume out"),
    (["zero3", "--resume"], "--resume: no checkpoint in checkpoints/zero3; leave"),
    (["zero3", "--workload", "nowhere.py:build"], "no file nowhere.py"),
    (["zero3", "--workload", "mine.py:bild"], "no function bild in it; it has build"),
    (["zero3", "--workload", "sample", "--model", "x"], "go with --workload hub or yelp"),
    (["zero3", "--model", "./nowhere", "--dataset", "two.csv"], "--model ./nowhere: no such folder"),
    (["zero3", "--dataset", "nowhere.csv"], "no such file or folder"),
    (["zero3", "--dataset", "header.csv"], "header.csv: the file is empty"),
    (["zero3", "--dataset", "empty.jsonl"], "empty.jsonl: the file is empty"),
    (["zero3", "--dataset", "./empty"], "./empty: the folder is empty"),
    (["zero3", "--output-dir", "two.csv"], "--output-dir two.csv: cannot write to"),
]


def python(script: str, folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", script, *arguments]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


def test_mistakes_are_one_line_before_torch(tmp_path: Path) -> None:
    """In a rank, and in the command that starts ranks."""
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    (tmp_path / "two.csv").write_text("text,label\na,b\n")
    (tmp_path / "header.csv").write_text("text,label\n\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "empty").mkdir()
    said = iter(map(json.loads, python(TRY, tmp_path, json.dumps([arguments for arguments, _ in BAD]))))
    for _, expected in BAD:
        for _ in ("a rank", "the command"):
            code, line = next(said)
            assert code == 2 and line.startswith("error: ") and line.count("\n") == 1 and expected in line, line


@each_row(
    "ranks, who, rest",
    [
        (1, f"1 rank on {cores_here()} cores loads", ""),
        (2, f"2 ranks on {cores_here()} cores load", ""),
        (3, f"3 ranks on {cores_here()} cores load", "; --global-batch-size is 6, since 8 does"),
        (8, f"8 ranks on {cores_here()} cores load", "; --global-batch-size is 16, since 8 does"),
    ],
)
def test_the_first_line_comes_before_torch(tmp_path: Path, ranks: int, who: str, rest: str) -> None:
    first, batch = python(BEGIN, tmp_path, "zero3", "--device", "cpu", "--ranks", str(ranks))
    assert first.startswith(f"zero3: {who} torch, to train workload sample on the CPU{rest}")
    assert batch == "8" or f"is {batch}, " in first


def test_what_a_machine_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"ranks on .* cores: must be at most"):
        require_room(17 * cores_here())
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (79, 79))
    with pytest.raises(UserError, match="each of 2 ranks may need 80; raise ulimit -n"):
        require_room(2)

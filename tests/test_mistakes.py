"""Each mistake of `mistakes.toml` is one line that says what is wrong, where, and what to do."""

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import ddp
from benchmarks import collectives, strategies
from ddp_lab import __main__ as door
from ddp_lab.runtime.flags import parse_config
from tests.in_process import run_in_process

ROOT = Path(__file__).parents[1]
GROUPS = tomllib.loads((ROOT / "tests" / "mistakes.toml").read_text())
PROGRAMS = {
    "ddp-lab": door,
    "main_ddp.py": SimpleNamespace(__name__="main_ddp", main=lambda flags: parse_config("", ddp.REGISTRY, (), flags)),
    "benchmarks/collectives.py": collectives,
    "benchmarks/strategies.py": strategies,
}


@pytest.mark.parametrize("name", GROUPS)
def test_each_mistake_is_one_line(name, tmp_path, monkeypatch):
    group = {"program": "ddp-lab", "command": "", "code": 2, "files": {}} | GROUPS[name]
    for path, content in group["files"].items():
        file = tmp_path / path
        (file if path.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
        if not path.endswith("/"):
            file.write_bytes(content.encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    lines = {flags: [*shlex.split(group["command"]), *shlex.split(flags)] for flags in group["says"]}
    if group.get("before_torch"):
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", TRY, json.dumps([*lines.values()])]
        of_process = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
        assert of_process.returncode == 0, of_process.stderr
        answers = [json.loads(line) for line in of_process.stdout.splitlines()]
    else:
        nobody = mock.Mock(side_effect=AssertionError("it trains"))
        with mock.patch("ddp_lab.sweep.passes.start_ranks", nobody):
            runs = [run_in_process(PROGRAMS[group["program"]], *line) for line in lines.values()]
        answers = [[(run.returncode, run.stdout * (not group.get("prints")), run.stderr)] for run in runs]
    wrong = []
    for (flags, words), outputs in zip(group["says"].items(), answers, strict=True):
        for code, out, error in outputs:
            line = error.removeprefix("loading torch\n")
            is_line = line.startswith("error: ") and line.count("\n") == 1
            if code != group["code"] or out or not is_line or words not in line:
                wrong.append(f"{group['command']} {flags}: {code} {out}{error}")
    assert not wrong, "\n".join(wrong)


TRY = """
import contextlib, io, json, os, sys
from unittest import mock
from ddp_lab.__main__ import main
from ddp_lab.commands import train
train.start_ranks = None
rank = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
for line in json.loads(sys.argv[1]):
    outputs = []
    for environ, flags in ((rank, []), ({}, ["--ranks", "2"])):
        out, error = io.StringIO(), io.StringIO()
        with mock.patch.dict(os.environ, environ), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                code = main([*line, *flags])
            except SystemExit as stop:
                code = stop.code
        assert "torch" not in sys.modules, line
        outputs.append((code, out.getvalue(), error.getvalue()))
    print(json.dumps(outputs))
"""
"""In a process of its own: what a rank says, and the command that starts ranks."""

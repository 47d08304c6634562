"""The first line of a run comes before torch is imported. Mistakes, too: `tests/test_mistakes.py`."""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_lab.runtime.entrypoint import cores_here, require_room
from ddp_lab.runtime.errors import UserError

ROOT = Path(__file__).parents[2]
BEGIN = """
import sys
from unittest import mock
from ddp_lab.commands import train
with mock.patch.object(train, "start_ranks", lambda config, ranks, registry: print(config.global_batch_size)):
    for ranks in "138":
        train.main(["zero3", "--device", "cpu", "--ranks", ranks])
assert "torch" not in sys.modules
"""


def test_the_first_line_comes_before_torch(tmp_path):
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEGIN]
    answer = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    one_rank, default, three, six, eight, sixteen = answer.stdout.splitlines()
    cores, about = f"{cores_here()} cores", "torch, to train workload sample on the CPU"
    assert (one_rank, default) == (f"zero3: 1 rank on {cores} loads {about}", "8")
    for line, ranks, batch in ((three, 3, six), (eight, 8, sixteen)):
        assert line.startswith(
            f"zero3: {ranks} ranks on {cores} load {about}; --global-batch-size is {batch}, since 8 does"
        )
    assert (six, sixteen) == ("6", "16")


def test_an_older_python_is_told():
    """Whatever runs before that must be Python 3.10's."""
    mains = [ROOT / f"main_{name}.py" for name in ("ddp", "shard", "parallel")]
    for path in (*mains, *(ROOT / room / "__init__.py" for room in ("ddp", "sharding", "tensor_parallel", "ddp_lab"))):
        ast.parse(path.read_text(), feature_version=(3, 10))
    for path in mains:
        script = f"import runpy, sys; sys.version_info = (3, 10); runpy.run_path({path.name!r})"
        answer = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
        line = "error: ddp-lab needs Python 3.11 to 3.13, and this is 3.10\n"
        assert (answer.returncode, answer.stderr) == (1, line)


def test_what_a_machine_cannot_hold_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"ranks on .* cores: must be at most"):
        require_room(17 * cores_here())
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (79, 79))
    with pytest.raises(UserError, match="each of 2 ranks may need 80; raise ulimit -n"):
        require_room(2)

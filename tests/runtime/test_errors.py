"""What `torchrun` learns of a failure, and which rank prints it."""

import subprocess
import sys
import time

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ddp_lab.runtime.errors import ERROR_FILE, speaks_for_node, tell_torchrun

LINE = "error: flat_ddp: rank 1 was killed in step 3"


def become(monkeypatch, folder, rank):
    """Be a rank under `torchrun`; the path of its error file."""
    path = folder / "attempt_0" / str(rank) / "error.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setenv(ERROR_FILE, str(path))
    monkeypatch.setenv("RANK", str(rank))
    return path


def test_the_root_cause_is_the_line_of_the_rank_that_knows(monkeypatch, tmp_path):
    """Although `torchrun` notices first that rank 1 was killed."""
    began_s = time.time()
    killed = ProcessFailure(local_rank=1, pid=1, exitcode=-9, error_file=str(tmp_path / "none"))
    path = become(monkeypatch, tmp_path, rank=0)
    tell_torchrun(LINE, began_s)
    tell_torchrun("error: what came of it")
    failed = ProcessFailure(local_rank=0, pid=2, exitcode=1, error_file=str(path))
    summary = str(ChildFailedError("main_ddp.py", {1: killed, 0: failed}))
    assert summary.splitlines()[-2] == f"  traceback : {LINE}" and "what came of it" not in summary


LEAVES = """
from ddp_lab.runtime.cli import exit_with_error
exit_with_error("a mistake")
"""
NOBODY_FAILS = """
from ddp_lab.runtime.errors import leave_as_one
leave_as_one("error: a mistake", 1, fails=False)
"""


def test_one_rank_of_a_node_fails_for_all(monkeypatch, tmp_path):
    """Unless none would."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    codes = {}
    for script, ranks in ((LEAVES, 3), (NOBODY_FAILS, 1)):
        begun = []
        for rank in range(ranks):
            become(monkeypatch, tmp_path / str(ranks), rank)
            begun.append(subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True))
        codes[script] = sorted(process.wait(timeout=20) for process in begun)
        lines = [process.stderr.read() for process in begun if process.stderr]
        assert sorted(filter(None, lines)) == ["error: a mistake\n"] * (script == LEAVES)
        assert len(list((tmp_path / str(ranks)).rglob("error.json"))) == 1
    assert codes == {LEAVES: [0, 0, 2], NOBODY_FAILS: [1]}


def test_the_first_rank_of_a_node_speaks(monkeypatch, tmp_path):
    """Not always rank 0: `torchrun` stops it if another rank fails before it."""
    spoken = []
    for rank in (1, 0, 2):
        become(monkeypatch, tmp_path, rank)
        spoken.append(speaks_for_node())
    assert spoken == [True, False, False]
    monkeypatch.delenv(ERROR_FILE)
    assert not speaks_for_node()
    monkeypatch.setenv("RANK", "0")
    assert speaks_for_node()

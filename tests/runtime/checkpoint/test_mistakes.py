"""What can go wrong with checkpoints. Each mistake is answered with one line, the same on every rank."""

import resource
import shutil
import signal
from pathlib import Path

import pytest

from ddp_lab.runtime.checkpoint.saver import Saver
from ddp_lab.runtime.errors import UserError
from tests.checkpoints import error_of, here, losses, train_to
from tests.ranks import RankPool
from tests.tables import each_row

CHOICE = "zero2"


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(2, losses, CHOICE, 4, folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """Checkpoints that a test may damage."""
    shutil.copytree(saved, tmp_path / "saved")
    return tmp_path / "saved"


def message_of(ranks: RankPool, folder: Path | None, last: int = 6, **changes) -> str:
    """The line that a run up to step `last` ends with, the same on all ranks; empty if it ends well."""
    (message,) = set(ranks.run(2, error_of, CHOICE, last, folder, changes))
    assert "\n" not in message
    return message


def test_nothing_to_resume_from(ranks: RankPool, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for into, resume, expected in (
        (tmp_path / "empty", "latest", f"no complete checkpoint in {tmp_path / 'empty'}; leave --resume out"),
        (tmp_path / "never", "latest", "no complete checkpoint"),
        (None, str(tmp_path / "missing"), "missing is no checkpoint: no such folder"),
        (None, str(tmp_path / "empty"), "it has no manifest.json"),
        (None, str(folder / "step_00000004/manifest.json"), "is no checkpoint: no such folder"),
    ):
        assert expected in message_of(ranks, into, resume=resume)


def test_damaged(ranks: RankPool, folder):
    """A named one is refused. If the latest is damaged, the one before is used, and the damaged one is replaced."""
    path = folder / "step_00000004" / "rank_1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    damaged = message_of(ranks, None, resume=str(folder / "step_00000004"))
    assert "step_00000004 is damaged: rank_1.safetensors is damaged: its checksum differs" in damaged
    assert ranks.run(2, losses, CHOICE, 6, folder, "latest")[0][:4] == ranks.run(2, losses, CHOICE, 4, None)[0]
    assert message_of(ranks, None, resume=str(folder / "step_00000004")) == ""
    for step in (2, 4, 6):
        (folder / f"step_{step:08d}" / "manifest.json").write_bytes(b"{")
    assert "no complete checkpoint" in message_of(ranks, folder, resume="latest")


def test_another_training(ranks: RankPool, saved):
    text = message_of(ranks, None, resume=str(saved), workload="sample", global_batch_size=6, lr=0.5)
    assert "--workload was mlp and is sample; --global-batch-size was 8 and is 6; --lr was 0.01 and is 0.5" in text


def test_checkpoints_are_not_mixed(ranks: RankPool, folder, tmp_path):
    fresh = message_of(ranks, folder)
    assert f"{folder} holds checkpoints of an earlier run, the newest of step 4; resume from it with --resume" in fresh
    older = message_of(ranks, folder, resume=str(folder / "step_00000002"))
    assert "holds a checkpoint of step 4 that this run does not resume from; remove it, or" in older
    assert message_of(ranks, tmp_path / "new", resume=str(folder / "step_00000002")) == ""
    assert message_of(ranks, folder, resume=str(folder)) == ""


def test_one_run_at_a_time_saves_into_a_folder(ranks: RankPool, tmp_path):
    ranks.run(1, lock_twice, tmp_path / "locked")


def lock_twice(folder: Path):
    first = Saver(folder, here(), in_background=False, keep=None)
    with pytest.raises(UserError, match="another run is saving checkpoints in"):
        Saver(folder, here(), in_background=False, keep=None)
    first.close()
    Saver(folder, here(), in_background=False, keep=None).close()


def full_disk(folder: Path, in_background: bool) -> tuple[str, str]:
    """Save after steps 2 and 4. From then on rank 1 can write nothing, until a second try."""
    train_to(CHOICE, 4, folder, checkpoint_async=in_background)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if here().rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        message = error_of(CHOICE, 8, folder, {"resume": "latest", "checkpoint_async": in_background})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    return message, error_of(CHOICE, 8, folder, {"resume": "latest"})


@each_row("in_background", [False, True])
def test_full_disk(ranks: RankPool, tmp_path, in_background):
    """The save fails with an error, earlier checkpoints stay, and the run resumes once there is room again."""
    for message, later in ranks.run(2, full_disk, tmp_path, in_background):
        expected = f"rank 1: step 6: cannot save a checkpoint in {tmp_path}: File too large; earlier ones are kept"
        assert message == expected and later == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", *(f"step_{s:08d}" for s in (2, 4, 6, 8))]

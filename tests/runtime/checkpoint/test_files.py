"""What is on disk, without strategies: ranges, files cut off or altered at any place, kills between any two operations,
and planted files."""

import contextlib
import itertools
import json
import os
import pickle
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from ddp_lab.runtime.checkpoint.files import DTYPES, TensorFiles, write_tensors
from ddp_lab.runtime.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    TensorInfo,
    _checksum,
    checkpoints_in,
    file_name,
    folder_name,
    read_manifest,
    remove_unfinished,
    verify_files,
    write_manifest,
)
from ddp_lab.runtime.checkpoint.origin import complete, find_origin, newest_complete, require_same_model
from ddp_lab.runtime.checkpoint.saver import Saver
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import gather_objects
from ddp_lab.strategy.account import cover, share
from tests.checkpoints import here
from tests.damage import DAMAGE, damaged_bytes
from tests.parity import message_of
from tests.ranks import RankPool
from tests.tables import each_row

INFO = {"bytes": 1, "crc32": 0}
LENGTHS = st.lists(st.integers(0, 40), max_size=8)
CUTS = st.lists(st.integers(0, 60), max_size=12)


@given(LENGTHS, st.integers(1, 7), CUTS, CUTS, st.randoms())
def test_any_cut_into_ranges_is_put_together_by_any_other(lengths, size, written, read, order):
    """And ranks share each element once."""
    parts = [share(lengths, rank, size) for rank in range(size)]
    elements = [(part.number, element) for parts in parts for part in parts for element in range(part.start, part.end)]
    assert elements == [(index, element) for index, length in enumerate(lengths) for element in range(length)]
    counts = [sum(part.end - part.start for part in parts) for parts in parts]
    assert max(counts) - min(counts) <= 1
    ranges = list(itertools.pairwise([0, *sorted(written), 60]))
    order.shuffle(ranges)
    for start, end in itertools.pairwise([0, *sorted(read), 60]):
        reads = [ranges[index][0] + e for index, first, last in cover(ranges, start, end) for e in range(first, last)]
        assert reads == [*range(start, end)]
    for start in (0, 19):
        with pytest.raises(ValueError, match=f"element {start} of 40"):
            cover([(0, start), (start + 3, 40)], 0, 40)


def test_files_are_safetensors(tmp_path):
    tensors = {f"x/{n}": torch.arange(n).to(dtype) for n, dtype in enumerate(DTYPES)} | {"matrix": torch.eye(3)[:, :2]}
    tensors |= {"strides of 0": torch.ones(()).expand(1), "offset": torch.arange(9.0)[4:7]}
    info = write_tensors(tmp_path / "file", tensors, {"said": "so"})
    content = (tmp_path / "file").read_bytes()
    assert (info.bytes, info.crc32) == (len(content), zlib.crc32(content))
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert loaded[key].dtype == tensor.dtype and torch.equal(loaded[key], tensor), key


# A checkpoint without a strategy -------------------------------------------------------------------------------------


def manifest(step: int, **changes) -> Manifest:
    plain: dict[str, Any] = {"step": step, "choice": "zero3", "world_size": 2, "data_parallel_size": 2}
    plain |= {"run_id": "a run", "config": {"lr": 0.1}, "optimizer": "AdamW", "buffers": {}, "cuts": {}}
    plain |= {"parameter_groups": [{"lr": 0.1}], "parameters": {"weight": TensorInfo([6], "float32", True)}}
    plain |= {"train_loss": [0.5] * step, "step_samples": [8] * step, "step_time_s": [None] * step}
    return Manifest(**plain | changes)


def alone(step: int) -> Manifest:
    """Of a run on one rank."""
    return manifest(step, world_size=1, data_parallel_size=1)


def make_checkpoint(folder: Path, step: int, **changes) -> Path:
    path = folder / folder_name(step)
    path.mkdir(parents=True)
    files = {}
    for rank in range(2):
        tensors = {f"parameter/weight/{3 * rank}": torch.full((3,), float(step))}
        files[file_name(rank)] = write_tensors(path / file_name(rank), tensors, {})
    write_manifest(path, manifest(step, **{"files": files, **changes}))
    return path


def problem_in(path: Path) -> str:
    """The error that reading a checkpoint raises; empty if none. Anything but a UserError fails the test."""
    try:
        manifest_read = read_manifest(path)
        verify_files(path, manifest_read, 0, 1)
        TensorFiles([path / name for name in manifest_read.files])
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


@given(DAMAGE)
def test_any_damage_to_bytes_is_named(tmp_path_factory, chance):
    path = make_checkpoint(tmp_path_factory.mktemp("damaged"), 3)
    name = chance.choice((MANIFEST, file_name(0), file_name(1)))
    original = (path / name).read_bytes()
    (path / name).write_bytes(damaged := damaged_bytes(original, chance))
    is_same = original.split() == damaged.split() or (name == MANIFEST and json.loads(original) == parsed(damaged))
    assert name in problem_in(path) or is_same
    (path / name).unlink()
    assert name in problem_in(path)


def parsed(content: bytes):
    try:
        return json.loads(content)
    except ValueError:
        return None


def newest_after(folder: Path, damage: list[tuple[str, bytes]]) -> list[tuple[int, int]]:
    """On a rank, after each damage: the step of the newest complete checkpoint, and how many were skipped."""
    origins = []
    for name, content in damage:
        original = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        origin = newest_complete(folder)
        origins.append((origin.manifest.step, len(origin.skipped)))
        (folder / name).write_bytes(original)
    return origins


def test_the_newest_complete_one_is_used(ranks: RankPool, tmp_path):
    """Neither damaged ones, nor unfinished ones."""
    for step in (2, 4):
        make_checkpoint(tmp_path, step)
    (tmp_path / ".step_00000006.saving").mkdir()
    (tmp_path / "step_x").mkdir()
    name = "step_00000004/manifest.json"
    original = (tmp_path / name).read_bytes()
    damage = [(name, original), (name, original[:-9]), (name, b""), ("step_00000004/rank_1.safetensors", b"")]
    assert ranks.run(1, newest_after, tmp_path, damage) == [[(4, 0), (2, 1), (2, 1), (2, 1)]]


class Killed(BaseException):
    """Stands for a SIGKILL, which no code can catch."""


@contextlib.contextmanager
def before_each_operation(act: Callable[[int, Callable[..., Any], Any], None]) -> Iterator[Callable[[], int]]:
    """Within this context `act` is called before each operation on disk, with its number, itself and its argument.
    Yields the number of operations so far."""
    count = 0

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args, **kwargs):
            nonlocal count
            count += 1
            act(count, original, args[0])
            return original(*args, **kwargs)

        return wrapper

    operations = [(os, name) for name in ("open", "fsync")] + [(shutil, "rmtree")]
    operations += [(Path, name) for name in ("open", "replace", "rename", "unlink", "mkdir")]
    with contextlib.ExitStack() as stack:
        for owner, name in operations:
            stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
        yield lambda: count


def killed_at(operation: int) -> contextlib.AbstractContextManager[Callable[[], int]]:
    """Within this context nothing changes on disk from the given operation on."""
    remove_tree = shutil.rmtree

    def act(number: int, original: Callable[..., Any], path):
        if number < operation:
            return
        if original is remove_tree and number == operation:  # it takes a while, so a part of it is done
            for file in sorted(Path(path).iterdir())[1:]:
                os.truncate(file, 0)
        raise Killed

    return before_each_operation(act)


def save_until_killed(folder: Path) -> list[Any]:
    """On a rank: save step 4 beside step 2, killed at each operation in turn; what is found afterwards."""
    origins = []
    for operation in range(1, 100):
        saver = Saver(folder, here(), in_background=False, keep=1)
        saver.save({"parameter/weight/0": torch.full((6,), 2.0)}, {}, alone(2))
        with killed_at(operation) as count:
            try:
                saver.save({"parameter/weight/0": torch.full((6,), 4.0)}, {}, alone(4))
                is_done = True
            except Killed:
                is_done = False
            operations = count()
        saver.close()
        assert all(complete(path) for _, path in checkpoints_in(folder)), "no part has a final name"
        origin = newest_complete(folder)
        assert not origin.skipped
        value = TensorFiles([origin.path / name for name in origin.manifest.files]).read("parameter/weight", 0, 6)
        origins.append((origin.manifest.step, value.tolist() == [float(origin.manifest.step)] * 6))
        shutil.rmtree(folder / folder_name(4), ignore_errors=True)
        if is_done:
            return [origins, operations]
    raise AssertionError("it never ends")


def test_killed_between_any_two_operations(ranks: RankPool, tmp_path):
    """There is always a complete checkpoint: the old one until the new one is complete."""
    ((origins, operations),) = ranks.run(1, save_until_killed, tmp_path)
    assert len(origins) == operations + 1 > 10
    assert all(right for _, right in origins)
    steps = [step for step, _ in origins]
    assert steps == sorted(steps) and set(steps) == {2, 4}


LATE_S, POLL_S = 0.05, 0.002
"""`LATE_S` is longer than rank 0 takes to finish a checkpoint, for which it polls and writes a few files."""


def save_with_a_late_rank(folder: Path) -> int:
    """On a rank: save once without a delay, and once for each rank and operation that is late. The number of saves."""
    saver, rank = Saver(folder, here(), in_background=False, keep=1), here().rank

    def save(step: int, late: int) -> int:
        polls = mock.patch("ddp_lab.runtime.checkpoint.saver.POLL_S", POLL_S)
        with polls, before_each_operation(lambda number, *_: time.sleep(LATE_S) if number == late else None) as count:
            tensors = {f"parameter/weight/{3 * rank}": torch.full((3,), float(step))}
            saver.save(tensors, {}, manifest(step))
            return count()

    operations = gather_objects(save(1, late=0))
    delays = [(late, operation) for late in (0, 1) for operation in range(1, operations[late] + 1)]
    for step, (late, operation) in enumerate(delays, start=2):
        save(step, operation if rank == late else 0)
    saver.close()
    return len(delays) + 1


def test_a_rank_that_is_late_at_any_operation_of_a_save(ranks: RankPool, tmp_path):
    """Neither rank touches a folder that the other has renamed."""
    last, steps = ranks.run(2, save_with_a_late_rank, tmp_path)
    assert last == steps > 20
    assert [path.name for path in tmp_path.glob("*step*")] == [folder_name(last)]
    assert problem_in(tmp_path / folder_name(last)) == ""


def save_what_changes(folder: Path) -> list[float]:
    """On a rank: what is stored of a weight that the next step changes before it is written."""
    weight, may_write = torch.ones(3), threading.Event()

    def late(*args):
        may_write.wait()
        return write_tensors(*args)

    saver = Saver(folder, here(), in_background=True, keep=None)
    with mock.patch("ddp_lab.runtime.checkpoint.saver.write_tensors", late):
        saver.save({"parameter/weight/0": weight}, {}, alone(2))
        weight.zero_()
        may_write.set()
        saver.settle()
    saver.close()
    return TensorFiles([folder / folder_name(2) / file_name(0)]).read("parameter/weight", 0, 3).tolist()


def test_a_save_in_the_background_has_the_values_of_its_step(ranks: RankPool, tmp_path):
    assert ranks.run(1, save_what_changes, tmp_path) == [[1.0] * 3]


# Planted files -------------------------------------------------------------------------------------------------------


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_no_pickle_is_loaded(tmp_path):
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(sprung))
    path = make_checkpoint(tmp_path, 2)
    for name in ("data.pkl", ".metadata", "__0_0.distcp", "rank_0.pt", "rank_2.safetensors"):
        (path / name).write_bytes(trap)
    assert problem_in(path) == ""
    (path / file_name(1)).write_bytes(trap)
    assert "rank_1.safetensors has" in problem_in(path)
    files = json.loads((path / MANIFEST).read_bytes())["files"]
    rewrite(path, files=files | {file_name(1): {"bytes": len(trap), "crc32": zlib.crc32(trap)}})
    assert "rank_1.safetensors is no safetensors file" in problem_in(path)
    (path / MANIFEST).write_bytes(trap)
    assert "manifest.json cannot be understood" in problem_in(path)
    assert not sprung.exists()
    pickle.loads(trap)
    assert sprung.exists(), "the trap does not work"


def rewrite(path: Path, **changes):
    """Alter fields of a manifest, and make its checksum right again. None: remove the field."""
    content = json.loads((path / MANIFEST).read_bytes()) | changes
    removed = ["crc32", *(name for name, value in changes.items() if value is None)]
    content = {name: value for name, value in content.items() if name not in removed}
    (path / MANIFEST).write_text(json.dumps(content | {"crc32": _checksum(content)}))


@each_row(
    "changes, expected",
    [
        ({"files": {"../secret": INFO, file_name(0): INFO}}, "files: they are not those of 2 ranks, but ../secret;"),
        ({"step": 7}, "step: its lists are not as long"),
        ({"format": 1}, f"of format 1, but this program reads format {FORMAT}"),
    ],
)
def test_altered_manifests(tmp_path, changes, expected):
    path = make_checkpoint(tmp_path, 2)
    rewrite(path, **changes)
    assert expected in problem_in(path)


def test_links_are_not_followed(tmp_path):
    path = make_checkpoint(tmp_path, 2)
    for name in (file_name(0), MANIFEST):
        (path / name).rename(tmp_path / name)
        (path / name).symlink_to(tmp_path / name)
        assert f"{name} is a symbolic link" in problem_in(path)
        (path / name).unlink()
        (tmp_path / name).rename(path / name)
    assert problem_in(path) == ""


def refused_at_the_start(folder: Path) -> list[str]:
    """On a rank: what each way to begin a run with checkpoints in a folder says."""
    config = RunConfig(choice="x", checkpoint_every=1, checkpoint_dir=str(folder))
    return [message_of(UserError, find_origin, config.but(resume=way)) for way in (None, "latest", "auto", str(folder))]


@each_row("kind", ["a symbolic link", "a symbolic link to nothing", "a file"])
def test_what_stands_in_the_way_of_a_later_save(ranks: RankPool, tmp_path, kind):
    """It is named when the run begins. What a killed run left goes, but not what a link points to."""
    folder, target = tmp_path / "folder", make_checkpoint(tmp_path, 4)
    folder.mkdir()
    for name in (folder_name(4), f".{folder_name(4)}.saving"):
        if kind == "a file":
            (folder / name).touch()
        else:
            (folder / name).symlink_to(tmp_path / "nothing" if "nothing" in kind else target)
    for message in ranks.run(1, refused_at_the_start, folder)[0]:
        assert f"{folder / folder_name(4)} has the name of a checkpoint, but is {kind[:15]}" in message
    remove_unfinished(folder)
    assert [path.name for path in folder.iterdir()] == [folder_name(4)] and problem_in(target) == ""


def test_another_model_or_optimizer():
    stored = manifest(1, parameters={name: TensorInfo([2], "float32", True) for name in "abcde"})
    parameters = dict(stored.parameters)
    require_same_model(stored, stored)
    for changed, expected in (
        (
            parameters | {"a": TensorInfo([3], "float32", True)},
            r"a is \(2,\) float32 that trains there and \(3,\) float32",
        ),
        (parameters | {"a": TensorInfo([2], "bfloat16", True)}, "bfloat16 that trains here"),
        (parameters | {"a": TensorInfo([2], "float32", False)}, "and \\(2,\\) float32 here"),
        (parameters | {"f": TensorInfo([2], "float32", True)}, "it lacks f"),
        ({}, "it has a, which the model lacks; it has b, .*; and 2 more"),
    ):
        with pytest.raises(UserError, match=expected):
            require_same_model(stored, manifest(1, parameters=changed))
    with pytest.raises(UserError, match="of optimizer AdamW, and this run's is SGD"):
        require_same_model(stored, manifest(1, parameters=parameters, optimizer="SGD"))

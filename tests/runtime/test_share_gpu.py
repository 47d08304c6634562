"""Ranks that share a GPU: who may, and the multi-process service that begins and ends with them."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_lab.runtime import share_gpu
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks, joined_ranks, meshed
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh, MeshGroups
from tests.tables import each_row

CONTROL = """#!/bin/sh
folder=${{CUDA_MPS_PIPE_DIRECTORY:-{default}}}
if [ "$1" = -d ]; then
    echo "start, GPUs ${{CUDA_VISIBLE_DEVICES:-all}}" >> {log}
    {starts} && touch $folder/control || echo refused
else
    read order
    [ -e $folder/control ] || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
    [ $order = get_server_list ] || {{ echo $order >> {log}; rm $folder/control; }}
fi
"""


class Node:
    """A node whose `nvidia-cuda-mps-control` is a script. `users`: the folder of a service that the user has."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, starts: str = "true", probe: str = "") -> None:
        self.log, self.users, self.temporary = folder / "log", folder / "users", folder / "tmp"
        for new in (self.users, self.temporary):
            new.mkdir()
        program = folder / "bin" / share_gpu.CONTROL
        program.parent.mkdir()
        program.write_text(CONTROL.format(default=self.users, log=self.log, starts=starts))
        program.chmod(0o755)
        patch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        patch.setattr("tempfile.tempdir", str(self.temporary))
        patch.setattr(share_gpu, "PROBE", probe)
        self.store = folder / "store"

    @property
    def said(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def begin(self) -> tuple[str, str | None]:
        turns = share_gpu.begin(dist.FileStore(str(self.store), 2), over_nccl=False)
        assert os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        return turns, os.environ.get(share_gpu.PIPES)


@contextmanager
def two_ranks(body: Callable[[], Any]) -> Iterator[tuple[list[Any], list[Any]]]:
    """What `body` returns on both, and the processes, which then wait to be ended."""
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(rank, theirs, body)))
        processes[-1].start()
        pipes.append(ours)
    try:
        yield [pipe.recv() if pipe.poll(60) else "nothing" for pipe in pipes], processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def serve(rank: int, pipe: Connection, body: Callable[[], Any]) -> None:
    os.setpgrp()  # launchers end a rank with its process group
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        pipe.send(body())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    signal.pause()


def await_true(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not (held := holds()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_service_begins_and_ends_with_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: signal.Signals
) -> None:
    node = Node(tmp_path, monkeypatch)
    with two_ranks(node.begin) as (found, ranks):
        (folder,) = node.temporary.iterdir()
        assert found == [("", str(folder))] * 2 and (folder / "control").exists()
        os.killpg(ranks[0].pid, end)
        ranks[0].join()
        time.sleep(0.5)
        assert (folder / "control").exists(), "a rank still lives"
        os.killpg(ranks[1].pid, end)
        assert await_true(lambda: not folder.exists())
    assert node.said == ["start, GPUs all", "quit"]


@each_row(
    "starts, probe, users, given, expected",
    [
        ("false", "", False, False, ("nvidia-cuda-mps-control does not start: refused", None)),
        ("true", "raise SystemExit('no')", False, False, ("nvidia-cuda-mps-control does not start: no", None)),
        ("true", "", True, False, ("", None)),
        ("true", "", True, True, ("", "USERS")),
        ("true", "", False, True, ("no service answers in CUDA_MPS_PIPE_DIRECTORY=USERS", "USERS")),
    ],
)
def test_a_service_of_the_user_is_left_alone_and_without_one_ranks_take_turns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    starts: str,
    probe: str,
    users: bool,
    given: bool,
    expected: tuple[str, str | None],
) -> None:
    monkeypatch.setattr(share_gpu, "START_S", 0.2)
    node = Node(tmp_path, monkeypatch, starts, probe)
    if users:
        (node.users / "control").touch()
    if given:
        monkeypatch.setenv(share_gpu.PIPES, str(node.users))
    with two_ranks(node.begin) as (found, _):
        assert found == [tuple(one and one.replace("USERS", str(node.users)) for one in expected)] * 2
    assert await_true(lambda: not list(node.temporary.iterdir()))
    assert (node.users / "control").exists() == users
    assert not (users or given) or node.said == []


NO_SERVICE = "nvidia-cuda-mps-control is not here"


@each_row(
    "nccl, modes, turns, expected",
    [
        ((2, 30, 3), [("0", "Default", "[N/A]")], "", ""),
        (None, [], NO_SERVICE, ""),
        ((2, 28, 9), [], "", "NCCL is 2.28.9 here, and takes several ranks on a GPU from 2.30.3 on"),
        ((2, 30, 7), [("0", "Default", "Disabled"), ("1", "Default", "Enabled")], "", "GPU 1 is cut into parts (MIG)"),
        ((2, 30, 7), [("0", "Exclusive_Process", "Disabled")], "", ""),
        (
            (2, 30, 7),
            [("0", "Exclusive_Process", "Disabled")],
            NO_SERVICE,
            f"(without the multi-process service: {NO_SERVICE}); nvidia-smi -i 0 -c DEFAULT",
        ),
        ((2, 30, 7), [("0", "Prohibited", "Disabled")], "", "GPU 0 is in compute mode Prohibited"),
    ],
)
def test_what_cannot_be_shared_is_refused(nccl: Any, modes: Any, turns: str, expected: str) -> None:
    found = share_gpu.problem(nccl, modes, turns)
    assert expected in found and "\n" not in found and bool(expected) == bool(found)


def test_nvidia_smi_is_asked_for_the_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$2, Exclusive_Process, [N/A]"\necho "Failed to initialize NVML"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert share_gpu.gpu_modes() == [["1", "Exclusive_Process", "[N/A]"]]


@each_row(
    "gpus, flags, expected, said",
    [
        (1, {"share_gpu": True, "backend": "gloo"}, ("cuda:0", "2 ranks a GPU, in turns"), f"({NO_SERVICE}; an all-r"),
        (1, {"backend": "gloo"}, ("cuda:0", "2 ranks a GPU"), "2 ranks a GPU: step times tell about overlap"),
        (2, {"share_gpu": True, "backend": "gloo"}, ("cuda:1", None), "--share-gpu: each rank has a GPU of its own"),
        (0, {"share_gpu": True}, ("cpu", None), "--share-gpu: no GPU here; ranks share the CPU anyway"),
        (1, {"share_gpu": True}, "--share-gpu: NCCL is 2.28.9 here", ""),
        (
            1,
            {},
            "NCCL takes one rank a GPU; start one rank on its node, show each rank another GPU, or use --share",
            "",
        ),
    ],
)
def test_the_first_line_says_who_shares_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    gpus: int,
    flags: dict[str, Any],
    expected: tuple[str, str | None] | str,
    said: str,
) -> None:
    """GPUs that only have names, and no programs of NVIDIA's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        around = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**around, "MASTER_PORT": str(free.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=str(device)))
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))

    def join() -> tuple[str, str | None]:
        with joined_ranks(RunConfig.of(**flags)) as ranks:
            return str(ranks.device), ranks.gpu_sharing

    with two_ranks(join) as (found, _):
        assert expected == found[1] if isinstance(expected, tuple) else all(expected in one for one in found), found
    assert said in capfd.readouterr().out


@each_row(
    "mesh, backend, sharing, refused",
    [
        ("dp=2,tp=2", "nccl", "4 ranks a GPU", True),
        ("replicate=2,shard=2", "nccl-legacy", "2 ranks a GPU, side by side", True),
        ("dp=1,tp=4", "nccl", "4 ranks a GPU", False),
        ("dp=2,tp=2", "nccl", None, False),
        ("dp=2,tp=2", "gloo", "4 ranks a GPU", False),
    ],
)
def test_groups_of_some_ranks_hang_on_a_shared_gpu(mesh: str, backend: str, sharing: str | None, refused: bool) -> None:
    ranks = Ranks(1, 4, torch.device("cuda"), backend, gpu_sharing=sharing)
    said = "--share-gpu: over NCCL, groups of some of the ranks were seen hanging" if refused else "join the process"
    with pytest.raises(UserError if refused else AssertionError, match=said), meshed(ranks, mesh):
        pass


def test_no_part_of_tp_is_made_where_parts_hang() -> None:
    groups: Any = dict.fromkeys(("device_mesh", "data", "model", "tensor", "context", "everyone"))
    with pytest.raises(UserError, match="they hang"):
        MeshGroups(Mesh.parse("tp=4"), **groups, no_parts="they hang").part_of_tensor(2)

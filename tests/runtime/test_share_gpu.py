"""Ranks that share a GPU: who may, and what is said. GPUs only have names here, and no program of NVIDIA's is found."""

import multiprocessing
import os
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ddp_lab.runtime import share_gpu
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext, joined_ranks, meshed
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh, MeshGroups
from tests.tables import each_row

NO_SERVICE = "nvidia-cuda-mps-control is not here"
ALONE = [("0", "Exclusive_Process", "Disabled")]


@each_row(
    "nccl, modes, turns, expected",
    [
        ((2, 30, 3), [("0", "Default", "[N/A]")], "", ""),
        (None, [], NO_SERVICE, ""),
        ((2, 28, 9), [], "", "NCCL is 2.28.9 here, and takes several ranks on a GPU from 2.30.3 on"),
        ((2, 30, 7), [("0", "Default", "Disabled"), ("1", "Default", "Enabled")], "", "GPU 1 is cut into parts (MIG)"),
        ((2, 30, 7), ALONE, "", ""),
        ((2, 30, 7), ALONE, NO_SERVICE, f"(without the multi-process service: {NO_SERVICE}); nvidia-smi -i 0 -c DEF"),
        ((2, 30, 7), [("0", "Prohibited", "Disabled")], "", "GPU 0 is in compute mode Prohibited"),
    ],
)
def test_what_cannot_be_shared_is_refused(nccl, modes, turns, expected):
    problem = share_gpu.problem(nccl, modes, turns)
    assert expected in problem and "\n" not in problem and bool(expected) == bool(problem)


def test_nvidia_smi_is_asked_for_the_visible_gpus(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$2, Exclusive_Process, [N/A]"\necho "Failed to initialize NVML"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert share_gpu.gpu_modes() == [["1", "Exclusive_Process", "[N/A]"]]
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(share_gpu, "ANSWER_S", 0.2)
    with pytest.raises(UserError, match=r"--share-gpu: nvidia-smi does not answer within 0\.2 s"):
        share_gpu.begin(dist.FileStore(str(tmp_path / "store"), 1), over_nccl=False)


def join(rank, flags):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    try:
        with joined_ranks(RunConfig.of(**flags)) as ranks:
            return str(ranks.device), ranks.gpu_sharing
    except UserError as error:
        return str(error), None


SHARING = [
    (1, {"share_gpu": True, "backend": "gloo"}, ("cuda:0", "2 ranks a GPU, in turns"), f"({NO_SERVICE}; an all-r"),
    (1, {}, ("show each rank another GPU, or use --share", None), ""),
    (1, {"backend": "gloo"}, ("cuda:0", "2 ranks a GPU"), "2 ranks a GPU: step times tell about overlap"),
    (2, {"share_gpu": True, "backend": "gloo"}, ("cuda:1", None), "--share-gpu: each rank has a GPU of its own"),
    (0, {"share_gpu": True}, ("cpu", None), "--share-gpu: no GPU here; ranks share the CPU anyway"),
    (1, {"share_gpu": True}, ("--share-gpu: NCCL is 2.28.9 here", None), ""),
]


@pytest.mark.parametrize(
    ("gpus", "flags", "expected", "line"),
    [*SHARING[:2], *(pytest.param(*row, marks=pytest.mark.slow) for row in SHARING[2:])],
)
def test_the_first_line_says_who_shares_a_gpu(monkeypatch, capfd, gpus, flags, expected, line):
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
    with multiprocessing.get_context("fork").Pool(2) as pool:
        device, sharing = pool.starmap(join, [(rank, flags) for rank in range(2)], chunksize=1)[1]
    assert expected[0] in device and sharing == expected[1] and line in capfd.readouterr().out


@each_row(
    "mesh, backend, sharing, refused",
    [
        ("dp=2,tp=2", "nccl", "4 ranks a GPU", True),
        ("replicate=2,shard=2", "nccl-legacy", "2 ranks a GPU, side by side", True),
        ("dp=2,tp=2", "nccl", None, False),
        ("dp=2,tp=2", "gloo", "4 ranks a GPU", False),
    ],
)
def test_groups_of_some_ranks_hang_on_a_shared_gpu(mesh, backend, sharing, refused):
    ranks = RankContext(1, 4, torch.device("cuda"), backend, gpu_sharing=sharing)
    message = "--share-gpu: over NCCL, groups of some of the ranks were seen hanging" if refused else "join the process"
    with pytest.raises(UserError if refused else AssertionError, match=message), meshed(ranks, mesh):
        pass
    groups = dict.fromkeys(("device_mesh", "data", "model", "tensor", "context", "everyone"))
    with pytest.raises(UserError, match="they hang"):
        MeshGroups(Mesh.parse("tp=4"), **groups, no_parts="they hang").part_of_tensor(2)

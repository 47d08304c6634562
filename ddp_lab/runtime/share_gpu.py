"""`--share-gpu`: more ranks on a node than GPUs, over NCCL too (docs/gpu.md).

`shares` says whether ranks will share GPUs, `begin` lets them, and `described` is what the run record says. The first
two touch no CUDA: a process looks for the multi-process service (MPS), which runs kernels of several processes side by
side, when it first does. Where CUDA_MPS_PIPE_DIRECTORY is set, none is started; without one, ranks take turns.

The first rank of a node starts the service; the others wait in the store. Every rank holds a pipe open as long as it
lives. A guard, a process that no signal to the ranks reaches, reads from it: when all ranks have ended, in any way, it
ends the service and removes its folder.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import told_through
from ddp_lab.runtime.process.launcher import local_ranks

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, DEFAULT_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "/tmp/nvidia-mps"
HELD = "ranks"  # the pipe in the service's folder
GUARD = f'cat; echo quit | timeout 60 {CONTROL} || kill -9 "$(cat "$0/{CONTROL}.pid")"; rm -rf "$0"'
PROBE = "import ctypes, sys; n = ctypes.CDLL('libcuda.so.1').cuInit(0); sys.exit(n and f'cuInit gives error {n}')"
LEAST_NCCL = (2, 30, 3)
ANSWER_S, START_S = 60.0, 10.0
COST_OF_TURNS = "an all-reduce of 16 KiB took 4.5 ms so on one H100, and 30 to 45 us side by side"
PARTS_HANG = (
    "--share-gpu: over NCCL, groups of some of the ranks were seen hanging where ranks share a GPU (four ranks with "
    "dp=2,tp=2 on one H100; docs/status.md); take a mesh of one dimension, or --backend gloo"
)


def shares(config: RunConfig, ranks: int) -> bool:
    """Whether so many ranks on this node share GPUs, as the flags allow it."""
    return config.share_gpu and config.device != "cpu" and 0 < torch.cuda.device_count() < ranks


def begin(store: dist.Store, over_nccl: bool) -> str:
    """Let ranks share the GPUs of this node. Returns why they take turns; empty if side by side. Collective."""
    local_rank, message = int(os.environ["LOCAL_RANK"]), ""
    if local_rank == 0:
        folder, turns = found_or_started()
        try:
            refusal = problem(torch.cuda.nccl.version() if over_nccl else None, gpu_modes(), turns)
        except subprocess.TimeoutExpired as error:
            refusal = f"nvidia-smi does not answer within {error.timeout:g} s; dmesg may say why the driver hangs"
        message = "\n".join((folder, turns, refusal))
    key, size = f"multi-process service/{socket.gethostname()}", local_ranks()
    folder, turns, refusal = told_through(store, key, local_rank, size, message)[0].split("\n")
    if refusal:
        raise UserError(f"--share-gpu: {refusal}")
    if folder:
        os.environ.update(directories(folder))
        os.open(f"{folder}/{HELD}", os.O_RDWR)  # until this process ends
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return "this process had used CUDA before" if torch.cuda.is_initialized() else turns


def directories(folder: str) -> dict[str, str]:
    return {PIPES: folder, LOGS: f"{folder}/logs"}


def found_or_started() -> tuple[str, str]:
    """The folder of a service that was started, and why there is none; both are empty if the user has one."""
    has_control, pipes = shutil.which(CONTROL) is not None, os.environ.get(PIPES)
    try:
        if runs(os.environ) if has_control else Path(pipes or DEFAULT_PIPES, "control").exists():
            return "", ""
        if pipes or not has_control:
            return "", f"no service answers in {PIPES}={pipes}" if pipes else f"{CONTROL} is not here"
        return started()
    except (OSError, subprocess.SubprocessError) as error:
        return "", f"{CONTROL} fails: {error}"


def runs(environment: Mapping[str, str]) -> bool:
    ask = b"get_server_list\n"
    return subprocess.run([CONTROL], env=environment, input=ask, capture_output=True, timeout=ANSWER_S).returncode == 0


def started() -> tuple[str, str]:
    """As `found_or_started`. With CUDA_VISIBLE_DEVICES of the ranks, the service would number their GPUs anew."""
    folder = tempfile.mkdtemp(prefix="ddp-lab-mps-")
    pipe, output = Path(folder, HELD), Path(folder, "said.txt")  # no pipe of ours: the service would keep it open
    environment = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= directories(folder)
    Path(environment[LOGS]).mkdir()
    os.mkfifo(pipe)
    os.open(pipe, os.O_RDWR)
    with pipe.open("rb", 0) as reader, output.open("wb") as out:
        arguments: dict[str, Any] = {"env": environment, "stdout": out, "stderr": out}
        subprocess.Popen(["sh", "-c", GUARD, folder], **arguments, stdin=reader, start_new_session=True)
        subprocess.run([CONTROL, "-d"], **arguments, stdin=subprocess.DEVNULL, timeout=ANSWER_S)
        deadline = time.monotonic() + START_S
        while not (is_up := runs(environment)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_up:  # but it may refuse this user, or this container
            client = {**os.environ, **environment}
            probe = subprocess.run([sys.executable, "-c", PROBE], **arguments | {"env": client}, timeout=ANSWER_S)
            if probe.returncode == 0:
                return folder, ""
    why = (output.read_text(errors="replace").splitlines() or ["it says nothing"])[-1]
    return "", f"{CONTROL} does not start: {why}"


def gpu_modes() -> list[list[str]]:
    """Number, compute mode and MIG mode of each visible GPU, as nvidia-smi says; none if it is not there."""
    visible, command = os.environ.get("CUDA_VISIBLE_DEVICES", "MIG"), ["nvidia-smi"]
    if not shutil.which(command[0]):
        return []
    command += [] if "MIG" in visible else ["-i", visible]
    command += ["--query-gpu=index,compute_mode,mig.mode.current", "--format=csv,noheader"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        answer, _ = process.communicate(timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        process.kill()  # and do not wait: within the driver it may not end
        raise
    return [line.split(", ") for line in answer.splitlines() if line.count(", ") == 2]


def problem(nccl: Sequence[int | str] | None, modes: Sequence[Sequence[str]], turns: str) -> str:
    """Why GPUs cannot be shared; empty if they can. `nccl` is its version, None over Gloo."""
    if nccl and tuple(nccl[:3]) < LEAST_NCCL:
        installed, least = (".".join(map(str, version)) for version in (nccl, LEAST_NCCL))
        return f"NCCL is {installed} here, and takes several ranks on a GPU from {least} on; use --backend gloo"
    for number, mode, mig in modes:
        if mig == "Enabled":
            return f"GPU {number} is cut into parts (MIG), which was not tried; nvidia-smi -i {number} -mig 0 ends that"
        if mode == "Prohibited" or (mode != "Default" and turns):  # the service counts as one process
            why = f" (without the multi-process service: {turns})" if turns else ""
            several = f"nvidia-smi -i {number} -c DEFAULT lets in several"
            return f"GPU {number} is in compute mode {mode}, which keeps processes out{why}; {several}"
    return ""


def described(gpus: Sequence[str], turns: str | None) -> str | None:
    """How ranks share `gpus`, given by rank: `2 ranks a GPU, side by side`; None if each has its own.

    `turns` is None if nobody asked for a service.
    """
    counts = sorted(set(Counter(gpus).values()))
    how = "" if turns is None else ", in turns" if turns else ", side by side"
    return None if counts == [1] else f"{' or '.join(map(str, counts))} ranks a GPU{how}"

"""Which collectives of several ranks on one GPU hang?  python scripts/shared_card_hang.py [--only "as seen" new_group]

Plain torch.distributed on a card that nobody else uses. Ranks do what a transformer does on a mesh of dp=2, tp=2: layer
by layer a matrix product and an all-reduce in their group of tp, then one in their group of dp. Each variant has
processes and a multi-process service of its own. It hangs when no rank's device gets any further (docs/cuda.md).
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SEEN, SHARE = (
    "as seen",
    "multiprocessors run out, the limit that NCCL documents: set it where more than two ranks share",
)
VARIANTS: dict[str, tuple[dict[str, str], str]] = {  # what differs, and what it means if it passes and `as seen` hangs
    SEEN: ({}, ""),
    "two ranks": ({"ranks": "2"}, "two ranks can share; if this hangs as well, look at MPS and the driver first"),
    "new_group": ({"make": "new"}, "communicators of ncclCommSplit hang: make a mesh's groups by new_group"),
    "tp first": ({"order": "tp,dp"}, "the order in which groups are made decides: make tp before dp"),
    "tp alone": ({"order": "tp"}, "a second communicator a rank is too much; see also CTAs"),
    "in turns": ({"turns": "1"}, "kernels of two groups wait for each other's multiprocessors; see also CTAs"),
    "device bound": ({"bind": "1"}, "the device that torch takes from LOCAL_RANK is wrong: pass device_id"),
    "nccl-lazy": ({"backend": "nccl-lazy"}, "communicators that are made early hang: make them at the first call"),
    "nccl-legacy": ({"backend": "nccl-legacy", "make": "new"}, "torch's newer class hangs: use --backend nccl-legacy"),
    "nccl-legacy split": ({"backend": "nccl-legacy", "bind": "1"}, "the same, and splitting is not the reason"),
    "1 connection": ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "a rank's streams overtake each other: set it"),
    "32 connections": ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "a rank's streams share a hardware queue: set it"),
    "1 CTA": ({"NCCL_MAX_CTAS": "1"}, SHARE),
    "4 CTAs": ({"NCCL_MAX_CTAS": "4"}, SHARE),
    "few CTAs": ({"NCCL_CTA_POLICY": "EFFICIENCY"}, SHARE),
    "a quarter each": ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}, "clients take multiprocessors of others: set it"),
    "order of host": ({"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}, "a rank's communicators start in another order: set it"),
    "without MPS": ({"mps": "0"}, "kernels of several clients side by side hang: share without MPS"),
}
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def one_rank(
    own: int, done: Any, variables: dict[str, str], options: dict[str, str], flags: argparse.Namespace
) -> None:
    """Tells in `done` how many all-reduces its device has done."""
    os.environ |= variables | {"LOCAL_RANK": str(own)} | {key: v for key, v in options.items() if key.isupper()}
    device, width = (torch.device("cpu"), 64) if flags.cpu else (torch.device("cuda", 0), 2048)
    backend = "gloo" if flags.cpu else f"cpu:gloo,cuda:{options.get('backend', 'nccl')}"
    bound, where = (device if "bind" in options and not flags.cpu else None), f"file://{variables[PIPES]}/store"
    dist.init_process_group(backend, where, rank=own, world_size=len(done), device_id=bound)
    ranks = torch.arange(len(done)).reshape(-1, 2)
    parts, groups, marks = {"dp": ranks.T.tolist(), "tp": ranks.tolist()}, dict[str, Any](), list[Any]()
    for name in options.get("order", "dp,tp").split(","):  # DeviceMesh splits, too
        make = dist.new_subgroups_by_enumeration if "make" in options else lambda part: [dist.split_group(None, part)]
        groups[name] = make(parts[name])[0]

    def tell() -> None:
        while True:
            time.sleep(0.1)
            done[own] = sum(mark is None or mark.query() for mark in marks)

    def all_reduce(tensor: torch.Tensor, name: str) -> None:
        dist.all_reduce(tensor, group=groups[name])
        marks.append(None if flags.cpu else torch.cuda.current_stream().record_event())

    threading.Thread(target=tell, daemon=True).start()
    x, weight = torch.ones(width, width, device=device), torch.eye(width, device=device)
    for step in range(3):
        for members in parts["tp"] if "turns" in options else [range(len(done))]:
            for layer in range(8):
                x = x @ weight * 0.5
                if own in members and not (flags.plant and own == 2 and step == layer == 0):
                    all_reduce(x, "tp")
            if "turns" in options:
                x.sum().item()  # the host waits for its device, then for the other group
                dist.all_reduce(torch.zeros(1))
        if "dp" in groups:
            all_reduce(weight.clone(), "dp")
    x.sum().item()
    dist.all_reduce(torch.zeros(1))  # on the CPU: nobody leaves while others wait
    os._exit(0)


def outcome(options: dict[str, str], flags: argparse.Namespace) -> str:
    """`passes`, `hangs` with how far each rank came, or `fails`."""
    spawn, size = mp.get_context("spawn"), int(options.get("ranks", "4"))
    done: Any = spawn.Array("i", [-1] * size)
    control = shutil.which("nvidia-cuda-mps-control") if not flags.cpu and "mps" not in options else None
    with tempfile.TemporaryDirectory() as folder:
        variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", PIPES: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        if control:
            subprocess.run([control, "-d"], env=os.environ | variables, check=True)
        ranks = [spawn.Process(target=one_rank, args=(rank, done, variables, options, flags)) for rank in range(size)]
        for rank in ranks:
            rank.start()
        latest, since = list(done), time.monotonic()
        while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
            time.sleep(0.2)
            latest, since = (latest, since) if list(done) == latest else (list(done), time.monotonic())
            if time.monotonic() - since > (flags.still_s if min(latest) >= 0 else 120):
                break
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
        if control:
            subprocess.run([control], input=b"quit -t 5\n", env=os.environ | variables, check=False)
    if any(codes):
        return f"fails: exit codes {codes}; what they said is above"
    return f"hangs; all-reduces done by rank (-1: has not started): {latest}" if None in codes else "passes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS, help="variants (default: all)")
    parser.add_argument("--still-s", type=float, default=30.0, help="without progress for so long, ranks hang")
    parser.add_argument("--cpu", action="store_true", help="over Gloo, where all pass: they vary NCCL and CUDA")
    parser.add_argument("--plant", action="store_true", help="a rank leaves out an all-reduce, so four ranks hang")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --cpu tries the script itself")
    passes = []
    for name in options.only:
        found = outcome(VARIANTS[name][0], options)
        print(f"{name:<18} {found}", flush=True)
        passes += [name] * (found == "passes")
    if SEEN in passes:
        print(f"`{SEEN}` passes: plain torch does not hang here. What hung is this project's, or its load's.")
    else:
        print(*(f"`{name}` passes: {VARIANTS[name][1]}" for name in passes), sep="\n")
        print("" if set(passes) - {"two ranks"} else "Nothing else: NCCL's limit of two ranks a card; refuse more.")


if __name__ == "__main__":
    main()

"""What the machine is."""

import json
import os
import platform

import torch

from ddp_lab.gpu_check.parts import FAIL, MEASURED, PASS, ROOT, SKIPPED, Machine, Verdict
from ddp_lab.machine import cpu_name, output_of, package_versions

KINDS_OF_LINKS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Words of `nvidia-smi topo -m` for the way between two GPUs."""
VARIABLES = ("NCCL_", "TORCH_", "CUDA_", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MASTER_")


def environment(machine: Machine) -> Verdict:
    """Versions, devices and the variables that matter, in `environment.json`."""
    devices = [torch.cuda.get_device_properties(index) for index in range(min(machine.ranks, machine.gpus))]
    found = {
        "revision": output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip(),
        **package_versions(),
        "cuda": torch.version.cuda,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "system": platform.platform(),
        "cpu": cpu_name(),
        "devices": [
            {"name": one.name, "memory_bytes": one.total_memory, "capability": f"{one.major}.{one.minor}"}
            for one in devices
        ],
        "variables": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
    }
    machine.found["environment"] = found
    (machine.folder / "environment.json").write_text(json.dumps(found, indent=1))
    rows = [{"what": name, "is": str(value)} for name, value in found.items() if value]
    if not devices:
        line = f"no GPU: {machine.ranks} ranks on {found['cpu']}, torch {torch.__version__}"
        return Verdict(MEASURED, line, rows)
    names = {one.name for one in devices}
    memory = min(one.total_memory for one in devices) / 2**30
    what = f"{len(devices)} x {', '.join(sorted(names))} of {memory:.0f} GiB, driver {found['driver'] or 'unknown'}"
    return Verdict(MEASURED if len(names) == 1 else FAIL, f"{what}, torch {torch.__version__}", rows)


def topology(machine: Machine) -> Verdict:
    """Which GPUs reach each other directly, and how they are connected, in `topology.txt`."""
    if machine.gpus < 2:
        return Verdict(SKIPPED, f"{machine.gpus or 'no'} GPU")
    text = output_of("nvidia-smi", "topo", "-m")
    (machine.folder / "topology.txt").write_text(text or "nvidia-smi is not there\n")
    devices = range(min(machine.ranks, machine.gpus))
    pairs = [(a, b) for a in devices for b in devices if a != b]
    reached = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    words = {word for line in text.splitlines() if line.startswith("GPU") for word in line.split()[1:]}
    links = ", ".join(sorted(word for word in words if word.startswith(KINDS_OF_LINKS))) or "unknown"
    line = f"{len(reached)} of {len(pairs)} pairs reach each other directly; connected by {links}"
    return Verdict(MEASURED, line, texts={"nvidia-smi topo -m": text})


def backends(machine: Machine) -> Verdict:
    """Which classes the names of backends build here."""
    rows = []
    for name in machine.backends:
        found = machine.on_ranks("backend", "--backend", name, limit_s=180, log=f"backend {name}")
        rows.append({"backend": name, "class": found["class"], "NCCL": found["nccl"]})
    right = {"nccl": "ProcessGroupNCCL2", "nccl-legacy": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}
    line = "; ".join(f"{row['backend']} is {row['class']}" for row in rows)
    return Verdict(PASS if all(right[row["backend"]] == row["class"] for row in rows) else FAIL, line, rows)

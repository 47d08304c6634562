"""What the machine is."""

import json
import os
import platform

import pytest
import torch
import torch.distributed as dist

from ddp_lab.commands.check_gpu import ROOT
from ddp_lab.machine import cpu_name, output_of, package_versions
from tests import models

pytestmark = pytest.mark.gpu

KINDS_OF_LINKS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")
"""Words of `nvidia-smi topo -m` for the way between two GPUs."""
VARIABLES = ("NCCL_", "TORCH_", "CUDA_", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MASTER_")
CLASSES = {"nccl": "ProcessGroupNCCL2", "nccl-legacy": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}


def test_environment(place):
    """Versions, devices and the variables that matter, in `environment.json`."""
    count = min(place.ranks, torch.cuda.device_count()) if place.has_gpus else 0
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    machine = {
        "revision": output_of("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip(),
        **package_versions(),
        "cuda": torch.version.cuda,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "system": platform.platform(),
        "cpu": cpu_name(),
        "devices": [
            {"name": device.name, "memory_bytes": device.total_memory, "capability": f"{device.major}.{device.minor}"}
            for device in devices
        ],
        "variables": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
    }
    (place.folder / "environment.json").write_text(json.dumps(machine, indent=1))
    place.measures, place.rows = True, [{"what": name, "is": str(value)} for name, value in machine.items() if value]
    if not devices:
        place.says(f"no GPU: {place.ranks} ranks on {machine['cpu']}, torch {torch.__version__}")
        return
    names = sorted({device.name for device in devices})
    memory = min(device.total_memory for device in devices) / 2**30
    summary = f"{len(devices)} x {', '.join(names)} of {memory:.0f} GiB, driver {machine['driver'] or 'unknown'}"
    place.says(f"{summary}, torch {torch.__version__}", ["GPUs of several kinds"] * (len(names) > 1))


def test_topology(place):
    """Which GPUs reach each other directly, and how they are connected, in `topology.txt`."""
    gpus = torch.cuda.device_count() if place.has_gpus else 0
    if gpus < 2:
        pytest.skip(f"{gpus or 'no'} GPU")
    text = output_of("nvidia-smi", "topo", "-m")
    (place.folder / "topology.txt").write_text(text or "nvidia-smi is not there\n")
    devices = range(min(place.ranks, gpus))
    pairs = [(a, b) for a in devices for b in devices if a != b]
    reached = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    words = {word for line in text.splitlines() if line.startswith("GPU") for word in line.split()[1:]}
    links = ", ".join(sorted(word for word in words if word.startswith(KINDS_OF_LINKS))) or "unknown"
    place.measures, place.texts = True, {"nvidia-smi topo -m": text}
    place.says(f"{len(reached)} of {len(pairs)} pairs reach each other directly; connected by {links}")


def class_and_version():
    group = dist.group.WORLD
    version = ".".join(map(str, torch.cuda.nccl.version())) if models.DEVICE.type == "cuda" else ""
    return type(group._get_backend(models.DEVICE)).__name__, version


def test_backends(place, pools):
    """Which classes the names of backends build here."""
    for name in place.backends:
        kind, version = pools(name).run(place.ranks, class_and_version)[0]
        place.rows.append({"backend": name, "class": kind, "NCCL": version})
    wrong = [row["backend"] for row in place.rows if CLASSES[row["backend"]] != row["class"]]
    place.says("; ".join(f"{row['backend']} is {row['class']}" for row in place.rows), wrong)

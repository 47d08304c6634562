"""This machine: its names and versions, for records, cards and pages, and the parts on which a run of several processes
depends, for the doctor. Everything is read, nothing is changed. torch is imported only by what asks it."""

import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SMALL_SHM_BYTES = 2**30
"""Docker gives 64 MiB. NCCL takes up to about 10 MB for each pair of GPUs, and data loaders far more."""
SMALL_MEMLOCK_BYTES = 2**30
"""RDMA locks the memory that it sends from; the usual default is 64 KiB to 8 MiB."""
COMMAND_TIMEOUT_S = 20
PACKAGES = ("torch", "transformers", "datasets", "holistictraceanalysis", "deepspeed")


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes. `memlock_bytes` is None if unlimited. `interfaces` has up or down by name, with loopback."""

    shm_bytes: int | None
    shm_free_bytes: int | None
    memlock_bytes: int | None
    interfaces: dict[str, str]
    infiniband: list[str]
    is_virtual: bool
    environment: dict[str, str]
    gpus: list[str]
    topology: str
    versions: dict[str, str]
    port: str
    iommu: str

    def describe(self) -> dict[str, str]:
        """The machine in words, a line each."""
        shm = "not there" if self.shm_bytes is None else f"{self.shm_bytes / 2**20:,.0f} MiB"
        free = "" if self.shm_free_bytes is None else f", {self.shm_free_bytes / 2**20:,.0f} MiB free"
        memlock = "unlimited" if self.memlock_bytes is None else f"{self.memlock_bytes / 1024:,.0f} KiB"
        return {
            "devices": "; ".join(self.gpus) or "none that nvidia-smi shows; ranks run on the CPU",
            "/dev/shm": shm + free,
            "locked memory": memlock,
            "interfaces": ", ".join(f"{name} ({state})" for name, state in self.interfaces.items()) or "none",
            "RDMA cards": ", ".join(self.infiniband) or "none",
            "port": self.port,
            "virtual machine": "yes" if self.is_virtual else "no sign of one",
            "IOMMU": self.iommu,
            "versions": ", ".join(f"{name} {number}" for name, number in self.versions.items()) or "no torch here",
            "variables": ", ".join(f"{name}={value}" for name, value in self.environment.items()) or "none set",
        }


def examine() -> Machine:
    """Look at the machine that this runs on."""
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    interfaces = {name: _read(f"/sys/class/net/{name}/operstate") or "unknown" for _, name in socket.if_nameindex()}
    groups = _names_in("/sys/kernel/iommu_groups")
    prefixes = ("NCCL_", "GLOO_", "FI_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_VISIBLE_DEVICES", "MASTER_")
    return Machine(
        shm_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        interfaces=interfaces,
        infiniband=_names_in("/sys/class/infiniband"),
        is_virtual="hypervisor" in _read("/proc/cpuinfo"),
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)},
        gpus=output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines(),
        topology=output_of("nvidia-smi", "topo", "-m"),
        versions=installed(("torch", "nvidia-nccl-cu13", "nvidia-nccl-cu12")),
        port=_port(),
        iommu=f"{len(groups)} groups" if groups else "off, or not visible here",
    )


def _port() -> str:
    """Whether the port of the rendezvous (by default torchrun's) is free on this host."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun has one already"
    port = os.environ.get("MASTER_PORT", "") or "29500"
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        return f"MASTER_PORT={port} is not a port; unset it, or give a number from 1024 to 65535"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError as error:
            return f"{port} cannot be used ({error.strerror}); give torchrun --standalone, or another --master-port"
    return f"{port} free"


def cpu_name() -> str:
    """Number of cores and name of the processor, e.g. `8 x Intel Xeon`."""
    names = [line.partition(":")[2].strip() for line in _read("/proc/cpuinfo").splitlines() if "model name" in line]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def device_name(device: "torch.device") -> str:
    """The name of the GPU, or of the processor."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def physical_memory() -> int:
    """Of the host, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed. None is imported."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def package_versions() -> dict[str, str]:
    """Versions of Python, of those `PACKAGES` that are installed, and of NCCL where there is a GPU."""
    import torch

    versions = {"python": platform.python_version()} | installed(PACKAGES)
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _names_in(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir()) if Path(folder).is_dir() else []


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def output_of(*command: str) -> str:
    """What a command prints; empty if it is missing, fails, or does not end in time."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""

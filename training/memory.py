"""How many bytes are held: by tensors, by the process, and at the worst moment."""

import resource
import sys
from collections.abc import Iterable

import torch
from torch import Tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each counted once however many tensors are views into it."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[(tensor.device, storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far, in bytes (`getrusage(2)`, which counts KiB on Linux)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes(device: torch.device) -> int | None:
    """Most bytes that torch's CUDA allocator held for tensors at any moment; None on CPU, which does not count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

"""The states of this rank's random generators in a checkpoint.

They are stored under the keys `random/torch` and `random/cuda`, those of Python and NumPy as JSON in the metadata.
"""

import hashlib
import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ddp_lab.runtime.errors import UserError

TORCH, CUDA = "random/torch", "random/cuda"


def random_states(device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """States of this rank's random generators: torch's as tensors, Python's and NumPy's as JSON."""
    tensors = {TORCH: torch.get_rng_state()}
    if device.type == "cuda":
        tensors[CUDA] = torch.cuda.get_rng_state(device)
    kind, keys, *numbers = np.random.get_state(legacy=True)
    texts = {"python_random": random.getstate(), "numpy_random": [kind, keys.tolist(), *numbers]}  # type: ignore[union-attr]
    return tensors, {name: json.dumps(state) for name, state in texts.items()}


def restore_random_states(tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device) -> None:
    """Restore the states of this rank's generators."""
    try:
        torch.set_rng_state(tensors[TORCH])
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors[CUDA], device)
        version, keys, gauss = json.loads(texts["python_random"])
        random.setstate((version, tuple(keys), gauss))
        kind, keys, *numbers = json.loads(texts["numpy_random"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *numbers))
    except (RuntimeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise UserError(f"cannot restore the stored random numbers: {error}") from error


def derive_random_states(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators, differently for each `rank` and each step that a run resumes from."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

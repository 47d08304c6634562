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


def random_states(device: torch.device) -> tuple[dict[str, Tensor], dict[str, str]]:
    """States of this rank's random generators: torch's as tensors, Python's and NumPy's as JSON."""
    tensors = {"random/torch": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["random/cuda"] = torch.cuda.get_rng_state(device)
    kind, keys, *rest = np.random.get_state(legacy=True)
    texts = {"python_random": random.getstate(), "numpy_random": [kind, keys.tolist(), *rest]}  # type: ignore[union-attr]
    return tensors, {name: json.dumps(state) for name, state in texts.items()}


def restore_random_states(tensors: Mapping[str, Tensor], texts: Mapping[str, str], device: torch.device) -> bool:
    """Restore the states of this rank's generators. Returns False if nothing is stored for this device.

    Raises:
        UserError: what is stored is no state of a generator.
    """
    if "random/torch" not in tensors or (device.type == "cuda" and "random/cuda" not in tensors):
        return False
    try:
        torch.set_rng_state(tensors["random/torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(tensors["random/cuda"], device)
        version, keys, gauss = json.loads(texts["python_random"])
        random.setstate((version, tuple(keys), gauss))
        kind, keys, *rest = json.loads(texts["numpy_random"])
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    except (RuntimeError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise UserError(f"cannot restore the stored random numbers: {error}") from error
    return True


def derive_random_states(seed: int, step: int, rank: int) -> None:
    """Seed torch's generators, differently for each data-parallel rank and each step that a run resumes from."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

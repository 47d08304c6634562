"""The states of random generators in a checkpoint."""

import random

import numpy as np
import torch

from ddp_lab.runtime.checkpoint.session import random_states, restore_random_states


def draw():
    """From torch, Python and NumPy; of normal numbers, each generator keeps one for later."""
    return torch.randn(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()


def test_all_generators_go_on_where_they_were():
    cpu = torch.device("cpu")
    draw()
    tensors, texts = random_states(cpu)
    numbers = draw()
    draw()
    restore_random_states(tensors, texts, cpu)
    assert draw() == numbers

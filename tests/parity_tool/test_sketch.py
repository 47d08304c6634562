"""Sketches are linear, add up over blocks, and estimate norms."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.parity.sketch import SIZE, fingerprints, of_block, of_rows, of_tensor

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@settings(max_examples=30)
@given(shapes, st.integers(0, 2), st.integers(1, 6), st.integers(0, 1000))
def test_blocks_add_up_to_the_whole(shape: list[int], dimension: int, cut: int, seed: int) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    dimension = min(dimension, len(shape) - 1)
    total, offset = torch.zeros_like(of_tensor(whole)), 0
    for block in whole.split(cut, dim=dimension):
        offsets = [0] * len(shape)
        offsets[dimension] = offset
        total += of_block(block, offsets, shape)
        offset += block.shape[dimension]
    torch.testing.assert_close(total, of_tensor(whole), rtol=1e-10, atol=1e-10)


def test_a_sketch_is_linear_and_knows_the_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 5000, generator=generator, dtype=torch.float64) for _ in range(2))
    sum_of = of_rows(a)[:, :SIZE] - 2 * of_rows(b)[:, :SIZE]
    torch.testing.assert_close(sum_of, of_rows(a - 2 * b)[:, :SIZE])
    many = of_rows(torch.randn(400, 999, generator=generator))[:, :SIZE].square().sum(1)
    assert abs(float(many.mean()) / 999 - 1) < 0.1
    assert 0.5 < float(many.std()) / 999 / (2 / SIZE) ** 0.5 < 2


def test_fingerprints_tell_samples_apart_and_forgive_filling() -> None:
    words = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 0], [3, 2, 1, 0], [1, 2, 4, 0]])
    keys = fingerprints([words]).tolist()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert fingerprints([words[:, :3]]).tolist() == keys
    assert fingerprints([words.float()]).tolist() != keys

"""Sketches are linear, add up over blocks, and estimate norms."""

from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from context_parallel.layout import SequenceLayout
from ddp_lab.parity.answer import least_agreement
from ddp_lab.parity.causes.backward import some_ranks_agree
from ddp_lab.parity.causes.look import Look
from ddp_lab.parity.comparison import Comparison
from ddp_lab.parity.micro_batches import MicroBatches, rows_of
from ddp_lab.parity.quantity import Quantity, forgive_small
from ddp_lab.parity.sketch import SIZE, fingerprints, of_block, of_rows, of_tensor
from ddp_lab.parity.store import GRADIENT, PARAMETER, WHOLE

shapes = st.lists(st.integers(1, 7), min_size=1, max_size=3)


@settings(max_examples=30)
@given(shapes, st.integers(0, 2), st.integers(1, 6), st.integers(0, 1000))
def test_blocks_add_up_to_the_whole(shape, dimension, cut, seed):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    dimension = min(dimension, len(shape) - 1)
    total, offset = torch.zeros_like(of_tensor(tensor)), 0
    for block in tensor.split(cut, dim=dimension):
        offsets = [0] * len(shape)
        offsets[dimension] = offset
        total += of_block(block, offsets, shape)
        offset += block.shape[dimension]
    torch.testing.assert_close(total, of_tensor(tensor), rtol=1e-10, atol=1e-10)


def test_a_sketch_is_linear_and_knows_the_norm():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, 5000, generator=generator, dtype=torch.float64) for _ in range(2))
    sum_of = of_rows(a)[:, :SIZE] - 2 * of_rows(b)[:, :SIZE]
    torch.testing.assert_close(sum_of, of_rows(a - 2 * b)[:, :SIZE])
    many = of_rows(torch.randn(400, 999, generator=generator))[:, :SIZE].square().sum(1)
    assert abs(float(many.mean()) / 999 - 1) < 0.1
    assert 0.5 < float(many.std()) / 999 / (2 / SIZE) ** 0.5 < 2


def test_fingerprints_tell_samples_apart_and_forgive_filling():
    words = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 0], [3, 2, 1, 0], [1, 2, 4, 0]])
    keys = fingerprints([words]).tolist()
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert fingerprints([words[:, :3]]).tolist() == keys
    assert fingerprints([words.float()]).tolist() != keys


@pytest.mark.parametrize("shape", [(8, 16, 3), (16, 8, 3), (128, 8), (128, 3), (16, 8)])
def test_rows_are_those_of_samples(shape):
    """8 samples of 16 tokens: samples or tokens first, or both in one dimension, also with 8 or 16 features."""
    batches = MicroBatches(in_pipeline=False)
    batches.begin([torch.arange(128).view(8, 16)], {})
    tensor = torch.arange(prod(shape)).view(shape).float()
    rows, keys, _ = rows_of(tensor, batches.at(0))
    by_sample = tensor.transpose(0, 1) if shape[0] == 16 else tensor
    assert keys == batches.at(0).keys and torch.equal(rows, by_sample.reshape(8, -1))


@pytest.mark.parametrize("length", [8, 16])
def test_rows_of_positions_are_no_samples(length):
    """8 samples, and a row for each position, as an embedding of positions in one dimension gives them."""
    batches = MicroBatches(in_pipeline=False)
    batches.begin([torch.arange(8 * length).view(8, length)], {})
    rows, keys, _ = rows_of(torch.ones(length, 5), batches.at(0))
    assert keys == [WHOLE] and rows.shape == (1, 5 * length)


@pytest.mark.parametrize("mask", [[1, 1, 1], [1, 1, 0]])
def test_what_fills_up_a_part_of_the_tokens_does_not_count(mask):
    """Two ranks share three tokens and one of padding: one has the first and the last, the other the two between."""
    layout, counted = SequenceLayout(2, zigzag=True), []
    for rank in (0, 1):
        batches = MicroBatches(False, lambda tokens, rank=rank: layout.part(functional.pad(tokens, (0, 1)), rank))  # type: ignore[misc]
        batches.begin((), {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([mask, [1, 1, 1]])})
        rows, _, elements = rows_of(torch.ones(2, 2, 5), batches.at(0))
        assert rows.sum(1).tolist() == elements
        counted.append(elements)
    assert torch.tensor(counted).sum(0).tolist() == [5 * sum(mask), 15]


@pytest.mark.parametrize(("error", "is_noise"), [(1.0, True), (0.0, False)])
def test_an_update_is_forgiven_only_where_its_gradient_is(error, is_noise):
    def quantity(kind, name, norm, error):
        return Quantity(0, kind, name, 0, {(0, 0): error}, {(0, 0): 1.0}, {(0, 0): 0.0}, norm=norm, limit=1e-5)

    small = quantity(GRADIENT, "small", 1e-9, error)
    update = quantity(PARAMETER, "small", 1.0, 1.0)
    forgive_small([quantity(GRADIENT, "large", 1.0, 0.0), small], [update])
    assert not small.differs and update.differs != is_noise


def test_what_is_rounding_on_all_ranks_says_nothing_about_a_reduction():
    """The bias of keys: softmax takes it out, so that its gradient is rounding, reduced or not."""
    spread = {"weight": 1.0, "bias": 0.0}
    gradients = [
        Quantity(0, GRADIENT, name, 0, {(0, 0): 1.0}, {}, {}, limit=0.1, spread=of, is_small=name == "bias")
        for name, of in spread.items()
    ]
    comparison = Comparison(SimpleNamespace(), SimpleNamespace(), gradients)
    assert not some_ranks_agree(Look(comparison, 0))
    assert least_agreement(gradients) is gradients[0]

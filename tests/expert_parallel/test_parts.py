"""What a mixture is made of, each part against its definition."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.analysis.report.pages.experts import MOST_LANES, expert_load, load_figure, relative
from ddp_lab.analysis.sentences import say
from expert_parallel import experts as of_experts
from expert_parallel.balance import LoadBalance
from expert_parallel.experts import grouped, products
from expert_parallel.router import Router


def test_the_grouped_kernel_computes_as_the_loop():
    """The third expert has no rows: its gradient is zero, not none."""
    lengths = [3, 5, 0, 4]
    results = []
    for compute in (
        lambda *tensors: products(*tensors, lengths, torch.tensor(lengths)),
        lambda *tensors: grouped(*tensors, torch.tensor(lengths)),
    ):
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(12, 16, generator=generator).requires_grad_()
        weights = torch.randn(4, 8, 16, generator=generator).requires_grad_()
        out = compute(rows, weights)
        results.append((out, *torch.autograd.grad(out.square().sum(), (rows, weights))))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second)
    assert not results[0][2][2].any() and not results[1][2][2].any()


@pytest.mark.parametrize(("inputs", "is_aligned"), [(16, True), (10, False)])
def test_the_kernel_takes_rows_of_a_multiple_of_16_bytes(inputs, is_aligned, monkeypatch):
    kernel = mock.Mock(side_effect=grouped)
    monkeypatch.setattr(of_experts, "has_kernel", lambda device: True)
    monkeypatch.setattr(of_experts, "grouped", kernel)
    weights = torch.ones(2, 8, inputs)
    out = products(torch.ones(5, inputs), weights, [2, 3], torch.tensor([2, 3]))
    assert out.unique().item() == inputs and kernel.called == is_aligned


def test_the_report_shows_who_gets_how_many_tokens():
    """Two layers of three experts. A step before the run resumed is not known."""
    load = [[[6, 3, 3], [4, 4, 4]], [[3, 3, 6], [12, 0, 0]]]
    assert expert_load(None).empty and expert_load({"step_expert_tokens": None}).empty
    assert relative(load[0]).tolist() == [1.5, 0.75, 0.75, 1.0, 1.0, 1.0]
    by_step = expert_load({"step_expert_tokens": [None, *load]})
    assert "1.25 of it in step 1 and 2.25 in step 2; at most 3.00" in say("experts", by_step, MOST_LANES)
    assert "layer 1, expert 2" in load_figure(by_step).data[0].y


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_bias_decides_over_the_choice_and_not_over_the_weight(sigmoid):
    weight = nn.Parameter(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    hidden = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    balance = LoadBalance(0.0, 0.1, dist.group.WORLD)
    router = Router(weight, 2, False, 0, balance, sigmoid, has_bias=True)
    router.bias[3] = 10.0
    balance.begin(router, (torch.zeros(1, 6),), {})
    logits, weights, chosen = router(hidden)
    scores = logits.sigmoid() if sigmoid else logits.exp()
    scores = scores / scores.sum(-1, keepdim=True)
    assert (chosen[:, 0] == 3).all() and (chosen[:, 1] == scores[:, :3].argmax(-1)).all()
    torch.testing.assert_close(weights, scores.gather(1, chosen))

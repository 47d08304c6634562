"""What devices and links are called, and what operators cost by peak rates."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ddp_lab.planner.contracts import CONTIGUOUS, OperatorCall
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.cluster import Device
from ddp_lab.planner.costs.kernels import Operators
from ddp_lab.runtime.mesh import Mesh

ATTENTION, DENSE, HALF = torch.nn.functional.scaled_dot_product_attention, torch.contiguous_format, ("bfloat16",)


def call(flops, bytes_moved, dtype="float32"):
    return OperatorCall("aten.mm.default", ((2, 2), (2, 2)), (dtype, dtype), flops, bytes_moved)


def step_calls():
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with Operators() as operators:
        model(tokens).sum().backward()
        optimizer.step()
    return operators.calls


def test_pretended_tensors_make_the_same_calls_as_real_ones():
    real = step_calls()
    with FakeTensorMode():
        pretended = step_calls()
    assert pretended == real
    assert {"aten.addmm.default", "aten._fused_adamw_.default"} <= {call.name for call in real}


def test_calls_count_what_operators_do():
    """Of 40 bytes each: a copy moves two, a sum in place three, and AdamW reads four and writes three of them."""
    left, right = torch.ones(10), torch.ones(10)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(10))], fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(10)
    with Operators() as operators:
        left.copy_(right)
        left.add_(right)
        left.mul_(2.0)
        torch._foreach_add_([left], [right])
        optimizer.step()
        torch.ones(3, 4) @ torch.ones(4, 5)
        torch.ones(15).view(3, 5)
        torch.nn.functional.embedding(torch.tensor([1, 2]), torch.ones(1000, 4))
        torch.ones(3, 4)[:, :1].expand(3, 4).sum()
    calls = {call.name.removeprefix("aten."): call for call in operators.calls}
    assert calls["mm.default"].flops == 2 * 3 * 4 * 5
    moved = {"copy_.default": 2 * 40, "add_.Tensor": 3 * 40, "mul_.Tensor": 2 * 40, "_foreach_add_.List": 3 * 40}
    moved |= {"_fused_adamw_.default": 7 * 40 + 4, "mm.default": 4 * (3 * 4 + 4 * 5 + 3 * 5), "view.default": 0}
    moved |= {"embedding.default": 4 * (8 + 8) + 2 * 8}  # rows read, rows written, indices
    moved |= {"sum.default": 4 * (3 + 1)}
    assert {name: calls[name].bytes_moved for name in moved} == moved


def test_roofline_by_hand():
    """Of an A100, which reaches half of 19.5 TFLOP/s in float32, of 156 in TF32, and of 2.039 TB/s."""
    device = hardware.device("A100-80GB", efficiency=0.5)
    roofline = replace(device, launch_s=1e-6)
    assert roofline.seconds(call(10**12, 100)) == pytest.approx(10**12 / 9.75e12 + 1e-6)
    assert roofline.seconds(call(0, 10**9)) == pytest.approx(10**9 / 1.0195e12 + 1e-6)
    assert roofline.seconds(call(0, 0)) == 0
    assert roofline.seconds(call(10**12, 100, "complex64")) is None
    convolution = replace(call(10**12, 100), name="aten.convolution_backward.default")
    assert roofline.seconds(convolution) == pytest.approx(10**12 / 78e12 + 1e-6)
    without_tf32 = Device("T4", "cuda", 1, {"float32": 1e12}, {CONTIGUOUS: 1e15})
    assert without_tf32.seconds(convolution) == pytest.approx(1.0)


def test_how_operators_reach_memory():
    """Whatever torch cannot handle several elements of at a time is scattered."""
    wide, heads, block = torch.ones(6, 4), torch.ones(2, 3, 4).transpose(0, 1), torch.ones(3, 2, 4)
    cases = {
        "contiguous": [lambda: wide + wide, lambda: heads * heads, lambda: wide.to(torch.bfloat16), lambda: wide * 2.0],
        "scattered": [
            *(lambda: wide * wide[0], lambda: wide * wide[:, :1], lambda: wide[:, :2].neg(), lambda: heads + block),
            *(lambda: wide.mean(1), lambda: torch.cat([wide, wide], 1), lambda: heads.clone(memory_format=DENSE)),
        ],
        "rows": [lambda: wide.log_softmax(1), lambda: torch.nn.functional.layer_norm(wide, (4,))],
        "derivative": [lambda: torch.ops.aten.silu_backward(wide, wide)],
        "causal": [lambda: ATTENTION(block[None], block[None], block[None], is_causal=True)],
    }
    for kind, calls in cases.items():
        for number, compute in enumerate(calls):
            with Operators() as operators:
                compute()
            assert {call.access for call in operators.calls if call.bytes_moved} == {kind}, (kind, number)
    with Operators() as operators:
        torch.cat([torch.ones(2, 200), torch.ones(2, 200)], 1)
        wide.sum()
        torch._foreach_add_([wide, torch.ones(2)], 1.0)
        torch.nn.functional.embedding(torch.tensor([1, 2]), wide)
    assert {call.access for call in operators.calls} == {"contiguous"}, "long pieces, one result, or one after another"


def test_each_group_takes_memory_outside_torch():
    """On an A100 as measured; more with a faster link and over nodes, little over PCI Express, none on a CPU."""
    amounts = [
        hardware.outside_bytes(hardware.cluster(gpus, link, between), mesh and Mesh.parse(mesh)) / 2**20
        for gpus, link, between, mesh in (
            ("1xA100", None, None, None),
            ("4xA100", None, None, None),
            ("8x8xH100", None, "8xndr", "dp=4,pp=2,tp=8"),
            ("2xL4", "pcie4", None, None),
            ("2xcpu", "1gbit", None, None),
        )
    ]
    assert amounts == pytest.approx([600, 600 + 688, 600 + 4 * 688 * 360 / 234 + 3 * 512, 637, 0], abs=1)

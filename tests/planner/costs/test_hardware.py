"""What devices and links are called, and what operators cost by peak rates."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.access import CONTIGUOUS, KINDS
from ddp_lab.planner.costs.cluster import Device
from ddp_lab.planner.costs.timing import Operators

ATTENTION, DENSE, HALF = torch.nn.functional.scaled_dot_product_attention, torch.contiguous_format, ("bfloat16",)


def call(flops: int, bytes_moved: int, dtype: str = "float32") -> OperatorCall:
    return OperatorCall("aten.mm.default", ((2, 2), (2, 2)), (dtype, dtype), flops, bytes_moved)


def step_calls() -> list[OperatorCall]:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    with Operators() as operators:
        model(tokens).sum().backward()
        optimizer.step()
    return operators.seen


def test_pretended_tensors_make_the_same_calls_as_real_ones() -> None:
    real = step_calls()
    with FakeTensorMode():
        pretended = step_calls()
    assert pretended == real
    assert {"aten.addmm.default", "aten._fused_adamw_.default"} <= {each.name for each in real}


def test_what_is_changed_in_place_is_read_and_written() -> None:
    """Of 40 bytes each: a copy moves two, a sum in place three, and AdamW reads four and writes three of them."""
    left, right = torch.ones(10), torch.ones(10)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(10))], fused=True)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(10)
    with Operators() as operators:
        left.copy_(right)
        left.add_(right)
        left.mul_(2.0)
        left.zero_()
        torch._foreach_add_([left], [right])
        torch.mul(left, right, out=torch.empty(10))
        optimizer.step()
    moved = {each.name: each.bytes_moved // 40 for each in operators.seen}
    expected = {
        "aten.copy_.default": 2,
        "aten.add_.Tensor": 3,
        "aten.mul_.Tensor": 2,
        "aten.zero_.default": 1,
        "aten._foreach_add_.List": 3,
        "aten.mul.out": 3,
        "aten._fused_adamw_.default": 7,
    }
    assert {name: moved[name] for name in expected} == expected


def test_calls_count_what_operators_do() -> None:
    with Operators() as operators:
        left, right = torch.ones(3, 4), torch.ones(4, 5)
        product = left @ right
        left.add_(left)
        product.view(15)
        torch.nn.functional.embedding(torch.tensor([1, 2]), torch.ones(1000, 4))
        left[:, :1].expand(3, 4).sum()
    by_name = {each.name: each for each in operators.seen}
    assert by_name["aten.mm.default"].flops == 2 * 3 * 4 * 5
    assert by_name["aten.mm.default"].bytes_moved == 4 * (3 * 4 + 4 * 5 + 3 * 5)
    assert by_name["aten.add_.Tensor"].bytes_moved == 2 * 4 * 12
    assert by_name["aten.view.default"].bytes_moved == 0
    assert by_name["aten.embedding.default"].bytes_moved == 4 * (8 + 8) + 2 * 8  # rows read, rows written, indices
    assert by_name["aten.sum.default"].bytes_moved == 4 * (3 + 1)


def test_clusters() -> None:
    small, large = hardware.cluster("2xL4", "pcie4"), hardware.cluster("4x8xH100", between="8xndr")
    assert (small.nodes, small.ranks_per_node, small.backend, small.between) == (1, 2, "nccl", None)
    assert (large.nodes, large.ranks_per_node, large.world_size) == (4, 8, 32)
    assert large.between is not None and large.between.name == "8xndr"
    assert hardware.cluster("T4", "pcie3").world_size == 1
    assert hardware.cluster("4xRTX 4090", "pcie4").device.name == "RTX 4090"
    here = hardware.cluster("2xcpu", "loopback")
    assert here.backend == "gloo" and here.device.memory_bytes == hardware.device("cpu").memory_bytes // 2


def test_roofline_by_hand() -> None:
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


def test_how_operators_reach_memory() -> None:
    """Whatever torch cannot handle several elements of at a time is scattered."""
    wide, heads, whole = torch.ones(6, 4), torch.ones(2, 3, 4).transpose(0, 1), torch.ones(3, 2, 4)
    made = {
        "contiguous": [lambda: wide + wide, lambda: heads * heads, lambda: wide.to(torch.bfloat16), lambda: wide * 2.0],
        "scattered": [
            *(lambda: wide * wide[0], lambda: wide * wide[:, :1], lambda: wide[:, :2].neg(), lambda: heads + whole),
            *(lambda: wide.mean(1), lambda: torch.cat([wide, wide], 1), lambda: heads.clone(memory_format=DENSE)),
        ],
        "rows": [lambda: wide.log_softmax(1), lambda: torch.nn.functional.layer_norm(wide, (4,))],
        "derivative": [lambda: torch.ops.aten.silu_backward(wide, wide)],
        "causal": [lambda: ATTENTION(whole[None], whole[None], whole[None], is_causal=True)],
    }
    for kind, calls in made.items():
        for number, one in enumerate(calls):
            with Operators() as operators:
                one()
            assert {each.access for each in operators.seen if each.bytes_moved} == {kind}, (kind, number)
    with Operators() as operators:
        torch.cat([torch.ones(2, 200), torch.ones(2, 200)], 1)
        wide.sum()
        torch._foreach_add_([wide, torch.ones(2)], 1.0)
        torch.nn.functional.embedding(torch.tensor([1, 2]), wide)
    assert {each.access for each in operators.seen} == {"contiguous"}, "long pieces, one result, or one after another"


def test_rates_by_kind_of_operator() -> None:
    """On an H100, as kernels were measured (docs/planner-costs.md), and where a compiler fuses them."""
    h100 = hardware.device("H100")
    heads = ((2, 32, 2048, 64),) * 3
    forward = OperatorCall(
        "aten._scaled_dot_product_flash_attention.default", heads, HALF, 68_719_476_736, 2**25, "causal"
    )
    backward = replace(forward, name=f"{forward.name}_backward", flops=5 * forward.flops // 2)
    strided = OperatorCall("aten.neg.default", ((2, 32, 2048, 32),), HALF, 0, 2**24, "scattered")
    mean = OperatorCall("aten.mean.dim", ((2, 2048, 2048),), ("float32",), 0, 2**25, "scattered")
    derivative = OperatorCall("aten.silu_backward.default", ((2, 2048, 5632),) * 2, HALF, 0, 138_412_032, "derivative")
    took = {"forward": 155e-6, "backward": 435e-6, "strided": 18.2e-6, "mean": 33.2e-6, "derivative": 62.5e-6}
    calls = {"forward": forward, "backward": backward, "strided": strided, "mean": mean, "derivative": derivative}
    for name, call in calls.items():
        assert h100.seconds(call) - h100.launch_s == pytest.approx(took[name], rel=0.1), name
    plain = h100.seconds(forward)
    assert h100.seconds(replace(forward, access="contiguous")) == pytest.approx(2 * plain, rel=0.02), "not causal"
    masked = replace(forward, name="aten._scaled_dot_product_efficient_attention.default", access="contiguous")
    assert h100.seconds(masked) > 3 * plain
    fused = h100.compiled(dict.fromkeys(KINDS, 0.5), 1e-5)
    assert fused.seconds(mean) - fused.launch_s == pytest.approx((h100.seconds(mean) - h100.launch_s) / 2)
    assert fused.seconds(forward) == plain and fused.host_s == 1e-5 < h100.host_s
    assert hardware.device("H100-500W").elements_per_s == h100.elements_per_s, "as the one that it is like"

"""Recording operators of a step, and costs from such records."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddp_lab.planner.contracts import OperatorCall
from ddp_lab.planner.costs import hardware, record
from ddp_lab.planner.costs.record import RecordedCosts
from ddp_lab.planner.costs.timing import TrainingStep, measure
from ddp_lab.runtime.data.synthetic import MLP
from ddp_lab.runtime.errors import UserError

CPU = torch.device("cpu")
WIDTH = 96


def batch(samples):
    return {"inputs": torch.ones(samples, WIDTH), "targets": torch.zeros(samples, WIDTH)}


def step_of(samples=16, micro_batches=1):
    module = MLP(3, WIDTH)
    return TrainingStep(module, [batch(samples)] * micro_batches, torch.optim.AdamW(module.parameters(), fused=True))


@pytest.fixture(scope="module")
def content():
    return json.loads(json.dumps(measure([step_of(), step_of(64, micro_batches=2)], CPU, repeats=2, about="mlp")))


def costs(content, **changes):
    return record.operator_costs("r.json", {**content, **changes}, hardware.device("cpu"), "fp32")


def test_a_record_holds_a_whole_step(content):
    """Forward, backward and the fused optimizer. Times add up to the step, and every field is documented."""
    counted = Counter()
    for entry in content["operators"]:
        if entry["step"] == 0:
            counted[entry["name"]] += entry["count"]
    assert counted["aten.mm.default"] == 3 + 2 + 3  # forward, inputs' gradients but the first, weights' gradients
    assert counted["aten._fused_adamw_.default"] == 1
    assert counted["aten.relu.default"] == counted["aten.threshold_backward.default"] == 2
    assert not any(name.startswith(("prim.", "profiler.")) for name in counted)
    for number, times in enumerate(content["steps"]):
        mine = [entry for entry in content["operators"] if entry["step"] == number]
        assert sum(entry["count"] * entry["seconds"] for entry in mine) == pytest.approx(times["step_s"])
        assert times["operators_s"] > 0
    text = (Path(__file__).parents[3] / "docs" / "planner-costs.md").read_text()
    names = {*content, *content["steps"][0], *content["operators"][0]}
    assert {name for name in names if f"`{name}`" not in text} == set()


def product(samples, name="aten.mm.default", dtype="float32"):
    flops, moved = 2 * samples * WIDTH**2, 4 * (2 * samples * WIDTH + WIDTH**2)
    return OperatorCall(name, ((samples, WIDTH), (WIDTH, WIDTH)), (dtype,) * 2, flops, moved)


def test_other_shapes_and_operators_go_by_the_ratio_to_a_roofline():
    """16 samples take twice what the roofline says, and 1024 eight times: 128, between them, about four times."""
    plain = hardware.device("cpu")
    recorded = [(product(16), 2 * plain.seconds(product(16))), (product(1024), 8 * plain.seconds(product(1024)))]
    known = RecordedCosts(recorded, plain)
    ratios = {n: known.seconds(product(n)) / plain.seconds(product(n)) for n in (1, 16, 128, 1024, 10**6)}
    assert (ratios[1], ratios[16], ratios[1024], ratios[10**6]) == pytest.approx((2, 2, 8, 8))
    assert 3 < ratios[128] < 6
    other = product(16, "aten.bmm.default")
    assert known.seconds(other) == pytest.approx(2 * plain.seconds(other)), "as others with flops"
    copy = OperatorCall("aten.copy_.default", ((4,), (4,)), ("float32",) * 2, 0, 32)
    assert known.seconds(copy) == plain.seconds(copy), "nothing without flops was recorded"
    assert known.seconds(product(16, dtype="float8_e4m3fn")) is None
    assert known.seconds(replace(product(16), bytes_moved=0)) == 0.0


def test_only_a_record_of_this_device_and_precision_is_used(content):
    of_16 = {"name": "aten.mm.default", "shapes": [[16, WIDTH], [WIDTH, WIDTH]]}
    (entry,) = [entry for entry in content["operators"] if of_16.items() <= entry.items()]
    assert costs(content).seconds(product(16)) == pytest.approx(entry["seconds"])
    for changes, says in (
        ({"precision": "bf16"}, "recorded in bf16, not in fp32"),
        ({"hardware": "2 x Abacus"}, "recorded on 2 x Abacus"),
        ({"device": "L4", "hardware": "NVIDIA L4"}, "recorded on NVIDIA L4, not on"),
    ):
        with pytest.raises(UserError, match=says):
            costs(content, **changes)

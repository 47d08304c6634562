"""Memory: what the formula expects, what the recorder records of a step, and that it leaves nothing behind."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_lab.runtime.profiling.memory import COMPONENTS, workspace_changes
from ddp_lab.runtime.profiling.memory_timeline import (
    build_timeline,
    model_states,
    peaks_of,
    record_step_memory,
    thinned,
)
from ddp_lab.strategy.account import ModelSize, expected_state_bytes
from ddp_lab.strategy.batches import StepData
from tests.models import build, make_batch
from tests.parity import NAMES, OPTIMIZERS, load, options_of
from tests.ranks import RankPool
from tests.tables import by_default

# The formula ---------------------------------------------------------------------------------------------------------


def test_expected_states_of_frozen_and_tied_parameters():
    module = build("tied")
    module.middle.requires_grad_(False)
    size = ModelSize.of(module)
    elements = 2 * 36 + 3 * 6  # first and last share a weight of 36, and have a bias each
    assert size == ModelSize(elements, elements - 42, 4 * elements, 4 * (elements - 42))
    expected = expected_state_bytes(size, 4, {"optimizer_state"})
    assert expected == {"parameters": 360, "gradients": 192, "optimizer_state": 96}


# The timeline, worked out by hand ------------------------------------------------------------------------------------


def states_of(parameters: int, gradients: int) -> dict[str, int]:
    return {"parameters": parameters, "gradients": gradients, "optimizer_state": 10, "buffers": 0}


def test_a_timeline_worked_out_by_hand():
    """Four samples of 1 ms each; between the second and the third 50 bytes come and go, which no sample sees."""
    ms = 1_000_000
    moments = [
        ("start", states_of(4, 0)),
        ("layer", states_of(8, 0)),
        ("gradient of layer", states_of(8, 5)),
        ("end", states_of(4, 5)),
    ]
    marks = {0: (10 * ms, 11 * ms), 1: (13 * ms, 14 * ms), 2: (18 * ms, 19 * ms), 3: (20 * ms, 21 * ms)}
    phases = [(12 * ms, 15 * ms, "forward"), (15 * ms, int(19.5 * ms), "backward")]
    curve = [(0, 14), (12 * ms, 20), (16 * ms, 70), (17 * ms, 25), (int(18.5 * ms), 24), (int(19.5 * ms), 19)]
    timeline = build_timeline(moments, marks, phases, curve)
    assert timeline["ms"] == [0, 2, 6, 7], "without what sampling took"
    assert timeline["where"] == ["start", "layer", "gradient of layer", "end"]
    assert timeline["allocated_bytes"] == [14, 20, 24, 19]
    assert timeline["highest_bytes"] == [14, 20, 70, 24]
    assert timeline["phases"] == [
        {"name": "forward", "start_ms": 1, "end_ms": 3},
        {"name": "backward", "start_ms": 3, "end_ms": 6.5},
    ]
    assert model_states(timeline) == [14, 18, 23, 19]
    assert peaks_of(timeline) == {
        "peak_parameters_bytes": 8,
        "peak_gradients_bytes": 5,
        "peak_optimizer_state_bytes": 10,
        "peak_buffers_bytes": 0,
        "peak_model_states_bytes": 23,
        "peak_bytes": 70,
        "peak_ms": 6,
        "peak_phase": "backward",
    }


def test_thinning_keeps_every_peak():
    generator = torch.Generator().manual_seed(0)
    columns = {f"{name}_bytes": torch.randint(1000, (997,), generator=generator).tolist() for name in COMPONENTS}
    allocated = torch.randint(5000, (997,), generator=generator).tolist()
    timeline = {"ms": list(range(997)), "where": [str(i) for i in range(997)], **columns, "phases": []}
    timeline |= {"allocated_bytes": allocated, "highest_bytes": [value + 7 for value in allocated]}
    thin = thinned(timeline, most=50)
    assert len(thin["ms"]) <= 50 + len(COMPONENTS) + 5 and thin["ms"][0] == 0 and thin["ms"][-1] == 996
    assert peaks_of(thin) == peaks_of(timeline)
    assert {len(values) for name, values in thin.items() if name != "phases"} == {len(thin["ms"])}


def report(ms: float, pointer: int, size: int, parent):
    fields = SimpleNamespace(ptr=pointer, alloc_size=size)
    return SimpleNamespace(start_time_ns=ms, extra_fields=fields, parent=parent)


def test_a_workspace_is_what_an_operator_frees_itself():
    """A product's packed operand, and what it makes by an operator of its own, but neither its output nor what Python
    or a collective allocates and frees."""
    product, collective = (SimpleNamespace(name=n, end_time_ns=10, parent=None) for n in ("aten::mm", "c10d::scatter"))
    factory = SimpleNamespace(name="aten::empty", end_time_ns=3, parent=product)
    outermost = SimpleNamespace(name="aten::empty", end_time_ns=22, parent=None)
    reports = [
        *(report(1, 1, 100, product), report(2, 2, 30, product), report(3, 3, 7, factory), report(4, 4, 5, collective)),
        *(report(5, 2, -30, product), report(6, 3, -7, product), report(7, 4, -5, collective)),
        *(report(11, 1, -100, None), report(21, 5, 9, outermost), report(22, 5, -9, None)),
    ]
    assert workspace_changes(reports) == [0, 30, 7, 0, -30, -7, 0, 0, 0, 0]


# Real steps ----------------------------------------------------------------------------------------------------------


def step_memory(choice: str, model: str, micro_batches: int) -> dict[str, Any]:
    """A recorded step; its record, what is held afterwards, and how many hooks were left behind."""
    module = build(model)
    strategy = load(choice)(module, OPTIMIZERS["adam"], options_of(choice))
    batches = [make_batch(model, 3, index) for index in range(micro_batches)]
    strategy.forward_backward(batches)
    strategy.step()
    before = count_hooks(strategy)
    recorded = record_step_memory(strategy, StepData(6 * micro_batches, batches), None)
    strategy.finish_parameter_synchronization()
    return {"recorded": recorded, "rest": strategy.memory_breakdown(), "hooks": count_hooks(strategy) - before}


def count_hooks(strategy) -> int:
    modules = sum(len(module._forward_hooks) for module in strategy.module.modules())
    return modules + sum(len(p._post_accumulate_grad_hooks or ()) for p in strategy.leaves())


@pytest.mark.parametrize(
    "choice", by_default(NAMES, "bucket_ddp_async", "pytorch_ddp", "zero2", "zero3", "pytorch_zero3")
)
def test_a_recorded_step(ranks: RankPool, choice):
    for answer in ranks.run(2, step_memory, choice, "llama", 2):
        recorded, at_rest = answer["recorded"], answer["rest"]
        timeline = recorded["timeline"]
        assert answer["hooks"] == 0
        assert {component: timeline[f"{component}_bytes"][-1] for component in COMPONENTS} == at_rest
        for component in COMPONENTS:
            assert recorded[f"peak_{component}_bytes"] >= at_rest[component]
        assert recorded["peak_model_states_bytes"] == max(model_states(timeline))
        assert recorded["peak_bytes"] == max(timeline["highest_bytes"]) >= recorded["peak_model_states_bytes"]
        has_buffers = choice in ("pytorch_ddp_plain", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3")
        assert any(timeline["communication_bytes"]) == has_buffers  # of others, buckets are the gradients
        assert timeline["ms"] == sorted(timeline["ms"])
        names = [phase["name"] for phase in timeline["phases"]]
        assert names == ["forward", "backward", "forward", "backward", "gradient_sync", "optimizer"]
        assert any(where.startswith("gradient of ") for where in timeline["where"])
        assert any("layers.1" in where for where in timeline["where"])

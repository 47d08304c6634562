"""Recording operators of a step, and costs from such records."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import DeviceType

from planner import costs, hardware, record
from planner.contracts import OperatorCall
from planner.interpolation import Point, held_out_error, interpolation
from planner.operator_times import MARK, OnPhase, Timed, seconds_by_number, with_overhead
from planner.recorded import RecordedCosts, entries_of
from training.data.synthetic import MLP
from training.errors import UserError

CPU = torch.device("cpu")
WIDTH = 96


def batch(samples: int) -> dict[str, Tensor]:
    return {"inputs": torch.ones(samples, WIDTH), "targets": torch.zeros(samples, WIDTH)}


def step_of(module: nn.Module, samples: int = 16, micro_batches: int = 1) -> record.TrainingStep:
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    return record.TrainingStep(module, [batch(samples)] * micro_batches, optimizer)


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    model = MLP(3, WIDTH)
    with mock.patch("planner.sweep.SIZES", (2**12, 2**14, 2**17)):
        return record.record([step_of(model), step_of(model, 64)], CPU, repeats=4, about="mlp")


@pytest.fixture
def path(content: dict[str, Any], tmp_path: Path) -> Path:
    record.write(tmp_path / "records" / "cpu.json", content)
    return tmp_path / "records" / "cpu.json"


def test_a_record_holds_forward_backward_and_the_fused_optimizer(content: dict[str, Any]) -> None:
    counted = Counter()
    for entry in content["operators"]:
        if entry["step"] == 0:
            counted[entry["name"]] += entry["count"]
    assert counted["aten.mm.default"] == 3 + 2 + 3  # forward, inputs' gradients but the first, weights' gradients
    assert counted["aten._fused_adamw_.default"] == 1
    assert counted["aten.relu.default"] == counted["aten.threshold_backward.default"] == 2
    assert not any(name.startswith(("prim.", "profiler.")) for name in counted)


def test_costs_add_up_to_the_step(content: dict[str, Any]) -> None:
    for number, check in enumerate(content["steps"]):
        total = sum(
            entry["count"] * (entry["seconds"] + entry["overhead_s"])
            for entry in content["operators"]
            if entry["step"] == number
        )
        assert total == pytest.approx(check["predicted_s"])
        assert check["operators_s"] > 0
        assert check["error_pct"] == pytest.approx(100 * (check["predicted_s"] / check["held_out_step_s"] - 1))


def test_every_field_is_documented(content: dict[str, Any]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "planner-costs.md").read_text()
    names = {*content, *content["device"], *content["steps"][0], *content["operators"][0]}
    assert {name for name in names if f"`{name}`" not in text} == set()


def test_accumulated_micro_batches_are_phases_of_their_own() -> None:
    phases: list[str] = []
    step_of(MLP(2, WIDTH), micro_batches=2)(phases.append)
    assert phases == ["forward", "backward", "forward", "backward", "optimizer"]


def entry(bytes_moved: int, seconds: float, phase: str = "forward") -> Timed:
    return Timed(OperatorCall("aten.add.Tensor", (), (), 0, bytes_moved), phase, seconds)


def test_what_is_left_of_a_phase_is_shared_out() -> None:
    """10 s of forward, 4 of them operators: 6 s for three operators and a view before the second one."""
    timed = [entry(8, 1.0), entry(0, 0.1), entry(8, 2.0), entry(8, 1.0), entry(8, 3.0, "backward")]
    answer = with_overhead(timed, {"forward": 10.0, "backward": 3.0, "optimizer": 0.0})
    assert [each.overhead_s for each in answer] == pytest.approx([1.5, 3.0, 1.5, 0.0])
    assert [each.seconds for each in answer] == pytest.approx([1.0, 2.0, 1.0, 3.0])


def test_operators_that_take_longer_than_their_phase_are_shortened() -> None:
    answer = with_overhead([entry(8, 1.0), entry(8, 3.0)], {"forward": 2.0})
    assert [each.seconds + each.overhead_s for each in answer] == pytest.approx([0.5, 1.5])


def event(name: str, kind: DeviceType, host_us: float, device_us: float = 0.0, inner: tuple[Any, ...] = ()) -> Any:
    took = SimpleNamespace(elapsed_us=lambda: host_us)
    return SimpleNamespace(
        name=name, device_type=kind, time_range=took, device_time_total=device_us, cpu_children=inner
    )


def test_on_cuda_kernels_count_and_marks_on_the_device_do_not() -> None:
    """An operator of two kernels, one that launches none, and one on the host; as the profiler gives them."""
    product = event("aten::mm", DeviceType.CPU, 9.0, 50.0)
    events = [
        event(f"{MARK}0", DeviceType.CPU, 30.0, 100.0, (product,)),
        event(f"{MARK}0", DeviceType.CUDA, 70.0),
        product,
        event(f"{MARK}1", DeviceType.CPU, 5.0, 0.0, (event("aten::view", DeviceType.CPU, 1.0),)),
    ]
    assert seconds_by_number(events, 2, on_cuda=True) == pytest.approx([50e-6, 0.0])
    assert seconds_by_number(events, 2, on_cuda=False) == pytest.approx([9e-6, 1e-6])


def test_a_step_that_changes_cannot_be_recorded() -> None:
    rows = iter(range(1, 1000))

    def step(on_phase: OnPhase) -> None:
        on_phase("forward")
        torch.ones(next(rows)).sum()

    with pytest.raises(UserError, match="other operators each time"):
        record.record([step], CPU, repeats=2, with_sweep=False)


def test_what_was_recorded_is_answered_as_it_was(
    path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(content["threads"]))
    known = costs.recorded(path, hardware.device("cpu"), "fp32")
    assert isinstance(known, RecordedCosts) and known.remarks == ()
    products = [each for each in entries_of(content) if each.call.name == "aten.mm.default"]
    assert len(products) >= 4
    for each in products:
        if sum(other.call.shapes == each.call.shapes for other in products) == 1:
            assert known.seconds(each.call) == pytest.approx(each.seconds + each.overhead_s)
            assert known.source_of(each.call) == "recorded"


def test_a_record_with_other_threads_than_a_rank_has_is_remarked_upon(
    path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(content["threads"] + 1))
    (remark,) = costs.recorded(path, hardware.device("cpu")).remarks
    assert f"with {content['threads']} threads, but a rank has {content['threads'] + 1}" in remark


def test_other_shapes_are_interpolated_and_other_operators_reckoned(path: Path) -> None:
    known = costs.recorded(path, hardware.device("cpu"))
    assert isinstance(known, RecordedCosts)
    size = WIDTH * WIDTH

    def product(samples: int, name: str = "aten.mm.default") -> OperatorCall:
        flops, moved = 2 * samples * size, 4 * (2 * samples * WIDTH + size)
        return OperatorCall(name, ((samples, WIDTH), (WIDTH, WIDTH)), ("float32",) * 2, flops, moved)

    assert known.source_of(product(16)) == "recorded"
    assert known.source_of(product(32)) == "interpolated"
    assert known.source_of(product(32, "aten.bmm.default")) == "roofline"
    assert known.source_of(replace(product(32), dtypes=("float8_e4m3fn",) * 2)) == "unknown"
    assert known.seconds(replace(product(32), dtypes=("float8_e4m3fn",) * 2)) is None
    between = known.seconds(product(32))
    huge, smaller = known.seconds(product(64 * 1000)), known.seconds(product(64))
    assert between is not None and huge is not None and smaller is not None
    assert 0 < between < huge and smaller < huge
    assert known.seconds(OperatorCall("aten.view.default", ((4,),), ("float32",), 0, 0)) == 0.0


def test_operators_of_strategies_are_there_without_having_been_in_the_step(path: Path) -> None:
    known = costs.recorded(path, hardware.device("cpu"))
    assert isinstance(known, RecordedCosts)
    copied = [
        known.seconds(OperatorCall("aten.copy_.default", ((n,), (n,)), ("float32",) * 2, 0, 8 * n))
        for n in (10**5, 10**7)
    ]
    assert copied[0] is not None and copied[1] is not None
    assert 0 < copied[0] < copied[1]


def test_records_of_something_else_are_refused_or_rescaled(
    path: Path, content: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(content["threads"]))
    cpu, l4 = hardware.device("cpu"), hardware.device("L4")
    with pytest.raises(UserError, match="not on L4"):
        costs.recorded(path, l4)
    with pytest.raises(UserError, match="in fp32, not in bf16"):
        costs.recorded(path, cpu, "bf16")
    rescaled = costs.recorded(path, l4, rescale=True)
    assert "not on L4" in rescaled.remarks[0]
    large = OperatorCall(
        "aten.mm.default", ((4096, 4096), (4096, 4096)), ("float32",) * 2, 2 * 4096**3, 3 * 4 * 4096**2
    )
    here, there = costs.recorded(path, cpu).seconds(large), rescaled.seconds(large)
    assert here is not None and there is not None and there < here / 10
    other = path.with_name("other.json")
    other.write_text(json.dumps({**content, "hardware": "2 x Abacus"}))
    with pytest.raises(UserError, match="recorded on 2 x Abacus"):
        costs.recorded(other, cpu)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("", "not JSON"),
        ("[]", "not a record"),
        ('{"what": "operators", "schema_version": 99}', "version 99"),
    ],
)
def test_files_that_are_no_record(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=says):
        costs.recorded(path, hardware.device("cpu"))


sizes = st.integers(1, 10**12)
points = st.lists(
    st.builds(Point, st.just(0) | sizes, sizes, st.floats(1e-7, 10), st.floats(1e-7, 10)),
    min_size=1,
    max_size=8,
    unique_by=lambda point: (point.flops, point.bytes_moved),
)


@given(points)
def test_interpolation_passes_through_its_points(known: list[Point]) -> None:
    between = interpolation(known)
    for point in known:
        answer = between.seconds(point.flops, point.bytes_moved, point.work_s)
        near = [other.seconds for other in known if work_is_near(other, point)]
        assert min(near) * 0.999 <= answer <= max(near) * 1.001


def work_is_near(one: Point, other: Point) -> bool:
    return all(
        abs(math.log1p(getattr(one, name)) - math.log1p(getattr(other, name))) < 1e-4
        for name in ("flops", "bytes_moved")
    )


@given(points, sizes, sizes)
def test_interpolation_answers_with_some_time(known: list[Point], flops: int, bytes_moved: int) -> None:
    assert interpolation(known).seconds(flops, bytes_moved, 1e-3) > 0


def test_interpolation_finds_what_points_were_made_from() -> None:
    def point(flops: int, moved: int) -> Point:
        return Point(flops, moved, 1e-3, 2e-6 + flops * 1e-11 + moved * 1e-10)

    known = [point(flops, flops // 100 + 10**5) for flops in (10**6, 10**7, 10**8, 10**9)]
    asked = point(3 * 10**7, 3 * 10**5 + 10**5)
    assert interpolation(known).seconds(asked.flops, asked.bytes_moved, 1e-3) == pytest.approx(asked.seconds, rel=0.01)
    assert max(held_out_error(known, index) for index in range(4)) < 0.05


def test_bytes_alone_are_joined_by_lines_and_go_on_like_the_roofline() -> None:
    between = interpolation([Point(0, 100, 1.0, 2.0), Point(0, 10000, 4.0, 8.0)])
    assert between.seconds(0, 1000, 2.0) == pytest.approx(4.0)  # half-way by ratio
    assert between.seconds(0, 20000, 6.0) == pytest.approx(12.0)
    assert between.seconds(0, 50, 0.5) == pytest.approx(1.0)


def test_one_point_scales_with_the_roofline() -> None:
    assert interpolation([Point(10, 10, 1.0, 3.0)]).seconds(20, 20, 2.0) == pytest.approx(6.0)


def test_a_model_whose_answer_is_an_object_is_recorded() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor, targets: Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=(self.layer(inputs) - targets).square().mean())

    made = record.record([step_of(Tiny())], CPU, repeats=2, with_sweep=False)
    assert {"aten.addmm.default", "aten.mean.default"} <= {each["name"] for each in made["operators"]}

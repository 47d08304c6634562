"""The planner's engine: a simulated step issues, holds and takes what the strategy says, what real ranks hold, and what
can be worked out by hand."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from planner.cluster import Cluster, Device, Link
from planner.contracts import CollectiveCost, Contention, OperatorCall, Setting, Simulated
from planner.memory import CUDA_BLOCK
from planner.simulate import CannotSimulate, Simulation, simulate
from tests.models import FEATURES, build, make_batch
from tests.parity import OPTIMIZERS, REFUSALS, all_choices, load
from tests.ranks import RankPool
from training.config import StrategyOptions
from training.errors import UserError
from training.strategy import Strategy

CHOICES = [choice for choice in all_choices() if not choice[1].startswith("deepspeed")]
SECONDS = 1e-3
LATENCY, RATE = 1e-2, 1e6


class EachOperator:
    """Every operator takes equally long."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds

    def seconds(self, call: OperatorCall) -> float:
        return self._seconds


class EachCollective:
    """Every collective takes a latency and a time for its payload."""

    def __init__(self, latency: float = LATENCY, rate: float = RATE) -> None:
        self._latency, self._rate = latency, rate

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        return CollectiveCost(self._latency, payload_bytes / self._rate, "link")


def cluster(ranks: int = 2, kind: str = "cpu") -> Cluster:
    device = Device("a device", kind, 2**40, {"float32": 1e12}, 1e11)
    return Cluster(device, 1, ranks, Link("link", LATENCY, RATE), backend="gloo" if kind == "cpu" else "nccl")


def setting(choice: str, model: str = "plain", micro_batches: int = 1, **options: Any) -> Setting:
    return Setting(
        choice,
        make_module=lambda: build(model),
        make_micro_batches=lambda: [make_batch(model, 3, index) for index in range(micro_batches)],
        make_optimizer=OPTIMIZERS["adam"],
        options=StrategyOptions(**options),
    )


def simulated(one: Setting, ranks: int = 2, kind: str = "cpu") -> Simulated:
    return simulate(one, cluster(ranks, kind), EachOperator(), EachCollective())


# Traffic -------------------------------------------------------------------------------------------------------------

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("plain", 1, {}),
    ("odd", 2, {"bucket_cap_mb": 0.001}),
    ("normed", 2, {}),
    ("frozen", 3, {}),
    ("tied", 1, {"precision": "bf16"}),
    ("branching", 2, {"find_unused_parameters": True}),
]


@pytest.mark.parametrize("choice", [name for _, name in CHOICES])
@pytest.mark.parametrize(("ranks", "kind"), [(2, "cpu"), (5, "cuda")])
def test_the_collectives_are_those_that_the_strategy_announces(choice: str, ranks: int, kind: str) -> None:
    for model, micro_batches, options in CASES:
        one = replace(setting(choice, model, micro_batches, **options), clip_grad_norm=1.0)
        simulation = Simulation(one, cluster(ranks, kind), EachOperator(), EachCollective(), Contention(), rank=1)
        if (choice, model) in REFUSALS:
            with pytest.raises(UserError, match=REFUSALS[choice, model]), simulation.running():
                pass
            continue
        with simulation.running():
            simulation.measure(time.perf_counter())
            assert isinstance(simulation.strategy, Strategy)
            announced: dict[str, tuple[int, int]] = {}
            for part in simulation.strategy.expected_traffic(micro_batches, clips=True):
                calls, size = announced.get(part.kind, (0, 0))
                announced[part.kind] = (calls + part.count, size + part.payload_bytes)
            assert simulation.issued_by_kind() == announced, f"{model}, {micro_batches} micro-batches"
            kinds = {issued.kind for issued, _ in simulation.recording.issued}
        assert ("scatter" in kinds) == (kind == "cpu" and choice in ("zero1", "zero2", "zero3")), "each backend's own"


# Memory --------------------------------------------------------------------------------------------------------------


def real_memory(choice: tuple[str, str]) -> dict[str, int]:
    strategy = load(choice)(build("plain"), OPTIMIZERS["adam"], StrategyOptions())
    for step in range(3):
        strategy.zero_grad()
        strategy.forward_backward([make_batch("plain", 3, step)])
        strategy.step()
    strategy.finish_parameter_synchronization()
    return strategy.memory_breakdown()


@pytest.mark.parametrize("choice", CHOICES, ids="-".join)
def test_resting_memory_is_what_real_ranks_hold(ranks: RankPool, choice: tuple[str, str]) -> None:
    for rank, real in enumerate(ranks.run(2, real_memory, choice)):
        held = simulate(setting(choice[1]), cluster(), EachOperator(), EachCollective(), rank=rank).memory.at_rest
        for component in ("parameters", "gradients", "optimizer_state"):
            assert held[component] == real[component], f"rank {rank}, {component}"
        assert held["activations"] == held["communication"] == 0


WIDE = 64


class Square(torch.nn.Module):
    """Two layers whose parameters divide by 2 ranks, so that nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, WIDE, bias=False)
        self.last = torch.nn.Linear(WIDE, 2, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(loss=(self.last(self.first(x)).sum(-1) - y).square().mean())


@pytest.mark.parametrize("choice", CHOICES, ids="-".join)
def test_resting_memory_is_what_the_formula_says(choice: tuple[str, str]) -> None:
    from training.memory import ModelSize

    one = replace(setting(choice[1]), make_module=Square, make_optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9))
    simulation = Simulation(one, cluster(), EachOperator(), EachCollective(), Contention(), rank=0)
    with simulation.running():
        held = simulation.measure(time.perf_counter()).memory.at_rest
        assert simulation.strategy is not None
        expected = simulation.strategy.expected_memory(ModelSize.of(Square()))
    expected["optimizer_state"] //= 2  # momentum alone
    if choice[1] == "pytorch_zero1":
        expected["optimizer_state"] = held["optimizer_state"]  # whole parameters are dealt out, and these differ in size
        assert held["optimizer_state"] in (4 * FEATURES * WIDE, 4 * 2 * WIDE)
    assert {component: held[component] for component in expected} == expected


def test_peak_memory_worked_out_by_hand() -> None:
    """One layer of 6 x 64 on 3 samples: at the end of backward there are parameters, gradient and one more gradient."""
    curve = simulated(replace(setting("simple_ddp"), make_module=Square)).memory
    states = 4 * (FEATURES + 2) * WIDE
    assert curve.at_peak["parameters"] == states
    assert curve.peak_bytes == max(sum(held.values()) for _, held in curve.points)
    assert curve.points[0][0] == 0.0 and [at for at, _ in curve.points] == sorted(at for at, _ in curve.points)
    assert all(min(held.values()) >= 0 for _, held in curve.points)
    # Adam's update holds, for the largest parameter, a square root and its quotient (`_single_tensor_adamw`).
    assert curve.at_peak["optimizer_state"] == 2 * states + 2 * 4


def test_cuda_rounds_every_allocation() -> None:
    held = simulated(setting("simple_ddp"), kind="cuda").memory.at_rest
    tensors = 6
    assert held["parameters"] == held["gradients"] == tensors * CUDA_BLOCK
    assert held["optimizer_state"] == 2 * tensors * CUDA_BLOCK, "step counters are kept on the host"


# Time ----------------------------------------------------------------------------------------------------------------


def gradient_seconds(calls: int) -> float:
    """What `calls` all-reduces of the gradients of `plain`, one after the other, and the two exchanges take."""
    elements, tensors = 6 * 11 + 11 + 11 * 7 + 7 + 7 + 1, 6
    return calls * LATENCY + 4 * elements / RATE + exchange_seconds(tensors)


def exchange_seconds(tensors: int) -> float:
    return 2 * LATENCY + 2 * (24 + 32 + 8 * tensors) / RATE


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_simple_ddp_is_compute_plus_communication(kind: str) -> None:
    step = simulated(setting("simple_ddp"), kind=kind)
    assert step.exposed_s == pytest.approx(gradient_seconds(6))
    assert step.step_time_s == pytest.approx(step.compute_s + step.exposed_s)
    operators = [span for span in step.spans if span.lane == "compute"]
    assert step.compute_s == pytest.approx(SECONDS * len(operators))


def test_without_compute_only_communication_is_left() -> None:
    for choice, calls in (("simple_ddp", 6), ("flat_ddp", 1), ("bucket_ddp_async", 1), ("pytorch_ddp", 1)):
        step = simulate(setting(choice), cluster(), EachOperator(0.0), EachCollective())
        assert step.step_time_s == pytest.approx(gradient_seconds(calls)), choice
        assert step.compute_s == 0.0 and step.exposed_s == pytest.approx(step.step_time_s)


@pytest.mark.parametrize("choice", [name for _, name in CHOICES])
def test_without_communication_only_compute_is_left(choice: str) -> None:
    step = simulate(setting(choice), cluster(), EachOperator(), EachCollective(0.0, float("inf")))
    assert step.step_time_s == pytest.approx(step.compute_s) and step.exposed_s == 0.0
    assert step.compute_s == pytest.approx(SECONDS * sum(span.lane == "compute" for span in step.spans))


@pytest.mark.parametrize("choice", [name for _, name in CHOICES])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_step_is_computing_or_waiting_and_overlap_is_bounded(choice: str, kind: str) -> None:
    step = simulated(setting(choice, micro_batches=2), kind=kind)
    assert step.step_time_s == pytest.approx(step.compute_s + step.exposed_s)
    assert step.exposed_s <= step.communication_s + 1e-9
    longest = max(step.compute_s, step.communication_s)
    assert longest - 1e-9 <= step.step_time_s <= step.compute_s + step.communication_s + 1e-9
    for span in step.spans:
        assert 0 <= span.start_s <= span.end_s <= step.step_time_s + 1e-9
    lanes: dict[str, float] = {}
    for span in step.spans:
        assert span.start_s >= lanes.get(span.lane, 0.0) - 1e-9, f"{span.lane}: one thing after the other"
        lanes[span.lane] = span.end_s


def test_what_overlaps_is_hidden() -> None:
    blocking, hidden = (simulated(setting(choice)) for choice in ("simple_ddp_hook", "simple_ddp_async"))
    assert blocking.compute_s == pytest.approx(hidden.compute_s)
    assert hidden.exposed_s < blocking.exposed_s - 3 * SECONDS
    contended = simulate(
        setting("simple_ddp_async"), cluster(), EachOperator(), EachCollective(), Contention(compute=1.5)
    )
    assert contended.compute_s > hidden.compute_s


def test_fsdp_overlaps_on_cuda_as_its_streams_do() -> None:
    """Gathers of the next unit and reductions of the last run beside compute; on CPU it blocks for each."""
    on_cpu, on_cuda = (simulated(setting("pytorch_zero3", "llama"), kind=kind) for kind in ("cpu", "cuda"))
    assert on_cpu.exposed_s == pytest.approx(on_cpu.communication_s, rel=0.02), "all but the first exchange"
    assert on_cuda.exposed_s < 0.8 * on_cuda.communication_s


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "options"),
    [
        ("bucket_ddp_async", {"overlap_optimizer": True}),
        ("bucket_ddp_async", {"compress": "bf16"}),
        ("pytorch_ddp", {"compress": "bf16"}),
        ("simple_ddp", {"compress": "powersgd"}),
        ("zero3", {"precision": "bf16"}),
    ],
)
def test_options_of_strategies_run(choice: str, options: dict[str, Any]) -> None:
    step = simulated(setting(choice, "llama", micro_batches=2, **options))
    assert step.step_time_s == pytest.approx(step.compute_s + step.exposed_s) and step.exposed_s > 0


def test_fitted_buckets_are_planned_on_the_pretended_link() -> None:
    """Where latency is nothing, every gradient may leave at once; where it is all there is, one bucket is best."""
    counts = []
    for latency, rate in ((1e-6, 1e4), (1.0, 1e12)):
        one = setting("bucket_ddp_async", bucket_cap_mb="auto")
        step = simulate(one, cluster(), EachOperator(), EachCollective(latency, rate))
        counts.append(sum(span.name == "all_reduce" for span in step.spans))
    assert counts[0] > counts[1] == 1


# What cannot be ------------------------------------------------------------------------------------------------------


class BranchesOnWeights(Square):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        if self.first(x).sum() > 0:
            x = -x
        return super().forward(x, y)


def test_a_model_that_branches_on_its_weights_is_refused_with_the_line() -> None:
    with pytest.raises(CannotSimulate, match=r"depends on its weights \(.*test_planner_engine\.py:\d+\)"):
        simulated(replace(setting("simple_ddp"), make_module=BranchesOnWeights))


class CountsOnWeights(Square):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = self.first(x)
        return super().forward(x, y + hidden[hidden > 0].sum())


def test_a_model_whose_shapes_depend_on_its_weights_is_refused() -> None:
    with pytest.raises(CannotSimulate, match="simple_ddp: .*nonzero"):
        simulated(replace(setting("simple_ddp"), make_module=CountsOnWeights))


@pytest.mark.parametrize(("choice", "said"), [("deepspeed_zero2", "DeepSpeed"), ("zero9", "no such choice")])
def test_choices_that_cannot_be_are_refused(choice: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        simulated(setting(choice))


def test_operators_without_costs_are_listed() -> None:
    class AllButProducts(EachOperator):
        def seconds(self, call: OperatorCall) -> float | None:  # type: ignore[override]
            return None if call.name == "aten.addmm.default" else SECONDS

    step = simulate(setting("simple_ddp"), cluster(), AllButProducts(), EachCollective())
    assert step.without_costs == {"aten.addmm.default": 3}
    assert not any(span.name == "aten.addmm.default" for span in step.spans)


# What is left behind -------------------------------------------------------------------------------------------------


def everything_global() -> list[Any]:
    optimizer = __import__("torch.optim.optimizer", fromlist=["x"])
    return [
        dist.is_initialized(),
        dict(c10d._pg_map),
        dict(c10d._pg_names),
        c10d._world.group_count,
        torch.UntypedStorage.resize_,
        torch.UntypedStorage.data_ptr,
        torch.cpu.Stream,
        torch.cpu.current_stream,
        optimizer._get_foreach_kernels_supported_devices,
        list(optimizer._foreach_supported_types),
        torch._C._len_torch_dispatch_stack(),
        type(torch.empty(1)),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    before = everything_global()
    make: Callable[[], Any] = BranchesOnWeights if fails else Square
    for kind in ("cpu", "cuda"):
        try:
            simulated(replace(setting("zero3"), make_module=make), kind=kind)
        except CannotSimulate:
            assert fails
    assert everything_global() == before


def around_a_simulation() -> tuple[float, float]:
    """A sum over real ranks before and after a simulation in the same process, and in a group made after it."""
    before = torch.ones(1)
    dist.all_reduce(before)
    simulated(setting("zero3"), ranks=8)
    gc.collect()
    after = torch.ones(1)
    dist.all_reduce(after, group=dist.new_group())
    strategy = load(("sharding", "zero3"))(build("plain"), OPTIMIZERS["adam"], StrategyOptions())
    strategy.forward_backward([make_batch("plain", 3, 0)])
    strategy.step()
    return before.item(), after.item()


def test_real_ranks_go_on_after_a_simulation(ranks: RankPool) -> None:
    assert ranks.run(2, around_a_simulation) == [(2.0, 2.0)] * 2

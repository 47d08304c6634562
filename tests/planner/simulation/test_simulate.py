"""The planner's engine: a simulated step issues, holds and takes what the strategy says, what real ranks hold, and what
can be worked out by hand."""

import gc
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.planner.contracts import MODEL_STATES, CollectiveCost, Costs, OperatorCall, Setting, Simulated
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.calls import tensors_in
from ddp_lab.planner.costs.cluster import Cluster, Device, Link
from ddp_lab.planner.simulation import operators
from ddp_lab.planner.simulation.memory import CUDA_BLOCK
from ddp_lab.planner.simulation.network import CannotSimulate, StepObserver
from ddp_lab.planner.simulation.simulate import Simulation, adamw, simulate
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.profiling.memory_timeline import record_step_memory
from ddp_lab.strategy.account import storage_bytes
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.strategy import Strategy
from tests.models import FEATURES, build, llama_classifier, make_batch
from tests.parity import NAMES, REFUSALS, load
from tests.ranks import RankPool
from tests.tables import by_default, each_row
from tests.traffic import Totals, add, announced, sent

CHOICES = [choice for choice in NAMES if not choice.startswith("deepspeed")]
SECONDS = 1e-3
LATENCY, RATE = 1e-2, 1e6


@dataclass
class EachOperator:
    """Every operator takes equally long."""

    each_s: float = SECONDS

    def seconds(self, call: OperatorCall) -> float:
        return self.each_s


class EachCollective:
    """Every collective takes a latency and a time for its payload."""

    def cost(self, kind: str, payload_bytes: int, ranks: tuple[int, ...]) -> CollectiveCost:
        return CollectiveCost(LATENCY, payload_bytes / RATE, "link")


COSTS = Costs(EachOperator(), EachCollective())


def cluster(ranks: int = 2, kind: str = "cpu") -> Cluster:
    device = Device("a device", kind, 2**40, {"float32": 1e12}, {"contiguous": 1e11})
    return Cluster(device, 1, ranks, Link("link", LATENCY, RATE), backend="gloo" if kind == "cpu" else "nccl")


def setting(choice: str, model: str = "plain", micro_batches: int = 1, **options) -> Setting:
    batches = lambda: [make_batch(model, 3, index) for index in range(micro_batches)]  # noqa: E731
    return Setting(RunConfig.of(choice=choice, **options), lambda: build(model), batches)


def simulated(
    run: Setting, ranks: int = 2, kind: str = "cpu", seconds: float = SECONDS, contention: float = 1.0
) -> Simulated:
    costs = Costs(EachOperator(seconds), EachCollective(), contention)
    return simulate(run, cluster(ranks, kind), costs)


def observed(run: Setting, kind: str, seconds: float = SECONDS) -> tuple[Simulated, StepObserver]:
    """The step, and what happened in it."""
    simulation = Simulation(run, cluster(2, kind), Costs(EachOperator(seconds), EachCollective()))
    with simulation.running():
        return simulation.measure(), simulation.observer


# Traffic -------------------------------------------------------------------------------------------------------------

CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("plain", 1, {}),
    ("odd", 2, {"bucket_cap_mb": 0.001}),
    ("normed", 2, {}),
    ("frozen", 3, {}),
    ("tied", 1, {"precision": "bf16"}),
    ("plain", 2, {"precision": "fp16"}),
    ("branching", 2, {"find_unused_parameters": True}),
    ("deep", 2, {"activation_checkpointing": "block"}),
]


EVERY = [(choice, case, kind) for choice in CHOICES for case in range(len(CASES)) for kind in ("cpu", "cuda")]


@pytest.mark.parametrize(
    "row",
    by_default(EVERY, *EVERY[::17]),  # every choice, every case and both kinds
)
def test_the_collectives_are_those_that_the_strategy_announces(row):
    choice, case, kind = row
    model, micro_batches, options = CASES[case]
    run = setting(choice, model, micro_batches, clip_grad_norm=1.0, **options)
    simulation = Simulation(run, cluster(2 if kind == "cpu" else 5, kind), COSTS, rank=1)
    if (choice, model) in REFUSALS:
        with pytest.raises(UserError, match=REFUSALS[choice, model]), simulation.running():
            pass
        return
    with simulation.running():
        step = simulation.measure()
        assert isinstance(simulation.strategy, Strategy)
        totals = Totals()
        for issued in simulation.observer.issued:
            add(totals, (issued.kind, len(issued.ranks)), 1, issued.payload_bytes)
        expected, least = announced(simulation.strategy, micro_batches, clips=True)
    assert totals == expected if least is None else sent(totals) > least - 1
    assert any(kind == "scatter" for kind, _ in totals) == (kind == "cpu" and choice in ("zero1", "zero2", "zero3")), (
        "each backend's own"
    )
    require_whole(step, simulation.observer)


def require_whole(step: Simulated, observer: StepObserver):
    """A rank computes or waits; nothing overlaps itself; what overlaps cannot save more than the shorter of the two."""
    assert step.step_time_s == pytest.approx(step.compute_s + step.exposed_s)
    assert step.exposed_s <= step.communication_s + 1e-9
    longest = max(step.compute_s, step.communication_s)
    assert longest - 1e-9 <= step.step_time_s <= step.compute_s + step.communication_s + 1e-9
    until_s = 0.0
    for _, _, start, end in observer.computed:
        assert until_s - 1e-9 <= start <= end, "one thing after the other"
        until_s = end


def unknown(func, args, kwargs, inputs: list[Tensor]):
    inputs += tensors_in((*args, *kwargs.values()))


@each_row(
    ("choice", "options"),
    [("zero3", {"activation_checkpointing": "block", "precision": "bf16"}), ("pytorch_zero3", {})],
)
def test_an_operator_that_ran_before_answers_as_it_did(choice, options):
    run = replace(
        setting(choice, **options), make_module=llama_classifier, make_micro_batches=lambda: two_batches(3)[:1]
    )
    with mock.patch.object(operators, "key_of", unknown):
        _, expected = observed(run, "cuda"), observed(run, "cuda")  # DTensor tries things out the first time
    for again in range(2):
        step, observer = observed(run, "cuda")
        assert (step, observer.computed) == (expected[0], expected[1].computed), again


# Memory --------------------------------------------------------------------------------------------------------------


def real_memory(choice: str) -> dict[str, int]:
    strategy = load(choice)(build("plain"), adamw, StrategyOptions())
    for step in range(3):
        strategy.zero_grad()
        strategy.forward_backward([make_batch("plain", 3, step)])
        strategy.step()
    strategy.finish_parameter_synchronization()
    return strategy.memory_breakdown()


@pytest.mark.parametrize("choice", by_default(CHOICES, "bucket_ddp_async", "zero1", "zero3", "pytorch_zero3"))
def test_resting_memory_is_what_real_ranks_hold(ranks: RankPool, choice):
    _, real = ranks.run(2, real_memory, choice)
    planned = simulate(setting(choice), cluster(), COSTS, rank=1).memory.at_rest
    assert {component: planned[component] for component in MODEL_STATES} == {name: real[name] for name in MODEL_STATES}
    assert planned["activations"] == planned["communication"] == 0


WIDE = 64


class Square(torch.nn.Module):
    """Two layers whose parameters divide by 2 ranks, so that nothing is padded."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, WIDE, bias=False)
        self.last = torch.nn.Linear(WIDE, 2, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor):
        return SimpleNamespace(loss=(self.last(self.first(x)).sum(-1) - y).square().mean())


def test_cuda_rounds_every_allocation():
    at_rest = simulated(setting("simple_ddp"), kind="cuda").memory.at_rest
    tensors = 6
    assert at_rest["parameters"] == at_rest["gradients"] == tensors * CUDA_BLOCK
    assert at_rest["optimizer_state"] == 3 * tensors * CUDA_BLOCK, "a fused optimizer keeps step counters there, too"


def two_batches(samples: int) -> list[dict[str, Tensor]]:
    return [make_batch("llama", samples, seed) for seed in range(2)]


RECOMPUTED = ("block", "selective")
BF16 = {"param_dtype": "bf16"}


def peak_of_real_ranks(choice: str, options: dict[str, str], samples: int) -> tuple[int, int]:
    """Most bytes allocated in a step, and those of the batch, which were there before."""
    strategy = load(choice)(llama_classifier(), adamw, StrategyOptions(**options))  # type: ignore[arg-type]
    batches = two_batches(samples)
    for _ in range(2):  # in the first, DDP has not settled
        recorded = record_step_memory(strategy, StepData(samples * len(batches), batches), None)
    assert recorded is not None
    return recorded["peak_bytes"], storage_bytes(tensor for batch in batches for tensor in batch.values())


PEAKS: list[tuple[str, dict[str, str]]] = [
    *((choice, {"activation_checkpointing": how}) for choice in CHOICES for how in RECOMPUTED),
    *((choice, {}) for choice in CHOICES),
    *((choice, {"offload": "optimizer"}) for choice in ("zero1", "zero2", "zero3")),
    *((choice, BF16) for choice in ("zero1", "zero2", "zero3", "pytorch_zero3")),
    *((choice, BF16 | {"offload": "optimizer"}) for choice in ("zero1", "zero2", "zero3")),
    ("zero3", BF16 | {"offload": "parameters"}),
]
TRIED_PEAKS = (
    ("zero2", BF16 | {"offload": "optimizer"}),
    ("zero3", {"activation_checkpointing": "block"}),
    ("pytorch_zero3", BF16),
)


@pytest.mark.parametrize("case", by_default(PEAKS, *TRIED_PEAKS))
def test_peak_memory_is_what_real_ranks_reach(ranks: RankPool, case):
    """Gloo's own tensors count, such as the one with all that a scatter's root sends. States of random generators do
    not: a recomputed block keeps 5056 bytes for the CPU's, which is nothing beside larger batches."""
    choice, options = case
    samples = 400 if "activation_checkpointing" in options else 3
    (reached, batch), _ = ranks.run(2, peak_of_real_ranks, choice, options, samples)
    run = setting(choice, "llama", micro_batches=2, **options)
    predicted = simulated(replace(run, make_micro_batches=lambda: two_batches(samples))).memory.peak_bytes
    assert predicted - batch == pytest.approx(reached, rel=0.005)


def test_what_is_offloaded_is_on_no_gpu_and_takes_the_host_s_time():
    """Of `Square`, a rank's half of the states; the host moves at least what Adam reads and writes."""
    plain, offloaded = (
        simulated(replace(setting("zero3", offload=offload), make_module=Square), kind="cuda", seconds=0.0)
        for offload in (None, "optimizer")
    )
    assert plain.memory.at_rest["optimizer_state"] > 0 == offloaded.memory.at_rest["optimizer_state"]
    elements = (FEATURES + 2) * WIDE // 2
    assert plain.compute_s == 0.0
    assert offloaded.compute_s >= 4 * 6 * elements / hardware.host(2).bytes_per_s


# Time ----------------------------------------------------------------------------------------------------------------


ROWS_BYTES, SHARES_BYTES = 2 * 9 * 8, 2 * 8
"""Of the exchange of two ranks; and of loss and norm alone, which CUDA adds up by an all-reduce."""


def gradient_seconds(calls: int, exchange_bytes: int = ROWS_BYTES) -> float:
    """What `calls` all-reduces of the gradients of `plain`, one after the other, and the exchange take."""
    elements = 6 * 11 + 11 + 11 * 7 + 7 + 7 + 1
    return calls * LATENCY + 4 * elements / RATE + LATENCY + exchange_bytes / RATE


@each_row("kind", ["cpu", "cuda"])
def test_simple_ddp_is_compute_plus_communication(kind):
    """On CUDA the hosts' exchange hides behind the device's."""
    step, observer = observed(setting("simple_ddp"), kind=kind)
    assert step.exposed_s == pytest.approx(gradient_seconds(6, ROWS_BYTES if kind == "cpu" else SHARES_BYTES))
    assert step.step_time_s == pytest.approx(step.compute_s + step.exposed_s)
    assert step.compute_s == pytest.approx(SECONDS * len(observer.computed))


def test_what_overlaps_is_hidden():
    blocking, hidden = (simulated(setting(choice)) for choice in ("simple_ddp_hook", "simple_ddp_async"))
    assert blocking.compute_s == pytest.approx(hidden.compute_s)
    assert hidden.exposed_s < blocking.exposed_s - 3 * SECONDS
    assert simulated(setting("simple_ddp_async"), contention=1.5).compute_s > hidden.compute_s


def test_fsdp_gathers_in_forward_beside_the_block_before():
    """Its streams wait for that block's copy out, not for the block: all gathers but the first two are hidden."""
    _, observer = observed(setting("pytorch_zero3", "llama"), kind="cuda", seconds=1e-2)
    forward = [(start, end) for _, phase, start, end in observer.computed if phase == "forward"]
    flights = [call.flight for call in observer.issued if (call.kind, call.backend) == ("all_gather", "nccl")]
    times = [(f.began_s, f.ended_s) for f in flights if f.began_s is not None and f.ended_s is not None]
    gathers = [(begin, end) for begin, end in times if forward[0][0] <= begin and end <= forward[-1][1]]
    assert len(gathers) >= 3
    for begin, end in gathers[2:]:
        beside = sum(max(0.0, min(end, finish) - max(begin, start)) for _, _, start, finish in observer.computed)
        assert beside == pytest.approx(end - begin, rel=0.05)


# What cannot be ------------------------------------------------------------------------------------------------------


class BranchesOnWeights(Square):
    def forward(self, x: Tensor, y: Tensor):
        return super().forward(-x if self.first(x).sum() > 0 else x, y)


class CountsOnWeights(Square):
    def forward(self, x: Tensor, y: Tensor):
        hidden = self.first(x)
        return super().forward(x, y + hidden[hidden > 0].sum())


class Fails(Square):
    def forward(self, x: Tensor, y: Tensor):
        raise ValueError("all samples must end\nalike")


@each_row(
    ("make", "message"),
    [
        (BranchesOnWeights, r"depends on its weights \(.*test_simulate\.py:\d+\)"),
        (CountsOnWeights, "simple_ddp: .*nonzero"),
        (Fails, "^the model fails on the plan's samples: ValueError: all samples must end$"),
    ],
)
def test_models_that_cannot_run_without_data(make, message):
    with pytest.raises(CannotSimulate, match=message):
        simulated(replace(setting("simple_ddp"), make_module=make))


# What is left behind -------------------------------------------------------------------------------------------------


def alive_around_simulations() -> int:
    """Sums over real ranks and trains around two simulations, of which one fails; answers with those still alive."""
    assert sum_of(None) == 2.0
    simulated(setting("zero3"), ranks=8)
    with pytest.raises(CannotSimulate):
        simulated(replace(setting("zero3"), make_module=BranchesOnWeights), kind="cuda")
    gc.collect()
    assert sum_of(dist.new_group()) == 2.0
    strategy = load("zero3")(build("plain"), adamw, StrategyOptions())
    strategy.forward_backward([make_batch("plain", 3, 0)])
    strategy.step()
    return sum(isinstance(item, Simulation) for item in gc.get_objects())


def sum_of(group: dist.ProcessGroup | None) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_real_ranks_go_on_after_simulations(ranks: RankPool):
    assert ranks.run(2, alive_around_simulations) == [0, 0]

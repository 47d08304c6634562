"""What a benchmark runs: strategies through the project's training loop, and loops by hand beside them. A choice may
carry settings of its own, as in `pytorch_ddp:bucket_cap_mb=1`."""

import re
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import tensor_parallel
from benchmarks.rounds import largest
from ddp_lab.families import EVERY
from ddp_lab.runtime.build import build_strategy, cut_over_ranks, seed_everything
from ddp_lab.runtime.cli import exit_with_error, unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.batches import batches_of_steps
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.data.workloads import build_workload
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import UserError, require
from ddp_lab.runtime.loop import train
from ddp_lab.runtime.profiling.memory import allocations_of, counting_on_all_threads
from ddp_lab.runtime.settings.field import flags_of, kind_of
from ddp_lab.runtime.settings.mesh import MeshSettings
from ddp_lab.strategy.account import Collective, ModelSize, storage_bytes
from ddp_lab.strategy.batches import MicroBatch
from ddp_lab.strategy.building import autocast
from ddp_lab.strategy.modules import find_blocks
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.replicated import ReplicatedStrategy
from reference.dtensors import local
from reference.pytorch_ddp import PyTorchDDP

LOCAL, RUNTIME = "local", "runtime"
"""A step without communication, as a person writes it for one device; and one through this project's training loop,
with the small exchanges of that loop, in which no gradient is sent."""
BARE = ("bare_loop", "bare_zero1", "bare_zero2", "bare_zero3")
"""Loops without this project's, as torch's tutorials write them: around PyTorch DDP, DDP with ZeroRedundancyOptimizer,
FSDP2 that keeps blocks until backward, and FSDP2 that reshards them after forward."""
NAMES = [*EVERY.names, LOCAL, RUNTIME, *BARE]
PLAIN = (LOCAL, *BARE)
"""Loops written by hand, which have no setting but their precision."""
SETTINGS = {field.name: field for field in (*flags_of(MeshSettings), *flags_of(StrategyOptions))}
"""What may differ between the choices of one benchmark."""


def parse_variant(text: str) -> dict[str, object]:
    """Fields of `RunConfig` from `choice` or `choice:setting=value:setting=value`. A mesh is written as in names of
    folders: `mesh=dp2-tp2`.

    Leaves the process with one line where the text makes no sense.
    """
    choice, *pairs = re.split(r":(?=\w+=)", text)  # a value may have colons
    if choice not in NAMES:
        exit_with_error(unknown_name("strategy", choice, NAMES))
    fields: dict[str, object] = {"choice": choice}
    try:
        for pair in pairs:
            name, _, value = pair.partition("=")
            if name not in SETTINGS:
                raise UserError(unknown_name("setting", name, SETTINGS))
            fields[name] = value_of(SETTINGS[name], value)
        if choice in PLAIN:
            require(fields.keys() <= {"choice", "precision"}, choice, "", "without a setting but precision")
        RunConfig.of(**fields)
    except UserError as error:
        exit_with_error(f"{text}: {error}")
    return fields


def value_of(field: Field[Any], text: str) -> object:
    """The value of a setting, from its text.

    Raises:
        UserError: the setting cannot have this value.
    """
    if field.name == "mesh":
        text = re.sub(r"-?([a-z]+)(\d+)", r",\1=\2", text).lstrip(",")
    if field.type is bool:
        require(text in ("on", "off"), field.name, text, "on or off")
        return text == "on"
    try:
        return (field.metadata["normal"] or kind_of(field))(text)
    except ValueError:
        raise UserError(f"{field.name} cannot be '{text}'") from None


class Unreduced(ReplicatedStrategy):
    """`RUNTIME`: each rank keeps its own gradients."""

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.buffer_traffic()


@dataclass(frozen=True)
class Runner:
    """One choice, ready to run.

    Attributes:
        elements: Of the model's parameters.
        steps: Run this many optimizer steps, to the end of all their communication.
        drop_gradients: Free them, as the next step would before its forward pass.
        state_bytes: Count the bytes that model states hold now.
        expected_state_bytes: The formula's bytes after a step, gradients not yet dropped; None of a loop by hand.
        wire_bytes: Bytes that a rank sends in a step, by the formulas of its collectives, or None if there are none;
            needs one step to have run.
        settling_steps: How many first steps differ from later ones; at least one.
        notes: What the strategy says of its own decisions.
    """

    elements: int
    steps: Callable[[int], None]
    drop_gradients: Callable[[], None]
    state_bytes: Callable[[], int]
    settling_steps: int = 1
    expected_state_bytes: int | None = None
    wire_bytes: Callable[[], float | None] = lambda: None
    notes: Sequence[str] = ()


def make_runner(config: RunConfig, ranks: RankContext) -> Runner:
    """`config.choice` on one global batch of its workload, the same for every choice."""
    seed_everything(0, rank=0)
    workload = build_workload(config)
    step = next(batches_of_steps(config, workload, ranks, 1))
    if config.choice in PLAIN:
        return plain_runner(config, workload, step.micro_batches, ranks)
    elements = ModelSize.of(workload.model).elements
    model_parallel = cut_over_ranks(config, workload, ranks, tensor_parallel.REGISTRY.load_parallelize)
    model_size = ModelSize.of(workload.model)
    strategy_class = Unreduced if config.choice == RUNTIME else EVERY.load(config.choice)
    group = ranks.groups.data if ranks.groups else dist.group.WORLD
    strategy = build_strategy(config, workload, ranks, strategy_class, group, model_parallel)

    def steps(count: int) -> None:
        train(strategy, [step] * count)
        strategy.finish_parameter_synchronization()

    def wire_bytes() -> float | None:
        traffic = strategy.expected_traffic(config.grad_accum_steps)
        return None if any(part.at_least for part in traffic) else sum(part.wire_bytes for part in traffic)

    return Runner(
        elements=elements,
        steps=steps,
        drop_gradients=strategy.zero_grad,
        state_bytes=lambda: sum(strategy.memory_breakdown().values()),
        expected_state_bytes=sum(strategy.expected_memory(model_size).values()),
        wire_bytes=lambda: sum(call.wire_bytes for call in strategy.expected_traffic(config.grad_accum_steps)),
        settling_steps=max(1, strategy.settling_steps),
        notes=strategy.notes,
    )


def plain_runner(config: RunConfig, workload: Workload, batches: Sequence[MicroBatch], ranks: RankContext) -> Runner:
    """One of `PLAIN`, as a person writes it by hand."""
    # the model
    name, size = config.choice, ModelSize.of(workload.model)
    module, everyone = workload.model.to(ranks.device), dist.group.WORLD
    settings = {"lr": workload.learning_rate, "fused": True}
    model: Any = module
    if name in ("bare_loop", "bare_zero1"):
        model = DistributedDataParallel(module, process_group=everyone, **PyTorchDDP.settings)
    elif name in BARE:
        mesh, reshards = DeviceMesh.from_group(everyone, ranks.device.type), name == "bare_zero3"
        for block in find_blocks(module):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
        fully_shard(module, mesh=mesh)
    # the optimizer
    optimizer: torch.optim.Optimizer
    if name == "bare_zero1":
        packed: dict[str, Any] = {"parameters_as_bucket_view": True, **settings}
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, everyone, **packed)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), **settings)

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            for index, batch in enumerate(batches):
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = index == len(batches) - 1
                with autocast(ranks.device.type, config.strategy.precision):
                    loss = model(**batch).loss / len(batches)
                loss.backward()
            optimizer.step()

    def state_bytes() -> int:
        local_optimizer = getattr(optimizer, "optim", optimizer)
        states = [value for entry in local_optimizer.state.values() for value in entry.values()]
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return storage_bytes(map(local, [*module.parameters(), *module.buffers(), *gradients, *states]))

    is_ddp = isinstance(model, DistributedDataParallel)  # it rebuilds its buckets in the second step
    return Runner(size.elements, steps, optimizer.zero_grad, state_bytes, settling_steps=2 if is_ddp else 1)


def measure_memory(runner: Runner, device: torch.device) -> tuple[int, int]:
    """Bytes on the rank that holds most: model states after a step, and all tensors at the peak of one. Collective.

    The step runs once the choice has settled and optimizer states exist; gradients are dropped before it.
    """
    with counting_on_all_threads():  # counts all steps, since it cannot count a tensor whose allocation it missed
        runner.steps(runner.settling_steps)
        resting = runner.state_bytes()
        runner.drop_gradients()
        before = runner.state_bytes()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            allocated = torch.cuda.memory_allocated(device)
            runner.steps(1)
            added = torch.cuda.max_memory_allocated(device) - allocated
        else:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                runner.steps(1)
            added = allocations_of(profiler).peak
    return round(largest(resting, device)), round(largest(before + added, device))


class CountLaunches(TorchDispatchMode):
    """Counts the operators of this thread that run a kernel, or send."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        makes_view = any(result.alias_info and not result.alias_info.is_write for result in func._schema.returns)
        self.count += not (makes_view or "empty" in func.name() or func.namespace == "profiler")
        return func(*args, **(kwargs or {}))


def count_operators(runner: Runner) -> int:
    """The number of operators in a step."""
    with CountLaunches() as counter:
        runner.steps(1)
    return counter.count

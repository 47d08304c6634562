"""One optimizer step of a strategy on a pretended cluster: its own code, on tensors without data."""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from statistics import fmean
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ddp_lab.collectives.kinds import MESSAGE
from ddp_lab.planner.contracts import MODEL_STATES, Costs, Setting, Simulated
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.costs.links import LinkCosts
from ddp_lab.planner.model import first_line
from ddp_lab.planner.simulation.clock import Clock, ComputeStream, SideStream
from ddp_lab.planner.simulation.memory import HOST, MemoryTracker
from ddp_lab.planner.simulation.meshed import Forms, evenly_routed, groups_of, load, on_mesh, pipeline_of, speaker
from ddp_lab.planner.simulation.network import CannotSimulate, Issued, Network, StepObserver, TimedGroup
from ddp_lab.planner.simulation.operators import UNSIMULATED, PretendedDevice, without_data
from ddp_lab.planner.simulation.side_by_side import side_by_side
from ddp_lab.pretended.device import Streams, pretended_streams
from ddp_lab.pretended.group import default_group
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.loop import train
from ddp_lab.runtime.mesh import PIPELINE
from ddp_lab.strategy.batches import StepData, sample_count
from ddp_lab.strategy.strategy import Strategy
from pipeline_parallel.stage import Handover, Stages

NEEDS_DATA = (
    "torch.distributed.distributed_c10d:_object_to_tensor",
    "torch.distributed.distributed_c10d:_tensor_to_object",
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
)
"""Functions that read results, as `module that calls it:name`. They run on tensors that hold data."""


def simulate(setting: Setting, cluster: Cluster, costs: Costs, rank: int | None = None) -> Simulated:
    """One optimizer step of `rank` (default: `speaker`), from the end of the step before to its own end, once the
    strategy has settled.

    With a pipeline, all of its ranks are simulated. Times are means over them, and memory is that of the rank that
    holds most.

    `setting.make_module` is called where tensors hold no data; `setting.make_micro_batches` where they do."""
    results: list[Simulated] = []
    forms: Forms = {}
    notes, begins = [], []
    gc.freeze()  # what is older need not be searched
    try:
        for stage_rank in pipeline_of(setting.config, speaker(setting.config) if rank is None else rank):
            simulation = Simulation(setting, cluster, costs, stage_rank, forms)
            with simulation.running():
                results.append(simulation.measure())
            notes.append(simulation.clock.notes)
            begins.append(simulation.begins_at)
    except UNSIMULATED as error:
        raise CannotSimulate(
            f"{setting.config.choice}: {first_line(error)}, which needs data that a simulation has not"
        ) from error
    finally:
        gc.collect()  # strategies are in reference cycles, which keep all their tensors
        gc.unfreeze()
    if len(results) == 1:
        return results[0]
    begun, ended = zip(*side_by_side(notes, begins, costs), strict=True)
    step_s = max(now_s for now_s, *_ in ended) - max(now_s for now_s, *_ in begun)
    busy_s, in_flight_s = (fmean(end[of] - begin[of] for begin, end in zip(begun, ended, strict=True)) for of in (1, 2))
    largest = max(range(len(results)), key=lambda place: results[place].memory.peak_bytes)
    without = {name: count for result in results for name, count in result.without_costs.items()}
    return Simulated(step_s, busy_s, in_flight_s, step_s - busy_s, results[largest].memory, without, largest)


class Simulation:
    """A pretended rank with a strategy on it. For the arguments see `simulate`."""

    def __init__(
        self, setting: Setting, cluster: Cluster, costs: Costs, rank: int = 0, forms: Forms | None = None
    ) -> None:
        self.setting, self.rank, self.forms = setting, rank, {} if forms is None else forms
        self.clock = Clock(costs.contention, costs.host_s)
        self.observer = StepObserver()
        self.is_cuda = cluster.device.kind == "cuda"
        self.streams = Streams(ComputeStream(self.clock), SideStream)
        self.memory = MemoryTracker(self.is_cuda)
        by_backend = {"gloo": LinkCosts(host_of(cluster)), cluster.backend: costs.collectives}
        self.network = Network(cluster, by_backend, self.clock, self.streams, self._on_issue)
        guards = self.network.guards
        host = hardware.host(cluster.ranks_per_node)
        self.device = PretendedDevice(
            self.clock, costs.operators, self.memory, self.is_cuda, self.observer, guards, host
        )
        self.strategy: Strategy | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this context the strategy exists, and everything is pretended."""
        config = self.setting.config
        make_strategy = load(config)
        # Within FakeTensorMode, the first backward of a process starts a thread for a GPU, after which none can fork.
        torch.ones(1, requires_grad=True).backward()
        self.micro_batches = list(self.setting.make_micro_batches())
        with ExitStack() as stack:
            for place in NEEDS_DATA:
                holder, _, name = place.partition(":")
                stack.enter_context(on_data(import_module(holder), name))
            cluster = self.network.cluster
            backend = f"cpu:{cluster.backend}"  # tensors without data are said to lie on the CPU
            stack.enter_context(default_group(TimedGroup, self.network, cluster.world_size, self.rank, backend))
            groups = stack.enter_context(groups_of(config, cluster))
            if self.is_cuda:
                stack.enter_context(pretended_streams(self.streams))
            if config.has_experts:
                stack.enter_context(evenly_routed(self.is_cuda, self.clock.read_by_host))
            stack.enter_context(without_data(self.device, self.memory, self.is_cuda))
            for batch in self.micro_batches:
                self.memory.note(batch.values(), "other", anywhere=True)
            self.device.is_building = True
            module = self.setting.make_module()
            self.device.is_building = False
            options, offload = config.strategy, config.strategy.offload
            # No real file, and the operators as they are before a compiler fuses them: costs know of that.
            options = replace(
                options, offload=offload and offload.partition(":")[0], compile=False, compile_backend=None
            )
            options = on_mesh(options, module, config, groups, self.forms)
            if options.model_parallel and options.model_parallel.pipeline:
                make_strategy = make_strategy.in_stages()
            self.strategy = strategy = make_strategy(module, adamw, options, groups.data if groups else None)
            stack.enter_context(mock.patch.object(strategy, "forward", explained(strategy.forward)))
            stack.enter_context(mock.patch.object(Stages, "attempt", refuse_at_once))
            self._sort_memory()
            leaves = list(strategy.leaves())
            handles = [
                leaf.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, place, len(leaves)))
                for place, leaf in enumerate(leaves)
            ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()
                self.strategy = None

    def measure(self) -> Simulated:
        """Run until the strategy has settled, and then the step that counts."""
        clock, observer, strategy = self.clock, self.observer, self.strategy
        assert strategy is not None
        config, batches = self.setting.config, self.micro_batches
        data = StepData(sum(map(sample_count, batches)), batches)
        # It settles with one micro-batch, or with as many as the interleaved schedule needs.
        few = batches[: config.degree(PIPELINE) if config.stages_per_rank > 1 else 1]
        settling = StepData(sum(map(sample_count, few)), few)
        waits = max(1, strategy.settling_steps)
        for step in range(waits + 1):
            if step == waits:
                strategy.steps.tell(data)  # as the step before does in a run
                observer.start()
                self.device.without_costs.clear()
                self._sort_memory()
                self.memory.start()
                begin, self.begins_at = clock.readings, len(clock.notes)
            train(strategy, [data if step == waits else settling], observer, config.clip_grad_norm)
        end = clock.readings
        self._sort_memory()
        step_s, compute_s, in_flight_s, exposed_s = (after - before for before, after in zip(begin, end, strict=True))
        without_costs = dict(self.device.without_costs)
        return Simulated(step_s, compute_s, in_flight_s, exposed_s, self.memory.stop(), without_costs)

    # What memory counts as --------------------------------------------------------------------------------------------

    def _on_issue(self, issued: Issued, tensors: Sequence[Tensor]) -> None:
        self.observer.issued.append(issued)
        if self.strategy is not None:  # before, what is broadcast is the model itself
            if not self.memory.are_states(tensors):
                self.memory.assign(self.strategy.gradient_tensors(), "gradients")
            kind = "activations" if issued.kind == MESSAGE else "communication"
            self.memory.assign(tensors, kind, unless=MODEL_STATES)

    def _on_gradient(self, place: int, leaves: int, parameter: Any) -> None:
        # Of a model with more layers, the first and the last ones have the same numbers.
        self.memory.part = place if 2 * place < leaves else place - leaves
        if parameter.grad is not None:
            self.memory.assign([parameter.grad], "gradients")

    def _sort_memory(self) -> None:
        """Let the strategy say which tensors are model states."""
        assert self.strategy is not None
        self.memory.assign(self.strategy.parameter_tensors(), "parameters")
        self.memory.assign(self.strategy.gradient_tensors(), "gradients")
        self.memory.assign(self.strategy.host_tensors(), HOST)
        self.memory.assign(self.strategy.optimizer_tensors(), "optimizer_state")
        if self.strategy.memory_breakdown()["gradients"] > self.memory.component_bytes("gradients"):
            # What it counts but cannot show are buckets in C++, and between steps no other buffer is left.
            self.memory.rename("communication", "gradients")


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of the runner (`ddp_lab.runtime.build`)."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def host_of(cluster: Cluster) -> Cluster:
    """The same nodes for tensors in host memory: over Gloo, inside a node over loopback."""
    inside = hardware.link("loopback")
    return replace(cluster, inside=replace(inside, name=f"host, {inside.name}"), backend="gloo")


def refuse_at_once(*attempted: Any) -> Any:
    """No other rank waits to be told."""
    return Stages.run(*attempted[:-2])


def explained(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass in which an error of the model becomes one line of the plan."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (UserError, Handover, *UNSIMULATED):
            raise
        except Exception as error:
            raise CannotSimulate(
                f"the model fails on the plan's samples: {type(error).__name__}: {first_line(error)}"
            ) from error

    return call


@contextmanager
def on_data(module: Any, name: str) -> Iterator[None]:
    """Within this context `module.name` computes on tensors that hold data."""
    plain: Callable[..., Any] = getattr(module, name)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return plain(*args, **kwargs)

    with mock.patch.object(module, name, call):
        yield

"""Every choice on a pretended cluster, simulated."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ddp_lab.planner.choices import entrypoint_of, families_of
from ddp_lab.planner.contracts import Costs, MemoryCurve, Setting, Simulated
from ddp_lab.planner.costs.cluster import Cluster
from ddp_lab.planner.models import Model
from ddp_lab.planner.rates import Price
from ddp_lab.planner.simulation.simulate import simulate
from ddp_lab.progress import long_work
from ddp_lab.runtime.config import RunConfig, labelled
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh

GIB = 2**30
CONTEXT_BYTES = {"cuda": GIB, "cpu": 0}
"""What a device holds besides tensors: CUDA's context, kernels, workspaces and NCCL's channels; assumed."""
FEW = (2, 3)
"""Micro-batches of the steps that are simulated instead of one of many: from the second on, each takes what the one
before took."""


@dataclass(frozen=True)
class Case:
    """What is to be trained, how, and on what.

    Attributes:
        config: Batch, accumulation, precision, buckets, clipping and mesh, as the runner takes them.
        sequence_length: Tokens of a sample, padding included.
        price: None if it is not known.
        tokens: How many the whole training takes; None if that is not asked.
    """

    model: Model
    cluster: Cluster
    config: RunConfig
    sequence_length: int
    costs: Costs
    price: Price | None = None
    tokens: float | None = None

    @property
    def mesh(self) -> Mesh | None:
        return Mesh.parse(self.config.mesh) if self.config.mesh else None

    @property
    def micro_batch_size(self) -> int:
        """Samples of one micro-batch of one rank.

        Raises:
            UserError: the global batch does not divide.
        """
        return self.config.micro_batch_size(self.mesh.data_size if self.mesh else self.cluster.world_size)

    @property
    def usable_bytes(self) -> int:
        """What tensors of one rank may take."""
        return self.cluster.device.memory_bytes - CONTEXT_BYTES[self.cluster.device.kind]

    def named(self, choice: str) -> str:
        """A choice here, as folders of runs are called: `zero2@dp2-tp2`."""
        return labelled(choice, self.mesh.label if self.mesh else None)

    def setting(self, choice: str) -> Setting:
        """What the simulator runs."""
        count, size = self.config.grad_accum_steps, self.micro_batch_size
        config = replace(self.config, choice=choice)
        return Setting(config, self.model.build, lambda: self.model.micro_batches(count, size, self.sequence_length))


@dataclass(frozen=True)
class Outcome:
    """The result of one choice.

    Attributes:
        simulated: None if it cannot be simulated.
        reason: Why not.
    """

    case: Case
    choice: str
    simulated: Simulated | None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.case.named(self.choice)

    @property
    def gist(self) -> str:
        """What is known of it as soon as it is simulated."""
        if (found := self.simulated) is None:
            return self.reason
        return f"{found.step_time_s * 1e3:.1f} ms, peak {found.memory.peak_bytes / GIB:.2f} GiB"

    @property
    def samples_per_second(self) -> float:
        return self.case.config.global_batch_size / self.simulated.step_time_s if self.simulated else 0.0

    def fits(self, free: float = 0.0) -> bool:
        """Whether it leaves so large a share of the memory free."""
        usable = self.case.usable_bytes
        return self.simulated is not None and self.simulated.memory.peak_bytes <= (1 - free) * usable


Task = tuple[Case, str]
"""A case and a choice."""
Simulate = Callable[[Sequence[Task]], Iterator[Outcome]]
"""Gives the outcome of each task, in their order."""

# Simulating -----------------------------------------------------------------------------------------------------------


def simulate_step(setting: Setting, cluster: Cluster, costs: Costs) -> Simulated:
    """As `simulate`. Times grow by the same for each micro-batch, and memory by its data (a test holds that to the step
    itself). Not so with a pipeline, which is simulated as it is.

    Raises:
        CannotSimulate, UserError: as `simulate`.
    """
    config = setting.config
    if config.grad_accum_steps <= sum(FEW) or config.has_stages:
        return simulate(setting, cluster, costs)
    fewer, more = (simulate(part_of(setting, count), cluster, costs) for count in FEW)
    further = config.grad_accum_steps - FEW[1]

    def grown(before: float, after: float) -> float:
        return after + further * (after - before)

    rest, peak = dict(more.memory.at_rest), dict(more.memory.at_peak)
    data = {name: int(further * (rest[name] - fewer.memory.at_rest.get(name, 0))) for name in rest}
    at_rest, at_peak = ({name: held.get(name, 0) + data.get(name, 0) for name in held | data} for held in (rest, peak))
    return replace(
        more,
        memory=MemoryCurve(at_rest, at_peak),
        step_time_s=grown(fewer.step_time_s, more.step_time_s),
        compute_s=grown(fewer.compute_s, more.compute_s),
        communication_s=grown(fewer.communication_s, more.communication_s),
        exposed_s=grown(fewer.exposed_s, more.exposed_s),
    )


def part_of(setting: Setting, count: int) -> Setting:
    """A step of so many of its micro-batches."""
    config = setting.config
    samples = config.global_batch_size // config.grad_accum_steps * count
    few = config.but(global_batch_size=samples, grad_accum_steps=count)
    return replace(setting, config=few, make_micro_batches=lambda: setting.make_micro_batches()[:count])


def outcome(case: Case, choice: str) -> Outcome:
    """Simulate one choice. If it cannot be simulated, the outcome has a reason."""
    missing = families_of(case.mesh)[entrypoint_of(choice, case.mesh)].missing
    if choice in missing:
        return Outcome(case, choice, None, f"not installed; run: {missing[choice]}")
    try:
        return Outcome(case, choice, simulate_step(case.setting(choice), case.cluster, case.costs))
    except UserError as error:
        return Outcome(case, choice, None, str(error))


def cores() -> int:
    return os.cpu_count() or 1


@contextmanager
def simulating(jobs: int) -> Iterator[Simulate]:
    """A function that gives the outcome of each case and choice, in their order, by so many processes, which stay for
    further calls; 1: in this process."""
    if jobs <= 1:
        yield lambda tasks: (outcome(*task) for task in tasks)
        return
    # Forked, since a fresh process would load torch and transformers again, for longer than most simulations take. With
    # one thread: those that this process may have started for its own operators are not there after a fork.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, forked, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield lambda tasks: pool.map(outcome, *zip(*tasks, strict=True))


def outcomes(tasks: Sequence[Task], jobs: int | None = None) -> Iterator[Outcome]:
    """The outcome of each case and choice, in their order.

    Args:
        jobs: Simulations at a time, in processes of their own; 1: in this process. None: one for each core.
    """
    with simulating(min(jobs or cores(), len(tasks))) as simulate:
        yield from simulate(tasks)


def told(simulate: Simulate, tasks: Sequence[Task], of: str, changes: Sequence[str] = ()) -> list[Outcome]:
    """The outcomes of these tasks, each with a line when it is there. `changes`: what is other in each."""
    found: list[Outcome] = []
    with long_work(f"simulating {len(tasks)} {of}", len(tasks)) as tell:
        for outcome in simulate(tasks):
            change = f" with {changes[len(found)]}" if changes else ""
            found.append(outcome)
            tell(f"{outcome.name}{change}: {outcome.gist}")
    return found

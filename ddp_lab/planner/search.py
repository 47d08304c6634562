"""The fastest settings of a fixed global batch that fit: choice, mesh, micro-batch, recomputation, compiled blocks.

Best first, with a bound. A smaller micro-batch and more recomputation hold less and take longer. So a choice on a mesh
begins with its whole batch in one micro-batch and nothing computed again, which nothing leaner can beat, and is made
leaner one change at a time, while what it has reached promises more than `WORTH` of the best that fits. A compiled step
holds what an eager one holds and takes less, so an eager one is looked for only where blocks cannot be compiled.

What cannot fit is not simulated: states by formulas, and activations by what a sample took in settings that have the
same layers on a rank.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from ddp_lab.planner.choices import choices
from ddp_lab.planner.coarse import LEAST, least_bytes, least_states, tensor_ranks
from ddp_lab.planner.contracts import Costs
from ddp_lab.planner.plan import Case, Outcome, Task
from ddp_lab.planner.report.recommendation import TIGHT
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import EXPERT

REPLICATED, SHARDED = ("bucket_ddp_async", "tp"), ("zero1", "zero2", "zero3")
SEARCHED = (*REPLICATED, *SHARDED)
"""Choices of a search that names none."""
WORTH = 0.9
"""Settings that are slower than this share of the best are not looked for."""
MOST = 150
"""Simulations of a search."""
SURE = 0.9
"""Of the activations that a sample took elsewhere: so many it takes here at least."""


@dataclass(frozen=True)
class Ways:
    """What is searched over besides choice, mesh and micro-batch.

    Attributes:
        levels: Of recomputation, those of `RECOMPUTATION` that are wanted, in their order.
        costs: By whether blocks are compiled. The first one is the faster one.
    """

    levels: Sequence[str]
    costs: Mapping[bool, Costs]

    def of(self, case: Case, steps: int) -> list[list[Case]]:
        """The case with so many micro-batches in each way that goes together, from the fastest on: those that are
        compiled, and the eager ones of other levels."""
        chains, levels = list[list[Case]](), set[str]()
        for compiled in self.costs:
            chain = list[Case]()
            for level in (one for one in self.levels if one not in levels):
                try:
                    chain.append(self.put(case, steps, level, compiled))
                except UserError:  # it does not go with another setting
                    continue
            levels |= {each.config.strategy.activation_checkpointing for each in chain}
            chains += [chain] * bool(chain)
        return chains

    def put(self, case: Case, steps: int, level: str, compiled: bool) -> Case:
        """
        Raises:
            UserError: these do not go together.
        """
        config = case.config.but(grad_accum_steps=steps, activation_checkpointing=level, compile=compiled)
        return replace(case, config=config, costs=self.costs[compiled])


def roots(cases: Sequence[Case], wanted: Sequence[str], ways: Ways) -> Iterator[Task]:
    """Where a search begins: each choice on each mesh with the largest micro-batch in the fastest way. With a
    pipeline, whose bubble grows with the micro-batch, each micro-batch.

    Args:
        cases: One for each mesh, whose accumulation is not chosen yet.
    """
    elements = cases[0].model.elements()
    for case in cases:
        config = case.config
        ranks = config.micro_batch_size(1) // case.micro_batch_size
        samples = case.micro_batch_size * config.grad_accum_steps
        steps = (
            [n for n in range(1, samples + 1) if samples % n == 0] if config.has_stages else [config.grad_accum_steps]
        )
        for name in choices(None, [case.mesh]):
            if (
                name not in wanted
                or (ranks == 1 and name in SHARDED)
                or least_bytes(case, name, elements) > case.usable_bytes
            ):
                continue
            for each in steps:
                for chain in ways.of(case, each)[:1]:
                    yield chain[0], name


@dataclass
class Search:
    """A search, and what it has learned from settings that have the same layers on a rank (`alike`).

    Attributes:
        any_steps: Accumulation may be chosen.
        taken: Bytes of the activations of a sample, in the largest micro-batch so far.
        computed: Seconds that a rank computed in a step, at least.
    """

    ways: Ways
    any_steps: bool
    elements: int
    taken: dict[object, tuple[int, float]] = field(default_factory=dict)
    computed: dict[object, float] = field(default_factory=dict)

    def learn(self, found: Outcome) -> None:
        case, key = found.case, alike(found.case)
        micro, simulated = case.micro_batch_size, found.simulated
        if simulated is None or case.config.has_stages:
            return
        if micro >= self.taken.get(key, (0, 0.0))[0]:
            self.taken[key] = micro, simulated.memory.at_peak.get("activations", 0) / micro
            in_this_way = (key, case.config.strategy.compile)
            self.computed[in_this_way] = min(simulated.compute_s, self.computed.get(in_this_way, float("inf")))

    def promise(self, case: Case) -> float:
        """Samples a second that a rank computes at most."""
        least_s = LEAST * self.computed.get((alike(case), case.config.strategy.compile), 0.0)
        return case.config.global_batch_size / least_s if least_s else float("inf")

    def may_fit(self, case: Case, choice: str) -> bool:
        """Whether there may be room for states and activations. Gradients of the first micro-batch come when
        activations go."""
        states = dict(least_states(case, choice, self.elements))
        if case.config.grad_accum_steps == 1:
            states.pop("gradients", None)
        of_a_sample = self.taken.get(alike(case), (0, 0.0))[1]
        return sum(states.values()) + SURE * of_a_sample * case.micro_batch_size <= case.usable_bytes

    def with_room(self, task: Task) -> Task:
        """The task, or with a smaller micro-batch: the largest that may fit, or of one sample."""
        case, choice = task
        micro, config = case.micro_batch_size, case.config
        if not self.any_steps or config.has_stages or self.may_fit(case, choice):
            return task
        smaller = [size for size in range(micro - 1, 0, -1) if micro % size == 0] or [micro]
        cases = [
            replace(case, config=config.but(grad_accum_steps=config.grad_accum_steps * micro // size))
            for size in smaller
        ]
        return next((each for each in cases if self.may_fit(each, choice)), cases[-1]), choice

    def leaner(self, found: Outcome) -> Iterator[Task]:
        """What holds less, one change away: the next way, and the next smaller micro-batch that may fit.

        Of what does not fit, activations of a smaller micro-batch are at least its share of these, so that sizes with
        which these alone are too many are left out.
        """
        case, choice = found.case, found.choice
        config, micro = case.config, case.micro_batch_size
        if found.simulated is None:
            return
        chains = self.ways.of(case, config.grad_accum_steps)
        chain = next(chain for chain in chains if case.config in [each.config for each in chain])
        place = [each.config for each in chain].index(case.config)
        yield from ((each, choice) for each in chain[place + 1 : place + 2])
        if place == 0 and chain is chains[0]:
            yield from ((other[0], choice) for other in chains[1:])
        if not self.any_steps or config.has_stages:
            return
        memory = found.simulated.memory
        activations = memory.at_peak.get("activations", 0)
        for smaller in (size for size in range(micro - 1, 0, -1) if micro % size == 0):
            if found.fits() or memory.peak_bytes - activations * (1 - smaller / micro) <= case.usable_bytes:
                yield (
                    replace(case, config=config.but(grad_accum_steps=config.grad_accum_steps * micro // smaller)),
                    choice,
                )
                return

    def run(
        self, begin: Sequence[Task], simulate: Callable[[Sequence[Task]], Iterable[Outcome]], at_once: int
    ) -> Iterator[Outcome]:
        """What was simulated, as it is found.

        Args:
            simulate: Gives the outcomes of so many tasks, in their order.
            at_once: Simulations that run side by side.
        """
        order = count()
        queue = [(-float("inf"), next(order), task) for task in begin]
        seen = {keyed(task) for task in begin}
        best, done = 0.0, 0
        while queue and done < MOST:
            tasks = list[Task]()
            while queue and len(tasks) < at_once and -queue[0][0] > WORTH * best:
                bound, _, task = heapq.heappop(queue)
                if (promised := -self.promise(task[0])) > bound:
                    heapq.heappush(queue, (promised, next(order), task))
                    continue
                smaller = self.with_room(task)
                if smaller is not task and keyed(smaller) in seen:
                    continue
                seen.add(keyed(smaller))
                tasks.append(smaller)
            if not tasks:
                return
            for found in simulate(tasks):
                done += 1
                yield found
                self.learn(found)
                if found.fits(TIGHT):
                    best = max(best, found.samples_per_second)
                for task in self.leaner(found):
                    if keyed(task) not in seen:
                        seen.add(keyed(task))
                        heapq.heappush(queue, (-found.samples_per_second, next(order), task))


def alike(case: Case) -> object:
    """What the activations of a sample on a rank depend on."""
    config = case.config
    experts = case.mesh.degree(EXPERT) if case.mesh else 1
    return tensor_ranks(case.mesh), experts, config.sequence_parallel, config.strategy.activation_checkpointing


def keyed(task: Task) -> tuple[object, ...]:
    return task[1], task[0].config

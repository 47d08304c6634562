"""The fastest cases of a space that fit, best first, with a lower bound. A plain plan is one whose axes are fixed.

A smaller micro-batch and more recomputation hold less and take longer. So a choice on a mesh begins with its whole
batch in one micro-batch and nothing computed again, which nothing leaner can beat, and is made leaner one change at a
time, while what it has reached promises more than `WORTH` of the best that fits. A compiled step holds what an eager
one holds and takes less, so an eager one is looked for only where blocks cannot be compiled.

What cannot fit is not simulated: states by formulas, and activations by what a sample took in settings that have the
same layers on a rank. Nor is a pipeline that cannot win: it takes as many times as long to simulate as it has ranks,
and its step is at least the compute of a mesh with the same layers on a rank, stretched by the bubble of its schedule.
"""

import heapq
from collections.abc import Iterator, Mapping
from itertools import count

from ddp_lab.planner.accounting import PRECISIONS, STAGES, state_bytes
from ddp_lab.planner.outcome import CaseOutcome, Simulate
from ddp_lab.planner.space import GIB, Case, Space
from ddp_lab.runtime.mesh import CONTEXT, EXPERT, PIPELINE, SHARD, TENSOR
from pipeline_parallel.actions import Shape
from pipeline_parallel.checks import lists_of, run_on_paper
from pipeline_parallel.schedules import SCHEDULES

TIGHT = 0.1
"""What leaves less than this share of the usable memory is recommended only if nothing else fits."""
WORTH = 0.9
"""Settings that are slower than this share of the best are not looked for."""
MOST = 150
"""Simulations of a search."""
LEAST = 0.9
"""Of the compute of other settings with the same layers on a rank: products have other shapes in a pipeline, and a rank
updates fewer parameters."""
BYTES_OF_A_LOGIT = 14
"""At most: in half precision and as fp32, each with its gradient, and two more."""
SURE = 0.9
"""Of the activations that a sample took elsewhere: so many it takes here at least."""

# Bounds ---------------------------------------------------------------------------------------------------------------


def shares(case: Case) -> tuple[int, int]:
    """Over how many ranks the model is cut, and over how many a shard of a part is."""
    cut = case.degree(TENSOR) * case.degree(PIPELINE) * case.degree(EXPERT)  # as if all were experts
    has_shards = case.mesh is not None and SHARD in case.mesh.degrees
    return cut, case.degree(SHARD) if has_shards else case.cluster.world_size // cut


def least_states(case: Case, elements: int) -> Mapping[str, float]:
    """Bytes that parameters, gradients and Adam's states of one rank take at least. Nothing where they are cast,
    offloaded or frozen. `elements`: of the model."""
    strategy, choice = case.config.strategy, case.config.choice
    if strategy.param_dtype or strategy.offload or case.model.lora_rank:
        return {}
    cut, shards = shares(case)
    default = "zero3" if "fsdp" in choice else "replicated"
    stage = next((stage for stage in STAGES if choice.endswith(stage)), default)
    precision = strategy.precision if strategy.precision in PRECISIONS else "fp32"
    return state_bytes(elements / cut, shards, stage, precision)


def bubble(case: Case) -> float:
    """The share of a step in which a rank of the case's pipeline computes nothing, on paper."""
    if not case.config.has_stages:
        return 0.0
    shape = Shape(case.degree(PIPELINE), case.config.grad_accum_steps, case.config.stages_per_rank)
    return run_on_paper(lists_of(SCHEDULES[case.config.pipeline_schedule], shape), shape).bubble


def alike(case: Case) -> object:
    """What the activations of a sample on a rank depend on, and what a rank computes in a step."""
    return *map(case.degree, (TENSOR, EXPERT, CONTEXT)), case.config.sequence_parallel, case.level


# The search -----------------------------------------------------------------------------------------------------------


class Search:
    """See the module's docstring.

    Attributes:
        elements: Of the model.
        best: The fastest that leaves a tenth of the memory free, so far.
        left_out: A line for each mesh, and one for all choices, that are not simulated.
    """

    def __init__(self, space: Space) -> None:
        self._space, self.elements = space, space.cases[0].model.elements()
        self._activations: dict[object, tuple[int, float]] = {}  # bytes of a sample, in the largest micro-batch so far
        self._computed: dict[object, tuple[int, float]] = {}  # micro-batches of a step, and seconds of compute at least
        self._without_room: dict[str, float] = {}
        self.best: CaseOutcome | None = None
        self.left_out: dict[object, str] = {}

    def run(self, simulate: Simulate, at_once: int) -> Iterator[CaseOutcome]:
        """What was simulated, as it is found. `at_once`: cases of a search that are simulated before it goes on."""
        order, simulations, searches = count(), 0, self._space.searches
        roots = self.that_may_fit(list(self._space.roots()))
        queued = {case.config for case in roots}
        # Pipelines come last, when others have told how fast they must be.
        queue = [(case.config.has_stages, 0.0, next(order), case) for case in roots]
        heapq.heapify(queue)
        while queue and (simulations < MOST or not searches):
            cases, is_late = list[Case](), queue[0][0]
            while queue and queue[0][0] == is_late and (len(cases) < at_once or not searches):
                _, bound_s, _, case = heapq.heappop(queue)
                least_s = self.least_s(case)
                if least_s > bound_s:
                    heapq.heappush(queue, (is_late, least_s, next(order), case))
                elif self.is_needless(case, bound_s):
                    self.leave_out(case, bound_s)
                elif (smaller := self.with_room(case)) is case or smaller.config not in queued:
                    queued.add(smaller.config)
                    cases.append(smaller)
            for outcome in simulate(cases):
                simulations += 1
                self.learn(outcome)
                yield outcome
                for leaner in self.leaner(outcome):
                    if leaner.config not in queued:
                        queued.add(leaner.config)
                        heapq.heappush(queue, (is_late, outcome.step_s, next(order), leaner))

    def that_may_fit(self, cases: list[Case]) -> list[Case]:
        """Those whose states alone a device has room for, or if none has, those of the smallest. All, where the mesh
        is fixed and nothing is searched."""
        if not (self._space.any_mesh or self._space.searches):
            return cases
        needed = [sum(least_states(case, self.elements).values()) for case in cases]
        most = max(1.001 * min(needed), cases[0].usable_bytes)  # equal ones may differ by how they were divided
        if too_large := [case.name for case, size in zip(cases, needed, strict=True) if size > most]:
            why = "parameters, gradients and optimizer states alone are more than a device has"
            self.left_out["states"] = f"{', '.join(dict.fromkeys(too_large))}: {why}"
        return [case for case, size in zip(cases, needed, strict=True) if size <= most]

    def least_s(self, case: Case) -> float:
        """What a step takes at least; 0 if that is not known. A micro-batch of a pipeline reads the weights of one
        stage alone: it must have so many that it reads no fewer."""
        steps, compute_s = self._computed.get(alike(case), (0, 0.0))
        is_bounded = self._space.searches or (self._space.any_mesh and case.config.has_stages)
        if not is_bounded or case.config.grad_accum_steps < steps * case.degree(PIPELINE):
            return 0.0
        return LEAST * compute_s / (1 - bubble(case))

    def is_needless(self, case: Case, least_s: float) -> bool:
        """Whether it cannot win; or is one of many pipelines that has no room, or of a search's many pipelines, though
        something fits without one."""
        searches, is_one_of_many = self._space.searches, case.config.has_stages and self._space.any_mesh
        if is_one_of_many and self.least_peak(case) > case.usable_bytes:
            return True
        if self.best is None:
            return False
        return (searches and is_one_of_many) or least_s > self.best.step_s / (WORTH if searches else 1.0)

    def leave_out(self, case: Case, least_s: float) -> None:
        if not (case.config.has_stages and self._space.any_mesh):
            return
        if (peak := self.least_peak(case)) > case.usable_bytes:
            self._without_room[case.name] = peak
            least, most = (
                f"{nbytes / GIB:,.0f} GiB" for nbytes in (min(self._without_room.values()), case.usable_bytes)
            )
            why = f"states and activations are at least {least}, and {most} can be used"
            self.left_out["room"] = f"{', '.join(self._without_room)}: {why}"
        elif self.best and self._space.searches:
            example = f"--mesh {case.mesh} searches one"
            self.left_out["pipelines"] = f"pipelines, each of which takes as long as all else; {example}"
        elif self.best:
            self.left_out[str(case.mesh)] = (
                f"{case.mesh}: its bubble of {bubble(case):.0%} makes a step at least {least_s * 1e3:,.0f} ms, and "
                f"{self.best.case.name} takes {self.best.step_s * 1e3:,.0f} ms"
            )

    def learn(self, outcome: CaseOutcome) -> None:
        if outcome.fits(TIGHT) and (self.best is None or outcome.step_s < self.best.step_s):
            self.best = outcome
        case, key, simulated = outcome.case, alike(outcome.case), outcome.simulated
        if simulated is None or case.config.has_stages:
            return
        micro, (_, compute_s) = case.micro_batch_size, self._computed.get(key, (0, float("inf")))
        if micro >= self._activations.get(key, (0, 0.0))[0]:
            self._activations[key] = micro, simulated.memory.at_peak.get("activations", 0) / micro
            self._computed[key] = case.config.grad_accum_steps, min(simulated.compute_s, compute_s)

    def least_peak(self, case: Case) -> float:
        """Bytes of states and activations at least. Gradients of the first micro-batch come when activations go. The
        first rank of a pipeline holds micro-batches for each rank behind it, and no logits."""
        states, steps, ranks = (
            dict(least_states(case, self.elements)),
            case.config.grad_accum_steps,
            case.degree(PIPELINE),
        )
        if steps == 1:
            states.pop("gradients", None)
        of_a_sample = self._activations.get(alike(case), (0, 0.0))[1]
        if ranks > 1:
            logits = case.sequence_length * getattr(case.model.configuration(), "vocab_size", 0)
            of_a_sample = max(0.0, of_a_sample - BYTES_OF_A_LOGIT * logits) * min(steps, ranks) / ranks
        return sum(states.values()) + SURE * of_a_sample * case.micro_batch_size

    def smaller(self, case: Case) -> list[Case]:
        """The case with each smaller micro-batch, the largest first."""
        micro, steps = case.micro_batch_size, case.config.grad_accum_steps
        if not self._space.any_steps or case.config.has_stages:
            return []
        sizes = [size for size in range(micro - 1, 0, -1) if micro % size == 0]
        return [case.but(grad_accum_steps=steps * micro // size) for size in sizes]

    def with_room(self, case: Case) -> Case:
        """The case, or with a smaller micro-batch: the largest that may fit, or of one sample."""
        tried = [case, *self.smaller(case)]
        return next(
            (candidate for candidate in tried if self.least_peak(candidate) <= candidate.usable_bytes), tried[-1]
        )

    def leaner(self, outcome: CaseOutcome) -> Iterator[Case]:
        """What holds less, one change away: the next level of recomputation (also the next that is compiled alike), and
        the next smaller micro-batch that may fit.

        Of what does not fit, activations of a smaller micro-batch are at least its share of these, so that sizes with
        which these alone are too many are left out.
        """
        if outcome.simulated is None:
            return
        case, memory = outcome.case, outcome.simulated.memory
        ways = self._space.ways(case)
        later = ways[[way.level for way in ways].index(case.level) + 1 :]
        alike_later = [way for way in later if way.config.strategy.compile == case.config.strategy.compile]
        yield from (*later[:1], *alike_later[:1])
        activations = memory.at_peak.get("activations", 0)
        for smaller in self.smaller(case):
            freed = activations * (1 - smaller.micro_batch_size / case.micro_batch_size)
            if outcome.fits() or memory.peak_bytes - freed <= case.usable_bytes:
                yield smaller
                return

"""Which choices and meshes of `--mesh auto` cannot fit or cannot win, so that they are not simulated.

A pipeline takes as many times as long to simulate as it has ranks. On any mesh a rank has the same share of a step's
compute, and a pipeline adds the bubble of its schedule, which is known on paper (`pipeline_parallel.checks`). So a step
is at least the compute of a mesh without a pipeline and with the same `tp`, stretched by the bubble.
"""

from collections.abc import Mapping, Sequence

from ddp_lab.planner.accounting import PRECISIONS, STAGES, state_bytes
from ddp_lab.planner.plan import Case, Outcome, Task
from ddp_lab.runtime.mesh import EXPERT, PIPELINE, SHARD, TENSOR, Mesh
from pipeline_parallel.actions import Shape
from pipeline_parallel.checks import lists_of, run_on_paper
from pipeline_parallel.schedules import SCHEDULES

LEAST = 0.9
"""Of that compute: products have other shapes in a pipeline, and a rank updates fewer parameters."""


def that_may_fit(tasks: Sequence[Task]) -> tuple[list[Task], list[str]]:
    """Those whose states alone a device has room for, or if none has, those of the smallest; and a line on the
    others."""
    elements = tasks[0][0].model.elements()
    needed = [least_bytes(*task, elements) for task in tasks]
    least = 1.001 * min(needed)  # equal ones may differ by how they were divided
    fit = [size <= max(least, task[0].usable_bytes) for task, size in zip(tasks, needed, strict=True)]
    too_large = [case.named(choice) for (case, choice), may in zip(tasks, fit, strict=True) if not may]
    line = f"{', '.join(too_large)}: parameters, gradients and optimizer states alone are more than a device has"
    return [task for task, may in zip(tasks, fit, strict=True) if may], [line] if too_large else []


def least_bytes(case: Case, choice: str, elements: int) -> float:
    """What `least_states` are together."""
    return sum(least_states(case, choice, elements).values())


def least_states(case: Case, choice: str, elements: int) -> Mapping[str, float]:
    """Bytes that parameters, gradients and Adam's states of one rank take at least. Nothing where they are cast or
    offloaded.

    Args:
        elements: Of the model.
    """
    strategy = case.config.strategy
    if strategy.param_dtype or strategy.offload:
        return {}
    cut, shards = shares(case)
    other = "zero3" if "fsdp" in choice else "replicated"
    stage = next((stage for stage in STAGES if choice.endswith(stage)), other)
    precision = strategy.precision if strategy.precision in PRECISIONS else "fp32"
    return state_bytes(elements / cut, shards, stage, precision)


def shares(case: Case) -> tuple[int, int]:
    """Over how many ranks the model is cut, and over how many a shard of a part is."""
    mesh = case.mesh
    cut = tensor_ranks(mesh) * stages(case) * (mesh.degree(EXPERT) if mesh else 1)  # as if all were experts
    return cut, mesh.degree(SHARD) if mesh and SHARD in mesh.degrees else case.cluster.world_size // cut


def worth_simulating(
    pipelines: Sequence[Task], found: Sequence[Outcome], without: Case
) -> tuple[list[Task], list[str]]:
    """Those of `pipelines` that may be faster than the fastest of `found` that fits, and a line for each mesh that may
    not.

    Args:
        found: Outcomes without a pipeline.
        without: The case of any of them.
    """
    fitting = [(one.simulated, one) for one in found if one.simulated and one.fits()]
    if not fitting:
        return list(pipelines), []
    fastest, best = min(fitting, key=lambda pair: pair[0].step_time_s)
    kept, lines = list[Task](), dict[str, str]()
    for task in pipelines:
        case = task[0]
        least_s = least_step_s(case, found, without.config.grad_accum_steps)
        if least_s < fastest.step_time_s:
            kept.append(task)
        else:
            lines[str(case.mesh)] = (
                f"{case.mesh}: its bubble of {bubble(case):.0%} makes a step at least {least_s * 1e3:,.0f} ms, and "
                f"{best.name} takes {fastest.step_time_s * 1e3:,.0f} ms"
            )
    return kept, list(lines.values())


def least_step_s(case: Case, found: Sequence[Outcome], steps: int) -> float:
    """What a step of a pipeline takes at least; 0 if that is not known.

    Args:
        found: Outcomes without a pipeline, of so many micro-batches. Each of these reads all weights, and each of the
            pipeline's those of one stage: the latter must be so many that they read no fewer.
    """
    if case.config.grad_accum_steps < steps * stages(case):
        return 0.0
    alike = [one.simulated for one in found if one.simulated and tensor_ranks(one.case.mesh) == tensor_ranks(case.mesh)]
    return LEAST * min((one.compute_s for one in alike), default=0.0) / (1 - bubble(case))


def stages(case: Case) -> int:
    return case.mesh.degree(PIPELINE) if case.mesh else 1


def tensor_ranks(mesh: Mesh | None) -> int:
    return mesh.degree(TENSOR) if mesh else 1


def bubble(case: Case) -> float:
    """The share of a step in which a rank of the case's pipeline computes nothing, on paper."""
    config = case.config
    shape = Shape(stages(case), config.grad_accum_steps, config.stages_per_rank)
    return run_on_paper(lists_of(SCHEDULES[config.pipeline_schedule], shape), shape).bubble

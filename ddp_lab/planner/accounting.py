"""Memory of model states and of ranks, by formulas that can be checked by hand. Nothing is run.

Psi is the number of parameters, N the number of ranks. Model states follow ZeRO (Rajbhandari et al., ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models, arXiv 1910.02054, sections 3.1 and 5). What a step holds
besides (activations, buffers of collectives, temporaries) is in no formula: it is counted by running the strategy.
"""

from ddp_lab.planner.contracts import MODEL_STATES

STAGES = {
    "replicated": (),
    "zero1": ("optimizer_state",),
    "zero2": ("optimizer_state", "gradients"),
    "zero3": ("optimizer_state", "gradients", "parameters"),
}
"""Components of the model states of which each rank holds only 1/N."""


PRECISIONS = {
    "fp32": ((4, 4, 8), "Everything in fp32; Adam keeps two values a parameter."),
    "bf16": ((4, 4, 8), "Autocast, as the runner's --precision bf16: states stay in fp32, linear layers run in bf16."),
    "fp16": ((4, 4, 8), "Autocast, as the runner's --precision fp16: states stay in fp32, linear layers run in fp16."),
    "bf16-true": ((2, 2, 4), "As the runner's --precision bf16-true: states are in bf16."),
    "mixed": (
        (2, 2, 12),
        "ZeRO's mixed precision: 16-bit parameters and gradients; fp32 master copy and both of Adam's values.",
    ),
}
"""Bytes of a parameter in each of `MODEL_STATES` with Adam, and what it means."""
FP32, HALF = 4, 2


def sizes(stage: str, precision: str, casts: bool = False) -> dict[str, tuple[int, int]]:
    """By component the bytes of a parameter that every rank holds, and those of which each holds 1/N. `casts`:
    parameters are 16-bit copies of fp32 shards, as with the runner's `--param-dtype`."""
    of = dict(zip(MODEL_STATES, PRECISIONS[precision][0], strict=True))
    by_component = {component: (0, size) if component in STAGES[stage] else (size, 0) for component, size in of.items()}
    return by_component | ({"parameters": (HALF, FP32)} if casts and "parameters" not in STAGES[stage] else {})


def state_bytes(parameters: float, ranks: int, stage: str, precision: str, casts: bool = False) -> dict[str, float]:
    """Bytes of model states on one rank between two steps, by component; padding is not in it."""
    return {
        component: parameters * (replicated + sharded / ranks)
        for component, (replicated, sharded) in sizes(stage, precision, casts).items()
    }


def bytes_of_a_parameter(stage: str, precision: str, casts: bool = False) -> tuple[int, int]:
    """Of one parameter the bytes that every rank holds, and those of which each holds 1/N."""
    replicated, sharded = zip(*sizes(stage, precision, casts).values(), strict=True)
    return sum(replicated), sum(sharded)


def formula(stage: str, precision: str, casts: bool = False) -> str:
    """Bytes of a parameter: `4 + 12/N`."""
    replicated, sharded = bytes_of_a_parameter(stage, precision, casts)
    return " + ".join(part for part in (f"{replicated or ''}", f"{sharded}/N" if sharded else "") if part)


def least_ranks(parameters: float, stage: str, precision: str, memory_bytes: float, casts: bool = False) -> int | None:
    """The smallest number of ranks on each of which states take less than `memory_bytes`; None if there is none."""
    replicated, sharded = bytes_of_a_parameter(stage, precision, casts)
    room = memory_bytes - parameters * replicated
    return max(1, int(parameters * sharded // room) + 1) if room > 0 else None

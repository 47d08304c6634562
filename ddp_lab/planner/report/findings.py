"""What a search has found: which setting to take, and what it is beside others, in sentences."""

from collections.abc import Sequence

from ddp_lab.planner.plan import Case, Outcome
from ddp_lab.planner.report.recommendation import AS_FAST, Row, gib, is_roomy, is_tight
from ddp_lab.planner.report.wording import runner_command
from ddp_lab.planner.search import Ways
from ddp_lab.strategy.options import NO_RECOMPUTATION

MOST_ROWS = 10
Pair = tuple[Row, Outcome]
"""A row of the table, and what it is of."""


def plain(pairs: Sequence[Pair], ways: Ways, mesh: str | None) -> list[Pair]:
    """Those of one micro-batch without recomputation or a mesh but what is asked for."""
    pairs = [pair for pair in pairs if pair[0].get("mesh") == mesh and pair[0]["grad_accum_steps"] == 1]
    return [pair for pair in pairs if pair[0]["activation_checkpointing"] == ways.levels[0]]


def best_and_front(pairs: Sequence[Pair]) -> tuple[Pair | None, list[Pair]]:
    """The setting to take, and it with those that no other beats both in speed and in memory, the fastest first. Of
    those that leave a tenth of the memory free, or if none does, of those that fit. Of equally fast ones one without a
    mesh is taken, and then one with ample room.
    """
    fitting = [pair for pair in pairs if pair[0]["fits"] == "yes"]
    fitting = [pair for pair in fitting if not is_tight(pair[0])] or fitting
    fitting.sort(key=lambda pair: (pair[0]["step_time_ms"], -pair[0]["spare_bytes"]))
    if not fitting:
        return None, []
    limit = fitting[0][0]["step_time_ms"] * (1 + AS_FAST)
    equal = [pair for pair in fitting if pair[0]["step_time_ms"] <= limit]
    best = min(equal, key=lambda pair: ("mesh" in pair[0], not is_roomy(pair[0])))
    front, most = [best], -1
    for pair in fitting:
        if pair[0]["spare_bytes"] > most:
            most = pair[0]["spare_bytes"]
            front += [pair] * (pair is not best)
    return best, front[:MOST_ROWS]


def recommendation(best: Pair, pairs: Sequence[Pair]) -> list[str]:
    """What to take, and the command of a run."""
    of, found = best
    tight = [of for of, _ in pairs if of["fits"] == "yes" and is_tight(of)]
    room = f"its peak of {gib(of['peak_bytes'])} leaves {gib(of['spare_bytes'])} to spare"
    lines = [
        f"Take {described(found)}: {speed(of)}; {room}.",
        f"Run it: {runner_command(found.case, found.choice)}",
    ]
    if is_tight(of):
        lines.append(
            "Nothing leaves a tenth of the memory free, and what the allocator keeps unused is not in the peak."
        )
    elif tight and (fastest := min(tight, key=lambda of: of["step_time_ms"]))["step_time_ms"] < of["step_time_ms"]:
        lines.append(
            f"{fastest['name']} reaches {speed(fastest)}, but leaves {gib(fastest['spare_bytes'])}, less than a tenth."
        )
    return lines


def without_compiler(best: Pair, pairs: Sequence[Pair]) -> list[str]:
    """The best of those whose blocks are not compiled, if blocks of the best are."""
    other, _ = best_and_front([pair for pair in pairs if not pair[1].case.config.strategy.compile])
    if other is None or not best[1].case.config.strategy.compile:
        return []
    room = f"a peak of {gib(other[0]['peak_bytes'])}"
    return [f"Without --compile: {described(other[1])}: {speed(other[0])}, with {room}."]


def against_plain(best: Pair, pairs: Sequence[Pair], ways: Ways, mesh: str | None) -> str:
    """What `ddp-lab plan` with the same flags would miss: one micro-batch, no recomputation, and eager blocks."""
    of, _ = best
    is_asked_for = len(ways.costs) == 1
    other, _ = best_and_front(
        [pair for pair in plain(pairs, ways, mesh) if is_asked_for or not pair[1].case.config.strategy.compile]
    )
    if other is None:
        return (
            "As `ddp-lab plan` begins (one micro-batch, no mesh or recomputation but what is asked for), nothing fits."
        )
    if other is best:
        return "`ddp-lab plan` with these flags would take the same."
    slower = 100 * (1 - of["step_time_ms"] / other[0]["step_time_ms"])
    told = f"`ddp-lab plan` would take {described(other[1])}: {speed(other[0])}"
    return f"{told}, {max(slower, 0):.0f} % less, with {gib(other[0]['spare_bytes'])} unused."


def described(found: Outcome) -> str:
    """`zero2, 4 micro-batches of 2, recomputing selective`."""
    config, micro = found.case.config, found.case.micro_batch_size
    steps = f"{config.grad_accum_steps} micro-batches" if config.grad_accum_steps > 1 else "one micro-batch"
    level = level_of(found.case)
    again = "no recomputation" if level == NO_RECOMPUTATION else f"recomputation {level}"
    return f"{found.name}, {steps} of {micro}, {again}{', compiled' * config.strategy.compile}"


def level_of(case: Case) -> str:
    return case.config.strategy.activation_checkpointing


def speed(of: Row) -> str:
    if "tokens_per_second_per_device" not in of:
        return f"{of['samples_per_second']:,.1f} samples/s"
    used = f" (MFU {of['mfu_pct']:.0f} %)" if "mfu_pct" in of else ""
    return f"{of['tokens_per_second_per_device']:,.0f} tokens/s/GPU{used}"

"""Which choice to take, and why: from the rows of the table, in sentences."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_lab.runtime.errors import listed

GIB = 2**30
AS_FAST = 0.02
"""Choices that take at most this share longer than the fastest count as equally fast: most errors are common to all."""
AMPLE = 0.8
"""A peak below this share of the usable memory leaves ample room, so that a smaller one is no advantage."""
TIGHT = 0.1
"""What leaves less than this share of the usable memory is recommended only if nothing else fits."""
Row = Mapping[str, Any]


def recommended(rows: Sequence[Row]) -> Row | None:
    """Of the choices that leave a tenth of the memory free, or if none does, of those that fit, the fastest. If several
    are equally fast, the simplest of those that leave ample room, which is the first in the order of the registries; if
    none does, the one with the smallest peak. None if none fits.
    """
    equal = equally_fast(rows)
    roomy = [row for row in equal if is_roomy(row)]
    return roomy[0] if roomy else min(equal, key=lambda row: row["peak_bytes"], default=None)


def is_roomy(row: Row) -> bool:
    return bool(row["peak_bytes"] <= AMPLE * usable(row))


def is_tight(row: Row) -> bool:
    return bool(row["spare_bytes"] < TIGHT * usable(row))


def usable(row: Row) -> float:
    return float(row["peak_bytes"] + row["spare_bytes"])


def equally_fast(rows: Sequence[Row]) -> list[Row]:
    """Of the choices that may be recommended, the fastest and those that are equally fast."""
    fitting = [row for row in rows if row["fits"] == "yes"]
    fitting = [row for row in fitting if not is_tight(row)] or fitting
    limit = min((row["step_time_ms"] for row in fitting), default=0.0) * (1 + AS_FAST)
    return [row for row in fitting if row["step_time_ms"] <= limit]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Sentences that say which choice to take and why, or what is missing."""
    known = [row for row in rows if row["fits"] != "unknown"]
    if not known:
        return ["No choice could be simulated, so there is nothing to recommend."]
    leanest, best = min(known, key=lambda row: row["peak_bytes"]), recommended(rows)
    if best is None:
        return [
            f"No choice fits. {leanest['name']} comes nearest: its peak of {gib(leanest['peak_bytes'])} is "
            f"{gib(-leanest['spare_bytes'])} more than a device has left for tensors."
        ]
    equal = equally_fast(rows)
    slower = [row for row in known if row["fits"] == "yes" and row["step_time_ms"] > best["step_time_ms"]]
    slower = [row for row in slower if row not in equal]
    too_large = [row for row in known if row["fits"] == "no"]
    flags = f"--ddp-choice {best['choice']}" + (f" --mesh {best['mesh']}" if "mesh" in best else "")
    sentences = [
        f"Take {best['name']} ({best['entrypoint']} {flags}): {best['step_time_ms']:,.1f} ms a step "
        f"({best['step_time_low_ms']:,.1f} to {best['step_time_high_ms']:,.1f}), "
        f"{speed(best)}{total(best)}; its peak of {gib(best['peak_bytes'])} leaves "
        f"{gib(best['spare_bytes'])} to spare."
    ]
    if is_tight(best):
        sentences.append(
            "Nothing leaves a tenth of the memory free, and what the allocator keeps unused is not in the peak."
        )
    tight = [
        row for row in known if row["fits"] == "yes" and row["step_time_ms"] < best["step_time_ms"] and is_tight(row)
    ]
    if tight and not is_tight(best):
        fastest = min(tight, key=lambda row: row["step_time_ms"])
        sentences.append(
            f"{fastest['name']} is faster, {fastest['step_time_ms']:,.1f} ms a step, and not recommended: it leaves "
            f"{gib(fastest['spare_bytes'])}, less than a tenth, and what the allocator keeps unused is not in the peak."
        )
    if len(equal) > 1:
        why = "it is the simplest of them with ample room" if is_roomy(best) else "its peak is the smallest of them"
        others = listed([row["name"] for row in equal if row is not best])
        sentences.append(f"Equally fast within {AS_FAST:.0%}: {others}; {best['name']} is taken since {why}.")
    if slower:
        sentences.append(against_slower(best, slower))
    sentences += by_mesh(known)
    if leanest["peak_bytes"] < 0.95 * best["peak_bytes"]:
        sentences.append(
            f"For larger batches or models, {leanest['name']} has the smallest peak: {gib(leanest['peak_bytes'])}, "
            f"at {leanest['step_time_ms'] / best['step_time_ms']:.2f} times the step time."
        )
    if too_large:
        nearest = min(too_large, key=lambda row: row["peak_bytes"])
        sentences.append(
            f"Not on these devices: {listed([row['name'] for row in too_large])}; of them {nearest['name']} comes "
            f"nearest, short of {gib(-nearest['spare_bytes'])}."
        )
    return sentences


def speed(row: Row) -> str:
    if "tokens_per_second" not in row:
        return f"{row['samples_per_second']:,.1f} samples/s"
    return f"{row['tokens_per_second']:,.0f} tokens/s"


def total(rates: Row) -> str:
    """What --tokens take and cost; empty without them."""
    dollars = f" and {rates['training_cost']:,.0f} $" if "training_cost" in rates else ""
    return f", {rates['training_hours']:,.1f} hours{dollars} in all" if "training_hours" in rates else ""


def against_slower(best: Row, slower: Sequence[Row]) -> str:
    """The next choice in speed, and why it is slower."""
    second = min(slower, key=lambda row: row["step_time_ms"])
    difference = second["step_time_ms"] - best["step_time_ms"]
    exposed = second["exposed_ms"] - best["exposed_ms"]
    why = f", with {exposed:,.1f} ms more of exposed communication" if exposed > difference / 2 else ""
    return f"Next in speed is {second['name']}, {difference:,.1f} ms a step slower{why}."


def by_mesh(known: Sequence[Row]) -> list[str]:
    """The fastest choice of each mesh that fits, where there are several meshes."""
    meshes = list(dict.fromkeys(row["mesh"] for row in known if "mesh" in row))
    if len(meshes) < 2:
        return []
    best = {mesh: recommended([row for row in known if row["mesh"] == mesh]) for mesh in meshes}
    times = [f"{row['name']} {row['step_time_ms']:,.1f} ms" for row in best.values() if row]
    too_large = [mesh for mesh, row in best.items() if row is None]
    nothing = f" Nothing fits on {listed(too_large)}." if too_large else ""
    return [f"Of each mesh: {listed(times)}.{nothing}"]


def gib(held: float) -> str:
    return f"{held / GIB:,.2f} GiB"

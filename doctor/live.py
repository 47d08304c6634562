"""`doctor --live`: this machine before a run, and an all-reduce between every pair of ranks on it.

Run by itself, it starts `ranks` processes; under torchrun, it is one of them, also across nodes. Pairs are measured one
after the other while the others wait, since pairs that share a link would slow each other.
"""

import statistics
from dataclasses import dataclass, field

import msgspec

from doctor.facts import Facts
from doctor.machine import Machine

SLOW = 10.0
"""A pair this many times slower than the typical fast one of its kind is flagged.

That is the median of the faster half of the pairs within a host, or of those across hosts: one slow rank of three or
four makes half of all pairs slow, so the median of all would hide it.
"""


class Pair(msgspec.Struct):
    """`time_ms`: median of an all-reduce between the two; None where it failed, with the reason, or was not begun."""

    ranks: tuple[int, int]
    time_ms: float | None
    problem: str = ""
    across_hosts: bool = False
    is_slow: bool = False


@dataclass
class Live:
    checks: dict[str, str]
    ranks: int = 0
    backend: str = ""
    size_bytes: int = 0
    iterations: int = 0
    pairs: list[Pair] = field(default_factory=list)


def flag_slow_pairs(pairs: list[Pair]) -> list[str]:
    """Mark the pairs that failed or are an order slower than others of their kind; a sentence for each."""
    sentences = []
    for kind in (False, True):
        alike = [pair for pair in pairs if pair.across_hosts is kind]
        times = sorted(pair.time_ms for pair in alike if pair.time_ms is not None)
        typical = statistics.median(times[: (len(times) + 1) // 2]) if times else 0.0
        for pair in alike:
            name = f"Ranks {pair.ranks[0]} and {pair.ranks[1]}"
            if pair.time_ms is None:
                if not pair.problem:
                    continue  # a pair before it failed
                pair.is_slow = True
                sentences.append(f"{name}: {pair.problem}.")
            elif pair.time_ms >= SLOW * typical:
                pair.is_slow = True
                ratio = pair.time_ms / typical
                sentences.append(
                    f"{name}: {pair.time_ms:.2f} ms, {ratio:.0f} times the {typical:.2f} ms of fast pairs."
                )
    slow = [set(pair.ranks) for pair in pairs if pair.is_slow]
    shared = set.intersection(*slow) if len(slow) > 1 else set()
    return sentences + [f"All of them have rank {rank} in common." for rank in sorted(shared)]


def describe(machine: Machine) -> dict[str, str]:
    """The machine in words, a line each."""
    gpus = "; ".join(machine.gpus) or "none that nvidia-smi shows; ranks run on the CPU"
    shm = "not there" if machine.shm_bytes is None else f"{machine.shm_bytes / 2**20:,.0f} MiB"
    free = "" if machine.shm_free_bytes is None else f", {machine.shm_free_bytes / 2**20:,.0f} MiB free"
    memlock = "unlimited" if machine.memlock_bytes is None else f"{machine.memlock_bytes / 1024:,.0f} KiB"
    return {
        "devices": gpus,
        "/dev/shm": shm + free,
        "locked memory": memlock,
        "interfaces": ", ".join(f"{name} ({state})" for name, state in machine.interfaces.items()) or "none",
        "RDMA cards": ", ".join(machine.infiniband) or "none",
        "port": machine.port,
        "virtual machine": "yes" if machine.is_virtual else "no sign of one",
        "IOMMU": machine.iommu,
        "versions": ", ".join(f"{name} {number}" for name, number in machine.versions.items()) or "no torch here",
        "variables": ", ".join(f"{name}={value}" for name, value in machine.environment.items()) or "none set",
    }


def take_up(facts: Facts, machine: Machine, live: Live) -> None:
    """Have rules see what was found and measured here."""
    facts.machine = machine
    facts.slow_pairs = flag_slow_pairs(live.pairs)

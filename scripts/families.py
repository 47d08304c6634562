"""The choices of each entrypoint, and where their reports go."""

from dataclasses import dataclass

import ddp
import sharding
from training.registry import Registry


@dataclass(frozen=True)
class Family:
    """An entrypoint's script, choices and report folder."""

    script: str
    registry: Registry
    report_root: str


FAMILIES = {
    "ddp": Family("main_ddp.py", ddp.REGISTRY, "reports"),
    "sharding": Family("main_shard.py", sharding.REGISTRY, "reports_sharding"),
}


def report_root_of(choice: str) -> str:
    """Where reports on a choice go; those of a choice that nobody knows stand with the replicated ones."""
    of_choice = (family.report_root for family in FAMILIES.values() if choice in family.registry.sentences)
    return next(of_choice, FAMILIES["ddp"].report_root)

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

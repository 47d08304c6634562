"""The families of strategies: what an entrypoint trains, and where its reports are."""

from dataclasses import dataclass

import ddp
import sharding
import tensor_parallel
from ddp_lab.runtime.config import mesh_setting, split_label
from ddp_lab.strategy.registry import Registry


@dataclass(frozen=True)
class Family:
    """One entrypoint, the command that sweeps its choices, and the root folder of their reports.

    Attributes:
        workload: On which a sweep trains by default. Default: that of the entrypoint.
        on_meshes: A sweep runs a short list of choices on meshes, where `--mesh` does not name one.
    """

    script: str
    sweep: str
    registry: Registry
    report_root: str
    workload: str | None = None
    on_meshes: bool = False


FAMILIES = {
    "ddp": Family("main_ddp.py", "run_experiment_ddp.sh", ddp.REGISTRY, "reports"),
    "sharding": Family("main_shard.py", "run_experiment_shard.sh", sharding.REGISTRY, "reports_sharding"),
    "parallel": Family(
        "main_parallel.py",
        "run_experiment_parallel.sh",
        tensor_parallel.REGISTRY,
        "reports_parallel",
        "sample-lm",
        on_meshes=True,
    ),
}


def report_root_of(label: str) -> str:
    """Root folder of the reports on a run; on a mesh, that of main_parallel.py if it has the choice.

    It is that of the replicated choices for a choice that no registry has.
    """
    choice, families = split_label(label)[0], list(FAMILIES.values())
    if mesh_setting(label):
        families.reverse()
    of_choice = (family.report_root for family in families if choice in family.registry.sentences)
    return next(of_choice, FAMILIES["ddp"].report_root)


EVERY = ddp.REGISTRY | sharding.REGISTRY | tensor_parallel.REGISTRY
"""All strategies."""

"""Runs on meshes: the short list of a sweep where `--mesh` does not name one, and the order of runs in a report."""

import re
from collections.abc import Sequence
from typing import Any

from ddp_lab.runtime.config import SEQUENCE_PARALLEL, labelled, mesh_setting
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA, REPLICATE, SHARD, TENSOR, Mesh
from ddp_lab.runtime.settings.mesh import CONTEXT_PARALLEL, LEGACY_NCCL, PIPELINE_SCHEDULES

MOST_TENSOR = 4
"""The most ranks of `tp` in the short list: workload `sample-lm` has this many attention heads."""
ATTENTION = re.compile(rf"-({'|'.join(CONTEXT_PARALLEL)})")
SCHEDULE = re.compile(rf"-({'|'.join(PIPELINE_SCHEDULES)})(\d*)")


def mesh_labels(ranks: int) -> list[str]:
    """Labels of the runs on so many ranks (`ddp_lab.runtime.config.RunConfig.label`).

    Raises:
        UserError: that is no mesh.
    """
    if ranks < 2:
        raise UserError(f"RANKS {ranks}: a mesh to compare has at least 2; give more, or --mesh")
    by_mesh: list[tuple[dict[str, int], list[str]]] = []
    if ranks <= MOST_TENSOR:
        by_torch = ["pytorch_tp"] if ranks % 2 == 0 else []  # DTensor cuts heads only evenly
        by_mesh.append(({TENSOR: ranks}, ["tp", "tp-sp", *by_torch]))
    if ranks >= 4 and ranks % 2 == 0:
        inner = MOST_TENSOR if ranks % MOST_TENSOR == 0 and ranks > MOST_TENSOR else 2
        choices = ["tp", "zero1", "zero1-sp", "zero3", "zero3-sp", "pytorch_fsdp_tp"]
        by_mesh.append(({DATA: ranks // inner, TENSOR: inner}, choices))
    by_mesh.append(({DATA: ranks}, ["zero3"]))
    if ranks >= 4 and ranks % 2 == 0:
        by_mesh.append(({REPLICATE: 2, SHARD: ranks // 2}, ["zero3"]))
    return [label(Mesh(degrees), run) for degrees, runs in by_mesh for run in runs]


def label(mesh: Mesh, run: str) -> str:
    """`run`: a choice, perhaps followed by `SEQUENCE_PARALLEL`."""
    choice = run.partition(SEQUENCE_PARALLEL)[0]
    return labelled(choice, mesh.label + run.removeprefix(choice))


def mesh_flags(setting: str) -> list[str]:
    """The flags of a label's mesh: `dp2-tp2-sp` -> `--mesh dp=2,tp=2 --sequence-parallel`."""
    schedule, attention = SCHEDULE.search(setting), ATTENTION.search(setting)
    return [
        *("--mesh", str(Mesh.of_label(setting))),
        *(["--pipeline-schedule", schedule[1], "--stages-per-rank", schedule[2] or "1"] if schedule else []),
        *(["--context-parallel", attention[1]] if attention else []),
        *["--sequence-parallel"] * (SEQUENCE_PARALLEL in setting),
    ]


def sort_key(label: str, choices: Sequence[str]) -> tuple[Any, ...]:
    """The key that sorts labels by NCCL class, then by mesh, then by choice."""
    choice, *settings = label.split("@")
    setting = mesh_setting(label)
    mesh = Mesh.of_label(setting)
    return LEGACY_NCCL in settings, mesh.data_size, mesh.label, choices.index(choice), setting

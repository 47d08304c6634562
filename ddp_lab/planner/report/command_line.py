"""The command line that trains what was planned."""

import shlex

from ddp_lab.planner.choices import entrypoint_of
from ddp_lab.planner.models import IMAGES
from ddp_lab.planner.plan import Case
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workloads import BUILT_IN_LANGUAGE
from ddp_lab.runtime.settings.data import CAUSAL_LM
from ddp_lab.runtime.settings.field import flag_name

ALWAYS = ("choice", "task", "model", "global_batch_size", "grad_accum_steps", "precision")
"""Settings that the command names though they are the runner's defaults."""


def runner_command(case: Case, choice: str) -> str:
    """Starts all ranks of one node of `case` with `choice`. `HOST` and `MODEL` are left to the reader: the address of
    the first node, and a model that has no name."""
    cluster, model = case.cluster, case.model
    tokens = case.sequence_length if model.task == CAUSAL_LM else None
    name = "MODEL" if " " in model.name or model.kind == IMAGES else model.name
    named = {"workload" if name in BUILT_IN_LANGUAGE else "model": name}
    config = case.config.but(choice=choice, task=model.task, sequence_length=tokens, **named)
    several = [f"--nnodes={cluster.nodes}", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    words = ["torchrun", *(several if cluster.nodes > 1 else ["--standalone"])]
    words += [f"--nproc_per_node={cluster.ranks_per_node}", entrypoint_of(choice, case.mesh)]
    plain = RunConfig().as_dict()
    for setting, value in config.as_dict().items():
        if value != plain[setting] or (setting in ALWAYS and value is not None):
            words += [flag_name(setting), *[str(value)] * (value is not True)]
    return "uv run " + shlex.join(words)

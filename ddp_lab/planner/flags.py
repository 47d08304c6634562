"""The flags of `ddp-lab plan`, and the model that they name. Imports nothing heavy."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_lab.runtime.cli import at_least
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.settings.data import CAUSAL_LM, CLASSIFICATION, TASKS
from ddp_lab.runtime.settings.field import argument
from ddp_lab.runtime.settings.mesh import canonical_mesh
from ddp_lab.strategy.options import AUTO, PRECISIONS

if TYPE_CHECKING:
    from ddp_lab.planner.models import Model

SIZES = ("d_model", "d_ff", "layers", "heads", "kv_heads", "vocab")
NEEDED_SIZES = SIZES[:3]
AS_THE_RUNNERS = (
    *("sequence_parallel", "pipeline_schedule", "stages_per_rank", "pipeline_split"),
    *("context_parallel", "router_scores", "router_bias"),
    *("global_batch_size", "grad_accum_steps", "precision"),
    *("param_dtype", "reduce_dtype", "activation_checkpointing", "loss_chunks", "offload"),
    *("clip_grad_norm", "bucket_cap_mb", "compile"),
)
"""Settings of a plan that mean what they mean for the runner, as `--mesh` does but for `auto`."""
count, amount = at_least(1), at_least(0, float)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that name a model, `--model` or its sizes, and how long its samples are."""
    parser.add_argument(
        "--model",
        help="published model (from a built-in table, without network), that of workload sample-lm or sample-moe, or a "
        "local config.json or its folder",
    )
    parser.add_argument("--d-model", type=count, help="instead: width of a Llama's residual stream")
    parser.add_argument("--d-ff", type=count, help="with --d-model: width of its feed-forward layers")
    parser.add_argument("--layers", type=count, help="with --d-model: number of blocks")
    parser.add_argument("--heads", type=count, help="with --d-model: attention heads (default: of 64 features each)")
    parser.add_argument("--kv-heads", type=count, help="with --d-model: heads of keys and values (default: --heads)")
    parser.add_argument("--vocab", type=count, help="with --d-model: tokens in the vocabulary (default: 49152)")
    parser.add_argument("--sequence-length", type=count, default=512, help="tokens of a sample (default: 512)")


def add_task_flag(parser: argparse.ArgumentParser) -> None:
    what = "what the model is trained for, as the runner's (default: classification)"
    parser.add_argument("--task", choices=TASKS, default=CLASSIFICATION, help=what)


def add_plan_flags(
    parser: argparse.ArgumentParser, mesh: str | None = None, is_formula: bool = False, **other: None
) -> None:
    """Args:
    mesh: The default of `--mesh`.
    is_formula: Devices need not be given, and precisions are another's matter.
    other: Settings of `AS_THE_RUNNERS` that are chosen where they are not given.
    """
    add_model_flags(parser)
    add_task_flag(parser)
    add = parser.add_argument
    add(
        "--gpus",
        required=not is_formula,
        help="devices: 2xL4, or 4x8xH100 for 4 nodes of 8; 2xcpu is this machine; 2xcard.toml: of plan measure",
    )
    add("--link", help="between devices of a node: pcie4, 10gbit, ... (default: the NVLink of H200, H100 and A100)")
    add("--between", help="between nodes, shared by the devices of one: ndr, 8xndr, 100gbit, ...")
    add(
        "--mesh",
        type=mesh_or_auto,
        default=mesh,
        help=f"ranks by dimension, as the runner's: dp=4,tp=2; auto: all that fit (default: {mesh or 'none'})",
    )
    add_flags(
        parser,
        [name for name in AS_THE_RUNNERS if not (is_formula and name == "precision")],
        global_batch_size=None,
        grad_accum_steps=None,
        **other,
    )
    add("--price", type=amount, help="of one device for an hour, in US dollars (default: a list price)")
    add("--tokens", type=at_least(1, float), help="tokens of the whole training: adds its hours and its cost")
    add(
        "--contention",
        type=at_least(1, float),
        metavar="FACTOR",
        help="how many times as long compute takes beside collectives (default: 1.19 on GPUs, published; 1 on CPUs)",
    )
    add(
        "--efficiency", type=float, help="part of peak rates that operators reach, above 0 to 1 (default: by the table)"
    )
    add("--choices", metavar="NAMES", help="only these strategies, with commas between (default: all)")
    add("--jobs", type=count, help="simulations at a time, in processes of their own (default: a core each)")
    add("--csv", type=Path, metavar="FILE", help="write the table there")


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a plan, of which those that are not given are searched over."""
    add_plan_flags(parser, mesh=AUTO, precision=None, activation_checkpointing=None)
    what = "instead of --global-batch-size: tokens in an optimizer step, of which the nearest batch is taken"
    parser.add_argument("--tokens-per-step", type=at_least(1, float), help=what)


def mesh_or_auto(text: str) -> str:
    return text if text == AUTO else argument(canonical_mesh)(text)


def add_memory_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a plan, or a number of parameters instead."""
    add_plan_flags(parser, is_formula=True)
    add = parser.add_argument
    add("--parameters", type=at_least(1, float), help="formulas alone: a number of parameters, such as 7.5e9")
    add("--ranks", type=count, default=1, help="with --parameters: ranks that share the states (default: 1)")
    memory = "with --parameters: of one device, in GiB (default: 80)"
    add("--device-memory-gib", type=at_least(0.001, float), default=80.0, help=memory)
    precisions = "as the runner's; with --parameters also mixed: 16-bit parameters, as in ZeRO's table (default: fp32)"
    add("--precision", choices=(*PRECISIONS, "mixed"), default="fp32", help=precisions)


def add_measure_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, help="file to write: TOML for plan --gpus 2xFILE")


COMMANDS = {
    "plan": (add_plan_flags, "ddp_lab.planner.plan_command"),
    "search": (add_search_flags, "ddp_lab.planner.search_command"),
    "memory": (add_memory_flags, "ddp_lab.planner.memory_command"),
    "measure": (add_measure_flags, "ddp_lab.planner.measure_command"),
}
"""For each command what makes its flags, and the module whose `run` does it, which is imported only then."""


def chosen_model(options: argparse.Namespace) -> "Model":
    """The model that these flags name, for the task that they name.

    Raises:
        UserError: they name none, or two, or one that cannot be built, or not for this task.
    """
    from ddp_lab.planner import models

    model = named_model(options)
    if getattr(options, "task", CLASSIFICATION) != CAUSAL_LM:
        return model
    if model.kind == models.IMAGES:
        raise UserError(f"--task {CAUSAL_LM}: {model.name} takes images; leave the flag out")
    return models.checked(replace(model, task=CAUSAL_LM))


def named_model(options: argparse.Namespace) -> "Model":
    from ddp_lab.planner import models

    sizes = {name: getattr(options, name) for name in SIZES}
    given = [name for name in SIZES if sizes[name] is not None]
    if options.model is not None:
        if given:
            raise UserError(f"{flag(given[0])} is for a model by sizes; it does not go with --model {options.model}")
        return models.find(options.model)
    missing = [name for name in NEEDED_SIZES if name not in given]
    if missing == list(NEEDED_SIZES):
        raise UserError("no model: give --model, or --d-model, --d-ff and --layers")
    if missing:
        raise UserError(f"{flag(missing[0])} is missing; a model by sizes needs --d-model, --d-ff and --layers")
    return models.from_sizes(**sizes)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")

"""What each strategy would need and take on devices that you do not have: its own code, run on tensors without data.

    ddp-lab plan --model SmolLM2-360M --gpus 2xL4 --link pcie4            # all strategies, and which to take
    ddp-lab plan search --model SmolLM2-360M --gpus 8xH100 --global-batch-size 512    # which batch, recomputation, mesh
    ddp-lab plan --model Llama-3.1-8B --gpus 8xH100,8xH200,16xA100       # which devices: the cheapest that fits
    ddp-lab plan memory --parameters 7.5e9 --ranks 64 --precision mixed   # formulas; with a model also simulated peaks
    ddp-lab plan measure --output card.toml                               # what this device reaches, for --gpus

Exit code 0: done. 2: the command line makes no sense, or what it names cannot be used; one line on standard error says
why. 130: stopped by Ctrl-C.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddp_lab.planner.costs import hardware
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import OneLineParser, at_least, unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import add_flags
from ddp_lab.runtime.process.environment import prepare_process
from ddp_lab.runtime.settings.data import CLASSIFICATION, TASKS
from ddp_lab.runtime.settings.field import argument, flag_name
from ddp_lab.runtime.settings.mesh import canonical_mesh
from ddp_lab.strategy.options import AUTO

PLAN, SEARCH, MEMORY, MEASURE = "plan", "search", "memory", "measure"
COMMANDS = {
    PLAN: "ddp_lab.planner.plan",
    SEARCH: "ddp_lab.planner.plan",
    MEMORY: "ddp_lab.planner.memory_command",
    MEASURE: "ddp_lab.planner.costs.card",
}
"""For each command the module whose `run` does it, which is imported only then."""
WIDTH = 240
"""Characters of the widest table: a file or a pipe has no width of its own."""
AS_THE_RUNNERS = (
    *("sequence_parallel", "pipeline_schedule", "stages_per_rank", "pipeline_split"),
    *("context_parallel", "router_scores", "router_bias"),
    *("global_batch_size", "grad_accum_steps", "precision", "lora_rank"),
    *("param_dtype", "reduce_dtype", "activation_checkpointing", "loss_chunks", "offload"),
    *("clip_grad_norm", "bucket_cap_mb", "compile"),
)
"""Settings of a plan that mean what they mean for the runner, as `--mesh` does but for `auto`."""
FREE = ("precision", "activation_checkpointing", "compile")
"""Of these those that a search chooses where they are not given."""
SIZES = ("d_model", "d_ff", "layers", "heads", "kv_heads", "vocab")


def mesh_or_auto(text: str) -> str:
    return text if text == AUTO else argument(canonical_mesh)(text)


def build_parser(command: str = PLAN) -> argparse.ArgumentParser:
    runner_flags = ", ".join(map(flag_name, AS_THE_RUNNERS))
    parser = OneLineParser(
        "ddp-lab plan",
        "ddp-lab plan [search|memory|measure] [flags]",
        description=__doc__,
        epilog=f"As the runner's (ddp-lab train zero1 --help): {runner_flags}",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=24, width=120),
    )
    add, count, amount = parser.add_argument, at_least(1), at_least(0, float)
    if command == MEASURE:
        add("--output", type=Path, required=True, help="file to write: TOML for plan --gpus 2xFILE")
        return parser
    # The model
    add("--model", help="published model, workload sample-lm or sample-moe, or a local config.json or its folder")
    add(
        "--workload",
        metavar="FILE.py:FUNCTION",
        help="instead: your own, as the runner takes it (docs/own-workload.md)",
    )
    about = "instead: width of a Llama, with --d-ff, --layers and also --heads, --kv-heads, --vocab"
    for name in SIZES:
        add(flag_name(name), type=count, metavar="N", help=about if name == SIZES[0] else argparse.SUPPRESS)
    add("--sequence-length", type=count, default=512, metavar="N", help="tokens of a sample (default: 512)")
    text = "what the model is trained for, as the runner's (default: classification)"
    add("--task", choices=TASKS, default=CLASSIFICATION, help=text)
    # Devices
    add(
        "--gpus",
        help="2xL4; 4x8xH100: 4 nodes of 8; 2xcpu: this machine; 2xcard.toml: of plan measure; several, with commas",
    )
    add("--link", help="between devices of a node: pcie4, 10gbit, ... (default: the NVLink of H200, H100 and A100)")
    add("--between", help="between nodes, shared by the devices of one: ndr, 8xndr, 100gbit, ...")
    share = "part of peak rates that operators reach, above 0 to 1 (default: by the table)"
    add("--efficiency", type=float, metavar="X", help=share)
    slower = "how many times as long compute takes beside collectives (default: 1.19 on GPUs, 1 on CPUs)"
    add("--contention", type=at_least(1, float), metavar="X", help=slower)
    # How it is trained
    mesh = AUTO if command == SEARCH else None
    text = f"ranks by dimension, as the runner's: dp=4,tp=2; auto: all that fit (default: {mesh or 'none'})"
    add("--mesh", type=mesh_or_auto, default=mesh, help=text)
    add("--choices", metavar="NAMES", help="only these strategies, with commas between (default: all)")
    chosen = dict.fromkeys(FREE if command == SEARCH else ())
    add_flags(parser, AS_THE_RUNNERS, global_batch_size=None, grad_accum_steps=None, **chosen)
    for action in parser._actions:
        if action.dest in AS_THE_RUNNERS:
            action.help = argparse.SUPPRESS
    parser.set_defaults(**chosen)
    # What it costs, and how it is shown
    add("--price", type=amount, metavar="X", help="of one device for an hour, in US dollars (default: a list price)")
    add("--tokens", type=at_least(1, float), metavar="X", help="of the whole training: adds its hours and its cost")
    failures = "mean time between failures of all devices together: adds how often to save a checkpoint"
    add("--mtbf-hours", type=at_least(1e-3, float), metavar="X", help=failures)
    written = "GB/s at which all nodes together write a checkpoint (default: 2)"
    add("--write-rate", type=at_least(1e-3, float), default=2.0, metavar="X", help=written)
    add("--jobs", type=count, metavar="N", help="simulations at a time, in processes (default: a core each)")
    add("--csv", type=Path, metavar="FILE", help="write the table there")
    if command == SEARCH:
        text = "instead of --global-batch-size: tokens in an optimizer step, of which the nearest batch is taken"
        add("--tokens-per-step", type=at_least(1, float), metavar="X", help=text)
    if command == MEMORY:
        numbers = "formulas alone: a number of parameters, such as 7.5e9; also takes --precision mixed"
        add("--parameters", type=at_least(1, float), metavar="X", help=numbers)
        ranks = "with --parameters: ranks that share the states (default: 1)"
        add("--ranks", type=count, default=1, metavar="N", help=ranks)
        memory = "with --parameters: of one device, in GiB (default: 80)"
        add("--device-memory-gib", type=at_least(0.001, float), default=80.0, metavar="X", help=memory)
    return parser


def main(arguments: Sequence[str]) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare_process()  # `measure` times operators as runs have them
    command, flags = PLAN, list(arguments)
    if flags and not flags[0].startswith("-"):
        command = flags.pop(0)
    if command not in COMMANDS:
        OneLineParser("ddp-lab plan").error(unknown_name("command", command, COMMANDS))
    parser = build_parser(command)
    options, unknown = parser.parse_known_args(flags)
    if unknown:
        flag_names = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(unknown_name("argument", unknown[0], flag_names))
    is_formula = getattr(options, "parameters", None) is not None
    if command != MEASURE and not is_formula and options.gpus is None:
        parser.error("--gpus is missing: give how many devices and which, such as 2xL4 --link pcie4")
    from rich.console import Console

    try:
        if command != MEASURE and not is_formula:
            for gpus in options.gpus.split(","):
                hardware.cluster(gpus, options.link, options.between, options.efficiency)
        with long_work("loading torch", shown=not is_formula):
            module = importlib.import_module(COMMANDS[command])
        options.searches = command == SEARCH
        module.run(options, Console(highlight=False, width=WIDTH))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0

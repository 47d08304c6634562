"""Find out why NCCL or Gloo hangs, fails or is slow, from whatever there is.

    ddp-lab doctor FILE_OR_FOLDER ...       # NCCL_DEBUG=INFO logs, nvidia-smi topo -m, dmesg, lspci -vvv,
                                            # flight-recorder dumps as JSON, a run's folder profile/<choice>/
    nvidia-smi topo -m | ddp-lab doctor -
    ddp-lab doctor --live                   # this machine and its settings
    torchrun ... -m ddp_lab doctor --live   # and an all-reduce between every pair of ranks

Exit code 0: nothing found. 1: something could not be read or measured, and nothing was found. 2: wrong command line.
3: found something. 4: no rule applies, but there are warnings or errors that healthy machines do not have.
"""

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from ddp_lab.doctor.complaints import unexplained
from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.live.results import Live, flag_slow_pairs
from ddp_lab.doctor.reading.inputs import Inputs, read_inputs
from ddp_lab.doctor.reading.texts import to_text
from ddp_lab.doctor.reading.topology import find_topologies
from ddp_lab.doctor.report import Report, to_json
from ddp_lab.doctor.rulebook import rules_as_markdown
from ddp_lab.machine import examine
from ddp_lab.progress import long_work
from ddp_lab.runtime.cli import OneLineParser, at_least
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import add_limit

FOUND, UNEXPLAINED = 3, 4


def main(arguments: Sequence[str]) -> int:
    """Look at what the command line names, print what is found, and return the exit code."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.rules:
        print(rules_as_markdown())
        return 0
    if not options.paths and not options.live:
        parser.error("nothing to look at; name files or folders, - for standard input, or --live")
    inputs = read_inputs(options.paths)
    live = look_live(options, inputs) if options.live else None
    for problem in inputs.problems:
        print(f"error: {problem}", file=sys.stderr)
    if os.environ.get("RANK", "0") != "0":
        return 0  # rank 0 speaks for all
    findings = diagnose(inputs.facts)
    complaints = unexplained(inputs.facts, findings)
    something = inputs.looked_at or live
    if options.json:
        print(to_json(findings, complaints, inputs, live))
    elif something or findings or complaints:
        from rich.console import Console

        Report(Console(highlight=False), findings, complaints, inputs, live, options.all).write()
    if findings:
        return FOUND
    open_complaints = [
        complaint for complaint in complaints if not (complaint.meaning and complaint.meaning.is_harmless)
    ]
    return UNEXPLAINED if open_complaints else 1 if inputs.problems else 0


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("ddp-lab doctor", description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files or folders; - for standard input")
    parser.add_argument(
        "--live", action="store_true", help="check this machine, and under torchrun measure every pair of ranks"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="of --live (default: auto)")
    parser.add_argument(
        "--timeout",
        type=at_least(0.001, float),
        default=30.0,
        metavar="SECONDS",
        help="of --live: for one pair (default: 30)",
    )
    parser.add_argument("--all", action="store_true", help="print everything: why, all evidence, sources, tables")
    parser.add_argument("--rules", action="store_true", help="print every rule in full as Markdown, and stop")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_limit(parser)
    return parser


def look_live(options: argparse.Namespace, inputs: Inputs) -> Live:
    """Examine this machine and measure its pairs. What cannot be measured becomes a problem of the inputs."""
    machine = examine()
    live = Live(machine.describe())
    inputs.facts.machine = machine
    if machine.topology:
        try:
            inputs.facts.topologies += find_topologies(to_text("nvidia-smi topo -m", machine.topology.encode()))
        except UserError as error:
            inputs.problems.append(str(error))
    if "RANK" in os.environ:
        measure(options, live, inputs)
    inputs.facts.slow_pairs = flag_slow_pairs(live.pairs)
    return live


def measure(options: argparse.Namespace, live: Live, inputs: Inputs) -> None:
    import torch

    from ddp_lab.doctor.live.measure import measure_pairs

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.device_count() > 1 else "cpu"
    live.backend = "NCCL" if device == "cuda" else "Gloo"
    try:
        with long_work("measuring every pair of ranks", shown=os.environ["RANK"] == "0"):
            live.pairs = measure_pairs(device, options.timeout)
    except UserError as error:
        inputs.problems.append(str(error))

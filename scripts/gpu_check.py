"""Check on this machine's GPUs all that the project says of itself, in half an hour.

    python scripts/gpu_check.py                       # every part, on all GPUs of this node (up to 8)
    python scripts/gpu_check.py --only parity,waits   # some parts
    python scripts/gpu_check.py --quick               # less of each
    python scripts/gpu_check.py --cpu                 # over Gloo, always quick; so it is on a machine without a GPU

Each part prints its verdict in a line as it ends. A part that fails stops no other. At the end there is one folder, and
in it one page, report.md, to send as an issue. Exit code 0: no part failed. 1: some did. 2: wrong command line.
"""

import argparse
import os
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from rich.console import Console

from ddp_lab.gpu_check import facts, proofs, speed
from ddp_lab.gpu_check.page import gist, page
from ddp_lab.gpu_check.parts import FAIL, SKIPPED, Broken, Machine, Part, Verdict
from ddp_lab.runtime.cli import OneLineParser, at_least
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.process.environment import has_gpu

PARTS = [
    Part("environment", facts.environment),
    Part("topology", facts.topology, least_gpus=2),
    Part("backends", facts.backends),
    Part("parity", proofs.parity),
    Part("waits", proofs.waits),
    Part("sanitizer", proofs.sanitizer),
    Part("resume", proofs.resume),
    Part("all-reduce", speed.curve, least_gpus=2),
    Part("faults", proofs.faults, least_gpus=2),
    Part("originals", speed.beside_originals),
    Part("sweep", speed.sweep_sample),
    Part("sweep bf16", speed.sweep_llm),
]
MOST_RANKS = 8


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--ranks", type=at_least(1), help="processes (default: one for each GPU, up to 8; 2 without)")
    parser.add_argument("--only", help=f"parts, with commas between, of: {names} (default: all)")
    parser.add_argument("--quick", action="store_true", help="less of each part; always so without a GPU")
    parser.add_argument("--cpu", action="store_true", help="leave the GPUs alone: every part over Gloo")
    parser.add_argument("--output-dir", type=Path, default=Path("gpu-check"), help="new folder (default: %(default)s)")
    options = parser.parse_args()
    wanted = [name.strip() for name in options.only.split(",")] if options.only else [part.name for part in PARTS]
    if unknown := [name for name in wanted if name not in {part.name for part in PARTS}]:
        parser.error(f"--only {', '.join(unknown)}: no such part; there are {names}")
    try:
        gpus = 0 if options.cpu else usable_gpus()
    except UserError as error:
        parser.error(str(error))
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    if gpus and (options.ranks or 1) > gpus:
        parser.error(f"--ranks {options.ranks}: this machine has {gpus} GPUs, and NCCL takes one rank a GPU")
    folder: Path = options.output_dir.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--output-dir {options.output_dir}: it holds files already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    ranks = options.ranks or (min(gpus, MOST_RANKS) if gpus else 2)
    machine = Machine(ranks, bool(gpus), folder, options.quick or not gpus)
    return check(machine, [part for part in PARTS if part.name in wanted])


def usable_gpus() -> int:
    """How many GPUs this node has.

    Raises:
        UserError: there is one, but torch cannot use it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that is too old: the error says it
        if torch.cuda.is_available():
            return torch.cuda.device_count()
    if not has_gpu():
        return 0
    why = "torch finds no device"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0]
    raise UserError(
        f"a GPU is here, but torch {torch.__version__} cannot use it: {why}; nvidia-smi shows the driver, and it must "
        f"be for CUDA {torch.version.cuda} or newer; --cpu checks without the GPU"
    )


def check(machine: Machine, parts: list[Part]) -> int:
    """Do all parts, print a line for each, and write the page after each, so that a lost machine loses little."""
    console, began, verdicts = Console(highlight=False), time.monotonic(), dict[str, Verdict]()
    report = machine.folder / "report.md"
    for part in parts:
        start = time.monotonic()
        verdict = verdicts[part.name] = look(part, machine)
        colour = {FAIL: "red", SKIPPED: "yellow"}.get(verdict.how, "green")
        seconds = time.monotonic() - start
        console.print(f"[{colour}]{verdict.how:<9}[/] {part.name:<12} {seconds:5.0f} s  ", end="")
        console.print(verdict.line, markup=False, soft_wrap=True)
        report.write_text(page(machine, verdicts, (time.monotonic() - began) / 60))
    failed = [name for name, verdict in verdicts.items() if verdict.how == FAIL]
    advice = f": {', '.join(failed)} failed; send the folder as an issue" if failed else ""
    console.print(f"\n{report}{advice}", markup=False, soft_wrap=True)
    return 1 if failed else 0


def look(part: Part, machine: Machine) -> Verdict:
    """The part's verdict. Whatever goes wrong in it is its verdict, too."""
    if machine.has_gpus and machine.ranks < part.least_gpus:
        return Verdict(SKIPPED, f"needs {part.least_gpus} GPUs")
    machine.bad_logs.clear()
    try:
        verdict = part.look(machine)
    except Broken as problem:
        verdict = Verdict(FAIL, str(problem))
    except Exception as error:
        verdict = Verdict(FAIL, f"{type(error).__name__}: {error}", texts={"traceback": traceback.format_exc()})
    if verdict.how != FAIL:
        return verdict
    logs = {str(log.relative_to(machine.folder)): gist(log) for log in machine.bad_logs}
    return replace(verdict, texts={**verdict.texts, **logs})


if __name__ == "__main__":
    sys.exit(main())

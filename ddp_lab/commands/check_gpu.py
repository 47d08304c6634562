"""Check all claims of the project on this machine's GPUs, in half an hour.

    ddp-lab check-gpu                       # every part, on all GPUs of this node (up to 8)
    ddp-lab check-gpu --only parity,waits   # some parts
    ddp-lab check-gpu --quick               # less of each
    ddp-lab check-gpu --share-gpu 2         # two ranks on one GPU
    ddp-lab check-gpu --cpu                 # over Gloo, always quick; so it is on a machine without a GPU

The parts are the tests of tests/on_gpu (pytest -m gpu). Each case prints its verdict in a line as it ends. A case that
fails stops no other. At the end there is one folder, and in it one page, report.md, to send as an issue. Exit code 0:
no part failed. 1: some did. 2: wrong command line.
"""

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.runtime.cli import OneLineParser, at_least, require_checkout
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.process.environment import has_gpu

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "environment": 1,
    "topology": 2,
    "backends": 1,
    "parity": 1,
    "waits": 1,
    "sanitizer": 1,
    "resume": 1,
    "all_reduce": 2,
    "faults": 2,
    "originals": 1,
    "sweep": 1,
    "sweep_bf16": 1,
}
"""How many ranks each needs. A part is the test of its name."""
MOST_RANKS = 8


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser("ddp-lab check-gpu", description=__doc__)
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--ranks", type=at_least(1), help="processes (default: one for each GPU, up to 8; 2 without)")
    ranks.add_argument("--share-gpu", type=at_least(2), metavar="N", help="N processes that share one GPU")
    parser.add_argument("--only", help=f"parts, with commas between, of: {', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="less of each part; always so without a GPU")
    parser.add_argument("--cpu", action="store_true", help="leave the GPUs alone: every part over Gloo")
    parser.add_argument("--output-dir", type=Path, default=Path("gpu-check"), help="new folder (default: %(default)s)")
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    require_checkout("check-gpu")
    parts = [name.strip() for name in options.only.split(",")] if options.only else list(PARTS)
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"--only {', '.join(unknown)}: no such part; there are {', '.join(PARTS)}")
    try:
        gpus = 0 if options.cpu else usable_gpus()
    except UserError as error:
        parser.error(str(error))
    if options.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the ranks
    elif gpus and options.share_gpu:
        gpus, os.environ["CUDA_VISIBLE_DEVICES"] = 1, os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if gpus and (options.ranks or 1) > gpus:
        parser.error(f"--ranks {options.ranks}: this machine has {gpus} GPUs, and each rank takes one; or --share-gpu")
    folder: Path = options.output_dir.resolve()
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--output-dir {options.output_dir}: it holds files already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    ranks = options.ranks or options.share_gpu or (min(gpus, MOST_RANKS) if gpus else 2)
    return run_tests(parts, ranks, gpus, folder, bool(options.share_gpu), options.quick or not gpus)


def run_tests(parts: Sequence[str], ranks: int, gpus: int, folder: Path, shares_gpu: bool, is_quick: bool) -> int:
    """Exit code 0 if all parts hold."""
    import pytest  # of the development group, as the tests are of a checkout

    pytest_flags = ["-m", "gpu", "-n", "0", "-q", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    pytest_flags += ["--device", "cuda" if gpus else "cpu", "--ranks", str(ranks), "--check-folder", str(folder)]
    pytest_flags += ["--share-gpu"] * shares_gpu + ["--quick"] * is_quick
    pytest_flags += ["--only", ",".join(parts), "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    return int(pytest.main([*pytest_flags, str(ROOT / "tests" / "on_gpu")]) != 0)


def usable_gpus() -> int:
    """How many GPUs this node has.

    Raises:
        UserError: there is one, but torch cannot use it.
    """
    import torch

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

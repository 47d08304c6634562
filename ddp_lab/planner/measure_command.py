"""`ddp-lab plan measure`: times kernels, which say what this device reaches, and writes the entry of a card.

Under torchrun it measures the link between the ranks of a node, too."""

import argparse
import os

import torch
import torch.distributed as dist
from rich.console import Console

from ddp_lab.planner.costs.card import measure, toml
from ddp_lab.progress import long_work
from ddp_lab.runtime.errors import UserError
from ddp_lab.writing import write_text


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure, and write the file."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks:
        raise UserError("plan measure measures one node; start it on one")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if ranks != "1":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with long_work("measuring kernels, for about a minute"):
            key, entry = measure(device)
    except torch.OutOfMemoryError:
        raise UserError("this GPU's memory is in use; plan measure needs some 8 GiB of it") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        write_text(options.output, toml(key, entry))
        link = "" if "link" in entry else " --link LINK"
        console.print(f"{entry['title']}: {options.output}; plan with --gpus {ranks}x{options.output}{link}")

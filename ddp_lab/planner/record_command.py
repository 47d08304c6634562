"""`ddp-lab plan record`: times the operators of a model's step on this device, for later plans.

Without a model it times kernels, which say what the device reaches."""

import argparse
import os

from rich.console import Console

from ddp_lab.planner.flags import OF_STEPS, SIZES, chosen_model, flag
from ddp_lab.progress import long_work
from ddp_lab.runtime.errors import UserError


def run(options: argparse.Namespace, console: Console) -> None:
    """Record, and write the file.

    Raises:
        UserError: the command line makes no sense, or the file cannot be written.
    """
    if not any(getattr(options, name) for name in ("model", *SIZES)):
        record_card(options, console)
        return
    sizes = (options.micro_batch_sizes or "1,2").split(",")
    if not all(size.isdecimal() and int(size) for size in sizes) or len(sizes) > 6:
        said = f"--micro-batch-sizes {options.micro_batch_sizes}"
        raise UserError(f"{said}: up to 6 whole numbers above 0, such as 1,2,4")
    model, precision = chosen_model(options), options.precision or "fp32"
    model.require_length(options.sequence_length)
    import torch

    from ddp_lab.analysis.files import write_text
    from ddp_lab.planner.costs.timing import TrainingStep, measure
    from ddp_lab.runtime.records.record import to_json
    from ddp_lab.strategy.precision import bring_to

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    about = f"{model.name}, {options.sequence_length} tokens, micro-batches of {', '.join(sizes)}"
    try:
        with device:
            module = model.build()
            bring_to(module, precision)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
            batches = [model.micro_batches(1, int(size), options.sequence_length) for size in sizes]
            steps = [TrainingStep(module, batch, optimizer, precision) for batch in batches]
            with long_work(f"timing operators of {about}"):
                content = measure(steps, device, precision, options.repeats or 7, about)
    except torch.OutOfMemoryError:
        raise UserError(f"{about}: too much for this GPU's memory; record with a smaller --micro-batch-sizes") from None
    write_text(options.output, to_json(content))
    console.print(
        f"{content['hardware']}: {len(content['operators'])} operators of {model.name}; record: {options.output}"
    )
    for size, times in zip(sizes, content["steps"], strict=True):
        step_ms, operators_ms = (1e3 * times[name] for name in ("step_s", "operators_s"))
        console.print(f"micro-batch of {size}: a step takes {step_ms:.4g} ms, operators alone {operators_ms:.4g} ms")


def record_card(options: argparse.Namespace, console: Console) -> None:
    """Measure kernels, under torchrun also the link of all ranks, and write the entry of this device.

    Raises:
        UserError: a flag is for steps of a model, ranks are on several nodes, or the file cannot be written.
    """
    if given := [name for name in OF_STEPS if getattr(options, name) is not None]:
        raise UserError(f"{flag(given[0])} is for a model's step: name its --model, or leave the flag out")
    import torch
    import torch.distributed as dist

    from ddp_lab.analysis.files import write_text
    from ddp_lab.planner.costs.card import measure, toml

    ranks = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", ranks) != ranks:
        raise UserError("plan record measures one node; start it on one")
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
        raise UserError("this GPU's memory is in use; plan record needs some 8 GiB of it") from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ.get("RANK", "0") == "0":
        write_text(options.output, toml(key, entry))
        link = "" if "link" in entry else " --link LINK"
        console.print(f"{entry['title']}: {options.output}; plan with --gpus {ranks}x{options.output}{link}")

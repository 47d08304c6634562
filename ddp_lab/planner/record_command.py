"""`ddp-lab plan record`: times the operators of a model's step on this device, for later plans."""

import argparse

from rich.console import Console

from ddp_lab.planner.flags import chosen_model
from ddp_lab.progress import long_work
from ddp_lab.runtime.errors import UserError


def run(options: argparse.Namespace, console: Console) -> None:
    """Record, and write the file.

    Raises:
        UserError: the command line makes no sense, or the file cannot be written.
    """
    sizes = options.micro_batch_sizes.split(",")
    if not all(size.isdecimal() and int(size) for size in sizes) or len(sizes) > 6:
        said = f"--micro-batch-sizes {options.micro_batch_sizes}"
        raise UserError(f"{said}: up to 6 whole numbers above 0, such as 1,2,4")
    model = chosen_model(options)
    model.require_length(options.sequence_length)
    import torch

    from ddp_lab.planner.costs.timing import TrainingStep, measure
    from ddp_lab.planner.plan_command import write
    from ddp_lab.runtime.records.record import to_json
    from ddp_lab.strategy.precision import bring_to

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    about = f"{model.name}, {options.sequence_length} tokens, micro-batches of {options.micro_batch_sizes}"
    try:
        with device:
            module = model.build()
            bring_to(module, options.precision)
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
            batches = [model.micro_batches(1, int(size), options.sequence_length) for size in sizes]
            steps = [TrainingStep(module, batch, optimizer, options.precision) for batch in batches]
            with long_work(f"timing operators of {about}"):
                content = measure(steps, device, options.precision, options.repeats, about)
    except torch.OutOfMemoryError:
        raise UserError(f"{about}: too much for this GPU's memory; record with a smaller --micro-batch-sizes") from None
    write(options.output, "--output", to_json(content))
    console.print(
        f"{content['hardware']}: {len(content['operators'])} operators of {model.name}; record: {options.output}"
    )
    for size, times in zip(sizes, content["steps"], strict=True):
        step_ms, operators_ms = (1e3 * times[name] for name in ("step_s", "operators_s"))
        console.print(f"micro-batch of {size}: a step takes {step_ms:.4g} ms, operators alone {operators_ms:.4g} ms")

"""Dtypes by the names that the command line has for them, and autocast, over parameters that stay in fp32."""

import torch

DTYPES: dict[str | None, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST = ("bf16", "fp16")


def autocast(device_type: str, precision: str) -> torch.autocast:
    """The context in which forward runs.

    Args:
        precision: One of `ddp_lab.strategy.options.PRECISIONS`.
    """
    return torch.autocast(device_type, DTYPES[precision], enabled=precision in AUTOCAST)

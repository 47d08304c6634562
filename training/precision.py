"""What `--precision` means: the dtype of autocast, over parameters that stay in fp32."""

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device_type: str, precision: str) -> torch.autocast:
    """The context in which forward runs.

    Args:
        precision: One of `training.config.PRECISIONS`.
    """
    return torch.autocast(device_type, AUTOCAST.get(precision), enabled=precision in AUTOCAST)

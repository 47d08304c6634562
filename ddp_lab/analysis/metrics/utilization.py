"""Model FLOPs utilization (MFU): what a run computes of its model, as share of what its devices could.

Chowdhery et al., 2022, "PaLM", appendix B: achieved throughput over that of a system at peak FLOP/s, where a sample
costs what forward and backward of the model need (`docs/run-record.md`, Model FLOPs).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ddp_lab.planner.costs.hardware import canonical_name, filled, table
from ddp_lab.runtime.errors import UserError


class Peak(NamedTuple):
    """What a device computes at most, in FLOP/s of dense matrices, and who says so."""

    flops_per_second: float
    dtype: str
    source: str


def peak_of(record: dict[str, Any]) -> Peak | None:
    """The peak of each device of a run, at the precision of its matrix products. None for a CPU and an unknown GPU."""
    dtype, devices = dtype_of(record["config"]), table()["devices"]
    try:
        device = filled(devices[canonical_name(record["device_name"], devices, "device")])
    except UserError:
        return None
    if device["kind"] != "cuda" or dtype not in device["flops"]:
        return None
    return Peak(device["flops"][dtype], dtype, device["source"])


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype of a run's matrix products."""
    half = {"bf16": "bfloat16", "bf16-true": "bfloat16", "fp16": "float16"}
    return half.get(config.get("param_dtype") or config["precision"], "tfloat32" if config.get("tf32") else "float32")


def mfu(record: dict[str, Any]) -> float | None:
    """A fraction of 1; None without a peak, or if nothing was counted or timed."""
    peak, achieved = peak_of(record), record["model_flops_per_second"]
    return achieved / (peak.flops_per_second * record["world_size"]) if peak and achieved else None

"""Model FLOPs utilization by hand, and which devices have a peak."""

import pytest

from ddp_lab.analysis.metrics.utilization import mfu, peak_of
from tests.traces import record


def run_on(device, achieved, **config):
    content = record("x", 1.0) | {"device_name": device, "model_flops_per_second": achieved}
    return content | {"config": {**content["config"], **config}}


def test_utilization_worked_out_by_hand():
    """Two A100 reach 312 TFLOP/s each in bf16, 156 in TF32 and 19.5 in fp32."""
    name = "NVIDIA A100-SXM4-80GB"
    for config in ({"precision": "bf16"}, {"param_dtype": "bf16"}, {"precision": "fp16"}):
        assert mfu(run_on(name, 312e12, **config)) == pytest.approx(0.5)
    for achieved, config in ((31.2e12, {"tf32": True}), (3.9e12, {})):
        assert mfu(run_on(name, achieved, **config)) == pytest.approx(0.1)
    peak = peak_of(run_on(name, 1.0))
    assert peak is not None and peak.dtype == "float32" and "data sheet" in peak.source

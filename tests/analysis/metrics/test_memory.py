"""Where the memory went, from a record; and what torch says when there is none left."""

import pytest

from ddp_lab.analysis.metrics.memory import COMMUNICATION, OTHER, failed_allocation, memory_parts
from ddp_lab.analysis.report.pages.out_of_memory import fitting_settings
from ddp_lab.analysis.sentences import say
from tests.traces import record

FULL_GPU = (
    "out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.10 GiB of which 512.00 MiB is free. Including non-PyTorch memory, this process has 78.60 GiB memory in use. Of "
    "the allocated memory 70.00 GiB is allocated by PyTorch, and 5.60 GiB is reserved by PyTorch but unallocated.)"
)


def test_the_parts_add_up_to_what_the_device_or_the_process_holds():
    """On the GPU 8 MiB of parameters are gathered, and 12 MiB of gradients lie in buckets."""
    on_cpu, on_gpu = record("x", 1.0), record("x", 1.0)
    on_gpu["memory"][0] |= {"peak_reserved_bytes": 260 * 2**20, "device_used_bytes": 1000 * 2**20}
    on_gpu["memory"][0]["timeline"] |= {"parameters_bytes": [48 * 2**20] * 3, "communication_bytes": [20 * 2**20] * 3}
    names = ["parameters", "gradients", "optimizer_state", COMMUNICATION, OTHER, "cached", "outside"]
    for content, expected in ((on_cpu, [40, 20, 80, 0, 56, 0, 700]), (on_gpu, [40, 8, 80, 20, 48, 60, 740])):
        parts = memory_parts(content).fillna(0).set_index("rank").loc[0] / 2**20
        assert parts[names].tolist() == expected
    assert memory_parts(None).empty


@pytest.mark.parametrize("message", [FULL_GPU, "MemoryError: you tried to allocate 2147483648 bytes", "TypeError: x"])
def test_what_a_run_asked_for_that_ended_out_of_memory(message):
    failed = record("x", 1.0) | {"memory": [], "ended": {"how": "failed", "message": message}}
    allocation = failed_allocation(failed)
    text = say("out_of_memory", allocation) if allocation else ""
    assert ("asked for 2.00 GiB" in text) == ("allocate" in message)
    assert ("0.50 GiB of 79.10 GiB were free" in text) == ("tensors held 70.00 GiB" in text) == (message == FULL_GPU)
    assert ("3.00 GiB outside torch" in text) == (message == FULL_GPU)


def test_a_run_out_of_memory_is_told_three_settings_that_fit():
    """By the planner's own simulation; a workload that it does not know gets none."""
    failed = record("x", 1.0) | {"choice": "zero1", "device": "cuda", "device_name": "NVIDIA L4", "world_size": 2}
    failed["config"] |= {"workload": "sample-lm", "task": "causal-lm", "global_batch_size": 4, "sequence_length": 16}
    settings = fitting_settings(failed)
    assert settings.startswith("zero1 would fit with any of: --activation-checkpointing selective (")
    assert settings.count("GiB at the peak") == 3
    for unknown in ("mlp", f"{__file__}:workload"):
        failed["config"]["workload"] = unknown
        assert fitting_settings(failed) == ""

"""The host and the streams: no waiting where nobody needs a figure, and no race but the one that is planted."""

import time
from unittest import mock

import pytest
import torch

from ddp_lab.runtime.data import batches as own_batches
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.loop import train
from ddp_lab.strategy.batches import StepData
from tests import models
from tests.on_gpu.host_waits import COUNTED, HostWaits
from tests.on_gpu.place import by_choice
from tests.on_gpu.test_parity import IN_PARTS, case_of
from tests.parity import IN_OWN_LOOPS, strategy_of

pytestmark = pytest.mark.gpu

SAMPLES, STEPS = 3, 4
IN_STAGES = [name for name in IN_PARTS if "in stages" in name]
RACED = ["simple_ddp_async", "bucket_ddp_async", "zero1", "zero2", "zero3"]
PLANTED = "simple_ddp"
"""The choice in which a wait is planted."""


def names_for(place):
    """Pairs of stages among more ranks on one GPU would hang."""
    can_pair = place.ranks % 2 == 0 and (place.ranks == 2 or not place.shares_gpu)
    return [*IN_OWN_LOOPS, *(IN_STAGES if can_pair else [])]


def steps_of(case, rank, count, micro_batches=1):
    """This rank's micro-batches of so many steps, copied to the device as those of a run. Stages of a pipeline have
    those of both their ranks."""
    size = case.dims.size
    members = (rank // 2 * 2, rank // 2 * 2 + 1) if "pp" in case.dims.degrees else (rank,)
    plain = (
        StepData(
            SAMPLES * size * micro_batches,
            [
                models.host_batch(case.model, SAMPLES, 1000 * step + 10 * index + member)
                for member in members
                for index in range(micro_batches)
            ],
        )
        for step in range(count)
    )
    return own_batches.copied_ahead(plain, models.DEVICE)


def waits_of(names, size, is_planted=False):
    """By choice: calls of settled steps that make the host wait for the device, and where they are."""
    read_no_masks()

    def places(name):
        case = case_of(name, size)
        with strategy_of(case) as strategy, HostWaits(models.DEVICE) as counter:
            if is_planted:
                strategy.module.register_forward_hook(lambda module, inputs, outputs: outputs.loss.item() and None)
            rank = torch.distributed.get_rank()
            train(strategy, steps_of(case, rank, counter.steps, 2), counter, 1.0)
        return counter.waits

    return by_choice(names, places)


def test_waits(place, pools):
    """Calls that make the host wait for the device, as `torch.cuda.set_sync_debug_mode` sees them.

    Hand-written choices make none. References may. A wait that is planted must be seen.
    """
    pool = pools(place.backends[0])
    waits = pool.run(place.ranks, waits_of, names_for(place), place.ranks, timeout_s=300)[0]
    planted = pool.run(place.ranks, waits_of, [PLANTED], place.ranks, True)[0][PLANTED]
    bad = []
    for choice, at in waits.items():
        count, where = (str(sum(at.values())), ", ".join(at)) if isinstance(at, dict) else (at, "")
        place.rows.append({"choice": choice, f"waits in {COUNTED} steps": count, "where": where})
        if not isinstance(at, dict) or (at and not choice.startswith("pytorch_")):
            bad.append(f"{choice}: {count} in {COUNTED} steps {where}")
    place.says("no hand-written choice waits for the device", bad)
    if not place.has_gpus:
        pytest.skip("a CPU has nothing to wait for (every choice ran)")
    assert isinstance(planted, dict) and planted, f"the wait that was planted is not seen: {planted}"


def losses(names, size, is_racing=False):
    """By choice: the loss after a few steps under torch's CUDA sanitizer, or its report.

    With a race no stream waits for a batch to arrive. The host waits instead, so that nothing breaks, by a call that
    for the sanitizer orders no streams.
    """
    if models.DEVICE.type == "cuda":
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()
    read_no_masks()

    def unordered(step, arrived):
        while not arrived.query():
            time.sleep(1e-4)
        return step

    def loss(name):
        case = case_of(name, size)
        with strategy_of(case) as strategy:
            steps = steps_of(case, torch.distributed.get_rank(), STEPS)
            return train(strategy, steps, clip_grad_norm=1.0).loss[-1]

    with mock.patch.object(own_batches, "received", unordered if is_racing else own_batches.received):
        return by_choice(names, loss)


def test_sanitizer(place, pools):
    """torch's CUDA sanitizer, which looks for unordered accesses of streams to the same memory.

    It must find a race that is planted, and no other. It stays on in its ranks, so they end.
    """
    pool, reports = pools(place.backends[0]), {}
    raced = [name for name in names_for(place) if name in (*RACED, *IN_STAGES)]
    for part, names in (("steps", raced), ("race", ["simple_ddp_async"])):
        by_rank = pool.run(place.ranks, losses, names, place.ranks, part == "race", timeout_s=400)
        pool.close()
        reports[part] = [f"{name}: {loss}" for row in by_rank for name, loss in row.items() if isinstance(loss, str)]
    place.says("no race reported but the one that was planted", reports["steps"])
    if not place.has_gpus:
        pytest.skip("it needs a GPU (every choice ran)")
    assert any("CSAN" in report or "CUDASanitizer" in report for report in reports["race"]), (
        f"the race that was planted is not reported, so the sanitizer does not work here: {reports['race']}"
    )

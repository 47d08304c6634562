"""No strategy races, whatever it is asked to do; and the checker finds what does."""

import itertools
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import ddp
import sharding
from ddp_lab.commands.check_gpu import ROOT
from ddp_lab.stream_checker.check import STEPS, check
from pipeline_parallel.schedules import SCHEDULES
from scripts import check_streams
from tests.in_process import run_in_process
from tests.models import make_batch
from tests.parity import Case, in_stages, strategy_of
from tests.stream_checker.planted import PLANTED
from tests.tables import by_default

HAND_WRITTEN = [name for name in (*ddp.CHOICES, *sharding.CHOICES) if "_" not in name or name.split("_")[0] in
                ("simple", "flat", "bucket")]  # fmt: skip
REFERENCES = ["pytorch_ddp", "pytorch_zero1", "pytorch_zero2", "pytorch_zero3"]
IN_BUCKETS = ("bucket_ddp_async", "baseline", "zero1", "zero2")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def checked(choice, model="llama", micro_batches=1, **more):
    options = {"bucket_cap_mb": 0.0005} if choice in IN_BUCKETS else {}
    options |= more.pop("options", {})
    schedule, mesh = more.pop("schedule", ""), more.pop("mesh", "dp=4")
    case = Case(choice, model, mesh, options, optimizer="fused")
    if schedule:
        case = in_stages(choice, "dp=2,pp=2", model, schedule, "fused", **options)
    return check(partial(strategy_of, case), partial(make_batch, model, 3), micro_batches, **more)


ALONE = ("simple_ddp", "simple_ddp_async", "flat_ddp", "bucket_ddp_async", "zero1", "zero2", "zero3", "pytorch_zero3")


@pytest.mark.parametrize("choice", by_default([*HAND_WRITTEN, "pytorch_ddp", "pytorch_zero3"], *ALONE))
def test_no_race_and_no_host_wait(choice):
    """Also with clipping, and with buffers."""
    model = "normed" if choice in ("simple_ddp", "zero2", "pytorch_ddp") else "llama"
    check_late_and_early(choice, model, 2, clip_grad_norm=0.1)


def check_late_and_early(choice, model, micro_batches, **more):
    """No race, and results are the same however late collectives end."""
    late, early = (checked(choice, model, micro_batches, is_late=is_late, **more) for is_late in (True, False))
    assert not late.races and not early.races, f"{model}, {micro_batches} micro-batches"
    assert late.losses == early.losses and all(torch.tensor(late.losses).isfinite())
    if choice in (*HAND_WRITTEN, "tp") and model != "branching":  # which waits for the sign of its inputs
        assert not late.host_waits and not late.stalls


IN_STAGES = [(choice, schedule) for choice in ("tp", "zero1", "zero2", "zero3") for schedule in SCHEDULES]


@pytest.mark.parametrize("case", by_default(IN_STAGES, ("zero3", "zb-h1")))
def test_no_race_and_no_host_wait_in_a_pipeline(case):
    """On the first rank of two, which has two of four stages in the interleaved schedule."""
    check_late_and_early(case[0], "lm, long", 2, schedule=case[1], clip_grad_norm=0.1)


def test_a_message_of_unknown_form_is_a_wait_of_the_host():
    """Its receiver must be told of it first, which is so in the first step alone."""
    with mock.patch("pipeline_parallel.runner.form_of", lambda *_: object()):
        report = checked("tp", "lm, long", 2, schedule="1f1b")
    assert not report.races and sum(report.host_waits.values()) == 2 * STEPS
    assert all(at.startswith("pipeline_parallel/channels.py") for at in report.host_waits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", [*HAND_WRITTEN, *REFERENCES])
def test_no_race_under_any_module(choice):
    for model, micro_batches in itertools.product(("plain", "llama", "normed"), (1, 3)):
        check_late_and_early(choice, model, micro_batches, clip_grad_norm=0.1)


HSDP = "replicate=2,shard=2"
CAST = {"param_dtype": "bf16"}
SCALED = {"precision": "fp16", "loss_scale": 2.0**10}
"""The loss scale stays on the device."""
SETTINGS = [
    *((choice, "normed", {"mesh": HSDP}) for choice in ("zero1", "zero2", "zero3", "pytorch_zero3")),
    *((choice, "branching", {"find_unused_parameters": True}) for choice in ("bucket_ddp_async", "zero2", "zero3")),
    *((choice, "llama", CAST) for choice in ("zero2", "zero3")),
    *((choice, "llama", SCALED) for choice in HAND_WRITTEN),
    *((choice, "plain", {"compress": "int8"}) for choice in ddp.CHOICES),
]
TRIED = [
    ("zero3", "normed", {"mesh": HSDP}),
    ("zero2", "branching", {"find_unused_parameters": True}),
    ("zero3", "llama", CAST),
    ("bucket_ddp_async", "llama", SCALED),
    ("zero3", "llama", SCALED),
    ("bucket_ddp_async", "plain", {"compress": "int8"}),
]


@pytest.mark.parametrize("case", by_default(SETTINGS, *TRIED))
def test_settings(case):
    choice, model, options = case
    more = options if "mesh" in options else {"options": options}
    check_late_and_early(choice, model, 2, **more)


@pytest.mark.parametrize("choice", by_default(HAND_WRITTEN, "bucket_ddp_async", "zero3"))
def test_an_abandoned_step_leaves_no_race(choice):
    """A micro-batch fails while communication is under way: of the one before, or of its own later layers."""
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("planted")

    def abandon(strategy):
        strategy.zero_grad()
        layer = next(layer for layer in strategy.module.modules() if isinstance(layer, nn.Linear))
        handle = layer.register_forward_hook(lambda m, a, output: output.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="planted"):
            strategy.forward_backward([make_batch("llama", 3, index) for index in range(3)])
        handle.remove()

    mesh = HSDP if choice.startswith("zero") else "dp=4"
    assert not checked(choice, "llama", 3, also=abandon, mesh=mesh).races
    assert len(calls) == 3


@pytest.mark.parametrize("planted", PLANTED, ids=[race.fault for race in PLANTED])
def test_a_planted_race_is_found(planted):
    with planted.there():
        report = checked(planted.choice, planted.model, 2, options=planted.options, is_late=False, **planted.more)
    assert report.races and any(planted.says in text for text in report.races), dict(report.races)


@pytest.mark.slow
def test_the_table_in_the_docs():
    answer = run_in_process(check_streams)
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert answer.returncode == 0
    assert answer.stdout.strip() == text.partition("<!-- streams -->")[2].partition("<!-- /streams -->")[0].strip()


def test_the_command_tells_of_a_race():
    planted = next(race for race in PLANTED if race.choice == "zero3")
    with planted.there():
        answer = run_in_process(check_streams, "--choices", "zero3", "--model", planted.model)
    assert answer.returncode == 1 and "race: zero3: " in answer.stdout and planted.says in answer.stdout
    assert run_in_process(check_streams, "--choices", "zero4").returncode == 2

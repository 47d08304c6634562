"""Faults that people make with PyTorch's own wrappers: the first difference is found, and its cause is named."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from ddp_lab.parity.causes import cause_of
from ddp_lab.parity.comparison import compare
from ddp_lab.parity.store import read
from tests.parity_tool.loops import train
from tests.ranks import RankPool


class Fault(NamedTuple):
    """Attributes:
    said: Words of the cause, all of which must be there.
    run: How run B, which has the fault, is made.
    both: How both runs are made.
    ranks: Of run B.
    """

    said: tuple[str, ...]
    run: Mapping[str, Any] = MappingProxyType({})
    both: Mapping[str, Any] = MappingProxyType({})
    ranks: int = 2


CUT = {"wrapper": "none"}
FAULTS = {
    "not divided": Fault(("x 4", "micro-batches", "trap 4"), {"micro_batches": 4}),
    "divided by ranks": Fault(("1 / ranks", "averaged twice")),
    "sum on top": Fault(("x 2", "ranks", "on top of DDP's average")),
    "still scaled": Fault(("x 1024", "loss scale", "unscale_")),
    "equal seeds": Fault(("every rank draws the same dropout", "trap 13"), both={"dropout": 0.3}),
    "eval mode": Fault(("training mode in run A alone", "model.train()"), both={"dropout": 0.3}),
    "untied": Fault(("embed.weight and head.weight", "two in run B", "trap 7")),
    "clips first": Fault(("norm of its own", "before they are reduced"), both={"clips": 0.1}),
    "no_sync at last": Fault(("nobody has reduced", "no_sync()")),
    "bare module": Fault(("nobody has reduced", "bare module")),
    "group of some": Fault(("nobody has reduced", "group of some ranks"), {"wrapper": "none"}, ranks=4),
    "rate twice": Fault(("lr 0.01", "x 2 = ranks", "scaled twice")),
    "rate of a rank": Fault(("x 3", "on rank 1")),
    "rate each micro-batch": Fault(("lr", "once a micro-batch"), {"micro_batches": 2}),
    "decay": Fault(("weight_decay 0 for", "0.1")),
    "mean of means": Fault(("mean of means", "traps 4 and 5"), both={"padded": True}),
    "sampler without rank": Fault(("rank 0 and rank 1 train on the same samples", "trap 17")),
    "other shuffle": Fault(("share", "samples", "set_epoch")),
    "other data": Fault(("run B sees 8 samples that run A does not",)),
    "drops last": Fault(("2 of 8 samples", "drop_last")),
    "hook": Fault(("norm.weight has a gradient hook", "FSDP2"), {"wrapper": "fsdp", "fault": ""}, {"hook": True}),
    "no zero_grad": Fault(("added to those of step 0", "zero_grad()")),
    "zero between": Fault(("the last micro-batch alone", "zero_grad()"), {"micro_batches": 2}),
    "optimizer first": Fault(("not updated in run B", "before the model was wrapped"), {"wrapper": "fsdp"}),
    "other start": Fault(("weights of rank 1", "trap 12"), {"wrapper": "none"}),
    "autocast": Fault(("float32 in run A", "bfloat16 in run B")),
    "frozen": Fault(("norm.weight has no gradient in run B", "frozen")),
    "late": Fault(("step 1 is that of step 0", "one step late"), both={"optimizer": "sgd"}),
    "not sent": Fault(("embed.weight is not updated on rank 1", "sends"), {"optimizer": "adam by hand"}),
    "clips shards": Fault(
        ("run A alone calls clip_grad_norm_", "norm of what it holds"), {"wrapper": "fsdp"}, {"clips": 0.1}
    ),
    "no sum forward": Fault(("part of a sum", "last, which comes next", "all-reduce"), CUT, {"cut": "tp"}),
    "no sum backward": Fault(("goes wrong in backward between norm and embed", "not summed"), CUT, {"cut": "tp"}),
    "bias on each rank": Fault(("output of down does not add up", "bias"), CUT, {"cut": "tp", "bias": True}),
    "positions": Fault(("a part of every sample", "of place", "begin at 0 on each rank"), CUT, {"cut": "tokens"}),
    "labels": Fault(("the loss gives another gradient", "shifted after the cut"), CUT, {"cut": "tokens"}),
    "sums each micro-batch": Fault(("x 2, x 1", "after every micro-batch"), CUT | {"micro_batches": 2}, {"cut": ""}),
    "zero between, no bias": Fault(
        ("the last micro-batch alone",), CUT | {"micro_batches": 4, "fault": "zero between"}, {"cut": ""}
    ),
    "clips scaled": Fault(("x 1024: a loss scale", "unscaling"), CUT, {"cut": "", "clips": 100.0}),
    "reentrant": Fault(("weight and 2 more", "use_reentrant=True"), CUT, {"cut": "", "frozen": True}),
    "cast buffer": Fault(("rate is nearly the same", "casts buffers"), CUT, {"cut": ""}),
    "average": Fault(("buffer average", "once a micro-batch"), CUT | {"micro_batches": 2}, {"cut": ""}),
    "gathers": Fault(("outputs agree", "gradient to that of last", "all_gather"), both={"of": "towers"}),
    "term": Fault(("#1 answers", "x 0.5: 1 / ranks", "averages already"), both={"of": "term"}),
    "biased": Fault(("running_var differs", "running_mean agrees", "n - 1"), both={"of": "statistics"}),
    "fused": Fault(("output of down does not add up", "fused weight"), both={"of": "fused"}),
    "replicas": Fault(("run A scales its own by", "another norm"), both={"of": "fused", "clips": 0.1}),
    "repeats": Fault(("2 of 8 samples of step 0 more often", "DistributedSampler"), both={"of": "adapter"}),
    "own batches": Fault(("data: run B sees 8 samples that run A does not",), both={"of": "adapter"}),
    "cast parameters": Fault(("float32 in run A, and bfloat16 in run B", "trap 20"), both={"of": "adapter"}),
    "ties": Fault(("tied.weight is not the same on all ranks", "tied weights"), both={"of": "stages"}),
    "buffers": Fault(("mean", "rank 1", "broadcast_buffers"), {"broadcasts": False, "fault": ""}, {"counts": True}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_is_named(name: str, ranks: RankPool, tmp_path: Path) -> None:
    fault = FAULTS[name]
    of_a = 2 if name == "buffers" else 1
    ranks.run(of_a, run_both, tmp_path, dict(fault.both) | ({"wrapper": "ddp"} if of_a > 1 else {}))
    ranks.run(
        fault.ranks, run_one, tmp_path / "b", {"wrapper": "ddp", "fault": name} | dict(fault.both) | dict(fault.run)
    )
    made = compare(*(read(tmp_path / run) for run in "abc"))
    cause = cause_of(made)
    assert cause is not None, made.first
    for word in fault.said:
        assert word in f"{cause.name}. {cause.usually}", (cause, made.first)


def run_both(folder: Path, how: dict[str, Any]) -> None:
    """Run A, and the same with another rounding."""
    train(folder / "a", **how)
    train(folder / "c", rounding=True, **how)


def run_one(folder: Path, how: dict[str, Any]) -> None:
    train(folder, **how)

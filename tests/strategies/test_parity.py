"""Every registered choice computes what one process computes on the whole global batch, and issues what it announces.

Rows hold each pair of a choice, a module with a trap, a split of the samples, and settings. A choice that is added to a
registry gets rows, too.
"""

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.options import StrategyOptions
from tests.covering import Row, pairwise
from tests.models import BRANCHES, LORA, MODELS, UNUSUAL, WITH_STATISTICS
from tests.parity import (
    IN_OWN_LOOPS,
    NAMES,
    REFUSALS,
    Case,
    Options,
    Split,
    build_and_step,
    check,
    check_each,
    load,
    message_of,
)
from tests.ranks import RankPool

LOW = {"fp16": 64.0, "bf16": None, "bf16-true": None}
ROUNDINGS: dict[str, Options] = {
    "": {},
    **{name: {"precision": name, "loss_scale": scale} for name, scale in LOW.items()},
    "reduced": {"reduce_dtype": "bf16"},
    "bf16, reduced": {"precision": "bf16", "reduce_dtype": "bf16"},
    "parameters in bf16": {"param_dtype": "bf16"},
    "parameters in fp16": {"param_dtype": "fp16", "loss_scale": 64.0},
    "parameters in bf16, reduced": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    "int8": {"compress": "int8"},
}
"""Settings that change the numbers. One process rounds alike."""
EXACT: dict[str, Options] = {
    "": {},
    "filled": {},
    **{f"{kind} again": {"activation_checkpointing": kind} for kind in ("block", "selective")},
    **{f"{kind} offloaded": {"offload": kind} for kind in ("optimizer", "parameters", "parameters:FOLDER")},
}
"""Settings that must not change a bit."""
TRAPS = (*MODELS, *UNUSUAL, *BRANCHES, LORA, "spiked", "awkward")
WITHOUT_BLOCKS = {"tied", "frozen", "odd", "normed", *BRANCHES}
"""Without blocks, buckets follow the order in which gradients come. Recomputation changes it, and sums of 3 ranks."""
NOT_ANNOUNCED = ("zero3", "lookup, checkpointed")
"""What runs twice is gathered twice."""
FACTORS = {
    "choice": NAMES,
    "model": TRAPS,
    "rounding": list(ROUNDINGS),
    "exact": list(EXACT),
    "split": ("even", "uneven", "some have none", "own loop"),
    "ranks": ((2, "adam"), (2, "sgd"), (3, "sgd")),  # with sums of three, Adam would magnify rounding too much
    "bucket_cap_mb": (25.0, 0.0003, 0.00001, "auto"),  # small ones hold one parameter, which may be larger
    "groups": (False, True),
    "clip": (None, 0.5),
}


def casts(options: Options) -> bool:
    return "param_dtype" in options or options.get("precision") == "bf16-true"


BY_MODULE = "has no blocks", "computes its blocks again by itself", "keeps its statistics"
MODULES: list[Options] = [
    {"activation_checkpointing": "block"},
    {"param_dtype": "bf16"},
    {"compile_backend": "aot_eager"},
]


def refusal_of(choice: str, model: str, options: Options) -> str | None:
    """How a choice refuses these settings, or this module with them; None if it takes both."""
    try:
        load(choice).supports.require(StrategyOptions(**options))
    except UserError as error:
        return str(error)
    if "activation_checkpointing" in options and model in WITHOUT_BLOCKS:
        return BY_MODULE[0]
    if "activation_checkpointing" in options and model.startswith("llama, checkpointed"):
        return BY_MODULE[1]
    if casts(options) and model in WITH_STATISTICS:
        return BY_MODULE[2]
    if "compile_backend" in options and choice == "zero3" and model in WITHOUT_BLOCKS:
        return "--compile: zero3 must gather layer by layer"
    return None


@cache
def is_taken(choice: str, model: str, rounding: str, exact: str) -> bool:
    """Whether the choice takes the module and settings, and one process or the choice without `exact` is comparable."""
    options = {**ROUNDINGS[rounding], **EXACT[exact]}
    try:
        refusal = refusal_of(choice, model, options)
    except UserError:
        return False
    again, is_rounded = "again" in exact, bool(ROUNDINGS[rounding])
    return not (
        refusal
        or (casts(options) and model == "odd")  # computes with fp32 and fp64 at once
        or (is_rounded and (choice, model) in REFUSALS)
        or (exact == "filled" and model in BRANCHES)  # zeros instead of None for gradients let weights decay
        or (again and is_rounded and model == "out of order")  # docs/how-it-works/memory.md#activation-checkpointing
    )


def is_allowed(row: Row) -> bool:
    levels: list[Any] = [[row[name]] if name in row else list(values) for name, values in FACTORS.items()]
    if not any(is_taken(*combination) for combination in product(*levels[:4])):
        return False
    choice, split, ranks = (row.get(name, "") for name in ("choice", "split", "ranks"))
    return not (
        (split == "own loop" and choice.startswith("deepspeed"))
        or (row.get("model") in WITH_STATISTICS and split not in ("", "even"))  # statistics need more than one sample
        or (row.get("model", "").startswith("llama") and ranks == (2, "adam") and row.get("rounding"))
    )


def case_of(row: Row) -> Case:
    options = {**ROUNDINGS[row["rounding"]], **EXACT[row["exact"]], "bucket_cap_mb": row["bucket_cap_mb"]}
    own_loop, (size, optimizer) = row["split"] == "own loop", row["ranks"]
    settings = {"split": "unequal" if own_loop else row["split"], "own_loop": own_loop, "optimizer": optimizer}
    exact = {name: value for name, value in options.items() if name not in EXACT[row["exact"]]}
    same_as = {"fills": True} if row["exact"] == "filled" else {"options": exact} if EXACT[row["exact"]] else None
    announces = (row["choice"], row["model"]) != NOT_ANNOUNCED
    settings |= {"groups": row["groups"], "clip": row["clip"], "same_as": same_as, "counted": announces}
    return Case(row["choice"], row["model"], f"dp={size}", options, **settings)


def is_sampled(row: Row) -> bool:
    """The choices with most code of their own meet every model; the others a third of them."""
    choice, model = row.get("choice"), row.get("model")
    if choice in ("bucket_ddp_async", "zero1", "zero2", "zero3") or not (choice and model):
        return is_allowed(row)
    return is_allowed(row) and TRAPS.index(model) % 3 == NAMES.index(choice) % 3


@cache
def rows() -> list[Row]:
    return pairwise(FACTORS, is_sampled)


@pytest.mark.parametrize("choice", NAMES)
def test_parity(ranks: RankPool, tmp_path: Path, choice: str) -> None:
    check_each(ranks, [case_of(row) for row in rows() if row["choice"] == choice], tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", NAMES)
@pytest.mark.parametrize("model", TRAPS)
def test_every_pair_of_settings(ranks: RankPool, tmp_path: Path, choice: str, model: str) -> None:
    fixed = {"choice": [choice], "model": [model], "rounding": [""], "exact": ["", "filled"]}
    if model in BRANCHES:  # a micro-batch that fills up uses its branch
        fixed |= {"split": ["even", "uneven", "own loop"]}
    if (
        choice == "zero3" and model in BRANCHES
    ):  # of several units some orders of branches are refused (docs/own-loop.md)
        fixed |= {"bucket_cap_mb": [25.0, "auto"]}
    pairs = pairwise(FACTORS | fixed, is_allowed)
    check_each(ranks, [case_of(row) for row in pairs], tmp_path)


FP16 = {"precision": "fp16", "loss_scale": 2.0**12, "growth_interval": 3}
ALONE: list[Split] = [[[2], [2]]] * 3
SKIPPING = {"options": FP16, "split": [[[3, 2], [1, 4]]] * 8, "huge": [(2, 1)]}
THREE: list[Split] = [[[3], [2], [2]], [[3], [3], [3]], [[1, 2], [2], [4]], [[2], [2], [2]]]


@pytest.mark.parametrize("choice", IN_OWN_LOOPS)
def test_fp16_skips_steps_as_grad_scaler(ranks: RankPool, choice: str) -> None:
    """An overflow of one element on rank 1 alone, then growth; with an optimizer that skips on the device, and not."""
    cases = [
        Case(choice, "spiked", optimizer="fused", clip=0.5, **SKIPPING),
        Case(choice, "spiked", own_loop=True, **SKIPPING),
    ]
    if choice in ("bucket_ddp_async", "zero1", "zero3", "pytorch_zero3"):
        often = FP16 | {"growth_interval": 1}
        cases.append(Case(choice, "plain", "dp=3", often, THREE, "fused", huge=[(1, 2), (2, 0)]))
    check_each(ranks, cases)


BF16, REDUCED = {"param_dtype": "bf16"}, {"param_dtype": "bf16", "reduce_dtype": "bf16"}
AS_FSDP2 = {"optimizer": "adam", "same_as": {"choice": "pytorch_zero3"}}
"""With two ranks sums have one order. ZeRO-1 adds micro-batches up before it reduces them, FSDP2 after."""
NUMBERED = list(enumerate(NAMES))
ONE_EACH = {"bucket_cap_mb": 1e-6, "find_unused_parameters": True}
ROWS = [
    *(Case(choice, "handed", split=ALONE, options={"bucket_cap_mb": 0.00001}) for choice in NAMES),
    *(
        Case(choice, "branching, in turns", options=ONE_EACH, split="in turns", optimizer=optimizer)
        for choice in IN_OWN_LOOPS  # DeepSpeed updates unused parameters
        for optimizer in ("adam", "sgd")
        if choice not in ("pytorch_zero2", "pytorch_zero3")  # FSDP2 must run all units
    ),
    # The loss is a mean over all targets. A micro-batch has from one to ten of them.
    *(
        Case(choice, "lm, gpt2, masked", split="uneven", options={"loss_chunks": 1 + 2 * (n % 2)})
        for n, choice in NUMBERED
    ),
    *(Case("zero1", "llama", options=options, split=ALONE, **AS_FSDP2) for options in (BF16, REDUCED)),
    *(Case("zero2", "llama", options=options, **AS_FSDP2) for options in (BF16, REDUCED)),
    Case("zero3", "frozen", options=BF16, **AS_FSDP2),
    Case("zero3", "llama", options={"reduce_dtype": "bf16"}, **AS_FSDP2),
    Case("zero3", "llama", options={"param_dtype": "fp16", "growth_interval": 2}, alone=False, **AS_FSDP2),
    *(
        Case(
            choice,
            "branching, a-b",
            options=options,
            optimizer="adam",
            clip=0.5,
            same_as={"options": {}, "fills": True},
        )
        for choice in ("zero1", "zero2", "zero3")
        for options in ({"offload": "optimizer"}, {"offload": "optimizer:FOLDER"})
    ),
    Case("zero3", "llama, checkpointed", "dp=3", same_as={}),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_rows(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    check(ranks, case, tmp_path)


def refused(choice: str) -> list[str]:
    """Settings that a strategy does not refuse by name when it is built, though it must."""
    wrong = []
    settings = (*ROUNDINGS.values(), *EXACT.values())
    for model, options in (*product(["plain"], settings), *product(TRAPS, MODULES)):
        if refusal := refusal_of(choice, model, options):
            message = message_of(UserError, build_and_step, Case(choice, model, options=options))
            wrong += [f"{options}: {message}"] * (refusal not in message or not refusal.startswith(("--", *BY_MODULE)))
    return wrong


@pytest.mark.parametrize("choice", NAMES)
def test_what_is_refused_is_named(ranks: RankPool, choice: str) -> None:
    assert ranks.run(2, refused, choice) == [[], []]

"""Every setting, and pairs of them, under every choice, on every module that holds a trap.

Some settings round: their parity is with one process that rounds alike. The others promise the same bits as without
them: activation checkpointing and offload. A setting that a choice refuses is refused by name, before it trains.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import flag_name
from tests import parity
from tests.models import build
from tests.parity import OPTIMIZERS, load, message_of, options_of
from tests.ranks import RankPool
from tests.strategies.cases.settings import (
    BF16,
    COMPILED,
    EVERY,
    EXACT,
    RECOMPUTED,
    ROUNDINGS,
    SAMPLED,
    TRAPS,
    WITH_STATISTICS,
    Case,
    Choice,
    refusal,
    refusal_of_module,
)


def train(case: Case, folder: str) -> tuple[dict[str, Any], list[str]]:
    """What training gives, and what differs from it under exact settings."""

    def run(exact: str) -> dict[str, Any]:
        return parity.train_on_rank(case.choice, *case.arguments, options=case.options(exact, folder))

    plain, differing = run("once more"), []
    wanted = {keystr(path): torch.as_tensor(leaf) for path, leaf in tree_flatten_with_path(plain)[0]}
    for exact in case.exact:
        found = {keystr(path): torch.as_tensor(leaf) for path, leaf in tree_flatten_with_path(run(exact))[0]}
        differing += [f"{exact}: {name} on one side" for name in wanted.keys() ^ found.keys()]
        shared = wanted.keys() & found.keys()
        differing += [f"{exact}: {name}" for name in shared if not is_same(wanted[name], found[name])]
    return plain, differing


def is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=case.id) for case in SAMPLED),
        *(pytest.param(case, id=f"{case.id}, whole", marks=pytest.mark.exhaustive) for case in EVERY),
    ],
)
def test_three_steps(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    world_size, rounding = len(case.arguments[1][0]), ROUNDINGS[case.rounding]
    results, differing = zip(*ranks.run(world_size, train, case, str(tmp_path), timeout_s=250), strict=True)
    assert differing == ([],) * world_size
    assert all(result["loss"] == results[0]["loss"] for result in results)
    if case.model in WITH_STATISTICS or rounding.oracle is None:
        return
    wanted = parity.oracle(*case.arguments, **rounding.oracle)
    for key in ("loss", "norm"):
        assert results[0][key] == pytest.approx(wanted[key], rel=rounding.loss), key
    parity.assert_close(results[0]["gradients"], wanted["gradients"], rounding.gradient, "gradient")


def refused(choice: Choice) -> list[str]:
    """Combinations that are refused otherwise than by name, when a strategy is built."""
    module, wrong = build("plain"), []
    for rounding, exact in product(ROUNDINGS.values(), EXACT.values()):
        options = rounding.options | exact
        if refusal(choice, options):
            said = message_of(
                UserError, lambda given: load(choice)(module, OPTIMIZERS["sgd"], options_of(choice, **given)), options
            )
            flags = [flag_name(name.removesuffix("_backend")) for name in options]
            wrong += [said] * (not said.startswith(tuple(flags)))
    for model, options in product(TRAPS, (RECOMPUTED["block"], BF16, COMPILED)):
        wanted = refusal_of_module(choice, model, options)
        if wanted and not refusal(choice, options):
            said = message_of(UserError, parity.build_and_step, choice, model, options_of(choice, **options))
            wrong += [said] * (wanted not in said)
    return wrong


@parity.for_each_choice
def test_what_is_refused_is_named(ranks: RankPool, choice: Choice) -> None:
    assert ranks.run(2, refused, choice) == [[], []]

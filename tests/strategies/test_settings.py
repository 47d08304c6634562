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
from tests.parity import OPTIMIZERS, Choice, load, message_of, naming, options_of
from tests.ranks import RankPool
from tests.strategies.cases.settings import (
    BF16,
    COMPILED,
    EXACT,
    FAMILIES,
    RECOMPUTED,
    ROUNDINGS,
    TRAPS,
    WITH_STATISTICS,
    Case,
    every_third_rounding,
    refusal,
    refusal_of_module,
    sample,
)


def train(case: Case, folder: str) -> tuple[dict[str, Any], list[str]]:
    """What training gives, and what differs from it under the exact setting."""

    def run(exact: str) -> dict[str, Any]:
        return parity.train_on_rank(case.choice, *case.arguments, options=case.options(exact, folder))

    plain = run("once more")
    wanted, found = (
        {keystr(path): torch.as_tensor(leaf) for path, leaf in tree_flatten_with_path(result)[0]}
        for result in (plain, run(case.exact))
    )
    differing = [f"{name} on one side" for name in wanted.keys() ^ found.keys()]
    shared = wanted.keys() & found.keys()
    return plain, differing + [name for name in shared if not is_same(wanted[name], found[name])]


def is_same(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.allclose(one, two, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("choice", FAMILIES, ids="-".join)
def test_pairs_of_settings(ranks: RankPool, tmp_path: Path, choice: Choice) -> None:
    cases = [case for case in sample() if case.choice == choice]
    assert len(cases) >= 4
    for case in cases:
        check(ranks, tmp_path, case)


@pytest.mark.exhaustive
@parity.for_each_choice
@pytest.mark.parametrize("model", TRAPS)
def test_roundings_of_every_module(ranks: RankPool, tmp_path: Path, choice: Choice, model: str) -> None:
    for case in every_third_rounding(choice, model):
        check(ranks, tmp_path, case)


def check(ranks: RankPool, folder: Path, case: Case) -> None:
    with naming(case):
        world_size, rounding = len(case.arguments[1][0]), ROUNDINGS[case.rounding]
        results, differing = zip(*ranks.run(world_size, train, case, str(folder), timeout_s=250), strict=True)
        assert differing == ([],) * world_size
        assert all(result["loss"] == results[0]["loss"] for result in results)
        if case.model in WITH_STATISTICS or rounding.oracle is None:
            return
        wanted = parity.oracle(*case.arguments, **rounding.oracle)
        assert results[0]["loss"] == pytest.approx(wanted["loss"], rel=rounding.loss)
        assert results[0]["norm"] == pytest.approx(wanted["norm"], rel=rounding.loss)
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


@parity.over_choices
def test_what_is_refused_is_named(ranks: RankPool, choice: Choice) -> None:
    assert ranks.run(2, refused, choice) == [[], []]

"""Every choice on one case, held against one process."""

from functools import cache

import pytest
import torch

from tests.ranks import RankPool
from tests.strategies.cases import CASES, WRONG, refusal
from tests.strategies.cases.case import Choice, Outcome, in_one_process, on_a_rank

CAPS_MB = {2: 0.0003, 3: 25.0}
"""By number of ranks: buckets of 300 bytes, so that there are several; and a usual one, into which all fits."""


def check(ranks: RankPool, name: str, choice: Choice) -> None:
    """On two and on three ranks: as in one process, or refused as listed."""
    if (name, choice[1]) in WRONG:
        pytest.skip("PyTorch's own is wrong here, and says nothing: docs/own-loop-limits.md")
    wanted = refusal(name, choice[1])
    for world_size, cap_mb in CAPS_MB.items():
        outcomes = ranks.run(world_size, on_a_rank_by_name, name, choice, cap_mb)
        if wanted:
            assert all(isinstance(said, str) and wanted in said for said in outcomes), outcomes
        else:
            assert_equal(outcomes, expected(name, world_size), CASES[name].tolerance)


def on_a_rank_by_name(name: str, choice: Choice, bucket_cap_mb: float) -> Outcome | str:
    return on_a_rank(CASES[name], choice, bucket_cap_mb)


@cache
def expected(name: str, world_size: int) -> Outcome:
    return in_one_process(CASES[name], world_size)


def assert_equal(outcomes: list[Outcome | str], expected: Outcome, tolerance: float) -> None:
    """Norms and state are those of one process; so are evaluations on every rank, or on rank 0 if there are buffers."""
    for rank, found in enumerate(outcomes):
        assert not isinstance(found, str), found
        assert found.norms == pytest.approx(expected.norms, rel=tolerance)
        if rank == 0 or not expected.has_buffers:
            assert found.evaluation == pytest.approx(expected.evaluation, rel=tolerance)
    state = outcomes[0].state  # type: ignore[union-attr]
    assert state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        assert torch.allclose(state[name], tensor, rtol=tolerance, atol=tolerance), f"{name}: {state[name] - tensor}"

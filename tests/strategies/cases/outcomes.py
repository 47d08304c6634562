"""What ranks made of a case, held against one process."""

import pytest
import torch

from tests.strategies.cases.case import Outcome


def assert_equal(what: str, outcomes: list[Outcome | str], expected: Outcome, tolerance: float):
    """Norms and state are those of one process; so are evaluations on every rank, or on rank 0 if there are buffers."""
    for rank, found in enumerate(outcomes):
        assert not isinstance(found, str), f"{what}: {found}"
        assert found.norms == pytest.approx(expected.norms, rel=tolerance), what
        if rank == 0 or not expected.has_buffers:
            assert found.evaluation == pytest.approx(expected.evaluation, rel=tolerance), what
    state = outcomes[0].state  # type: ignore[union-attr]
    assert state.keys() == expected.state.keys(), what
    for name, tensor in expected.state.items():
        close = torch.allclose(state[name], tensor, rtol=tolerance, atol=tolerance)
        assert close, f"{what}: {name} is off by {state[name] - tensor}"

"""Outcomes of ranks, compared with that of one process."""

import pytest
import torch

from tests.strategies.cases.case import LoopOutcome


def assert_equal(label: str, outcomes: list[LoopOutcome | str], expected: LoopOutcome, tolerance: float):
    """Norms and state are those of one process; so are evaluations on every rank, or on rank 0 if there are buffers."""
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, str), f"{label}: {outcome}"
        assert outcome.norms == pytest.approx(expected.norms, rel=tolerance), label
        if rank == 0 or not expected.has_buffers:
            assert outcome.evaluation == pytest.approx(expected.evaluation, rel=tolerance), label
    state = outcomes[0].state  # type: ignore[union-attr]
    assert state.keys() == expected.state.keys(), label
    for name, tensor in expected.state.items():
        close = torch.allclose(state[name], tensor, rtol=tolerance, atol=tolerance)
        assert close, f"{label}: {name} is off by {state[name] - tensor}"

"""Learning rates by step: the formulas, and what is refused."""

import pytest

from ddp_lab.runtime.build import learning_rates
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError


def rates(schedule, warmup, steps):
    rate = learning_rates(RunConfig(lr=0.8, schedule=schedule, warmup_steps=warmup), steps)
    return [rate(step) for step in range(steps)]


def test_rates_worked_out_by_hand():
    assert rates("constant", 0, 3) == [0.8] * 3
    assert rates("constant", 2, 4) == pytest.approx([0.4, 0.8, 0.8, 0.8])
    assert rates("linear", 2, 6) == pytest.approx([0.4, 0.8, 0.8, 0.6, 0.4, 0.2])
    assert rates("cosine", 0, 4) == pytest.approx([0.8, 0.4 + 0.2 * 2**0.5, 0.4, 0.4 - 0.2 * 2**0.5])
    assert rates("cosine", 4, 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_warm_up_ends_within_the_run():
    with pytest.raises(UserError, match="--warmup-steps 5: the run has only 4 optimizer steps"):
        learning_rates(RunConfig(lr=0.8, warmup_steps=5), 4)

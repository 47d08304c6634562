"""A line through measured times: what it recovers, and what it refuses."""

import numpy as np
import pytest

from ddp_lab.runtime.link.link_model import LinkModel

SIZES = 2.0 ** np.arange(10, 30, 2)


def test_a_line_is_recovered_and_noise_averages_out() -> None:
    exact = LinkModel(5e-5, 1e-9)
    assert LinkModel.fit(SIZES, exact.seconds(SIZES)) == LinkModel(pytest.approx(5e-5), pytest.approx(1e-9))
    noise = np.random.default_rng(0).normal(1, 0.05, (50, len(SIZES)))
    found = LinkModel.fit(np.tile(SIZES, 50), (noise * exact.seconds(SIZES)).ravel())
    assert found.latency_s == pytest.approx(5e-5, rel=0.02) and found.seconds_per_byte == pytest.approx(1e-9, rel=0.02)


@pytest.mark.parametrize(("sizes", "times"), [([], []), ([1], [1, 2]), ([-1], [1]), ([1], [0]), ([np.nan], [1])])
def test_what_is_no_measurement(sizes: list[float], times: list[float]) -> None:
    with pytest.raises(ValueError, match="payloads"):
        LinkModel.fit(sizes, times)

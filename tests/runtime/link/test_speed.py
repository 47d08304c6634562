from hypothesis import given
from hypothesis import strategies as st
from pytest import approx

from ddp_lab.runtime.link.speed import SimulatedLink, canonical


@given(st.integers(1, 10**13), st.integers(0, 10**6))
def test_links_are_read_as_people_write_them_and_written_in_one_way(bits_per_s, latency_us):
    """What is no link: `tests/mistakes.toml`."""
    assert SimulatedLink.parse("1GBIT,1.5ms") == SimulatedLink(10**9, 1.5e-3) and SimulatedLink.parse("none") is None
    assert SimulatedLink.parse("250mbit,50us") == SimulatedLink(250 * 10**6, 50e-6)
    text = str(SimulatedLink(bits_per_s, latency_us * 1e-6))
    link = SimulatedLink.parse(text)
    assert link is not None and canonical(text) == text
    assert (link.bits_per_s, link.latency_s) == (approx(bits_per_s), approx(latency_us * 1e-6, rel=1e-5))

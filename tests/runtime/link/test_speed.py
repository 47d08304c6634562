import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.speed import Link, canonical
from tests.tables import each_row


@each_row(
    "text, link",
    [
        ("1gbit", Link(10**9)),
        ("250mbit,50us", Link(250 * 10**6, 50e-6)),
        ("1GBIT,1.5ms", Link(10**9, 1.5e-3)),
        ("none", None),
    ],
)
def test_reads_what_people_write(text: str, link: Link | None) -> None:
    assert Link.parse(text) == link


@each_row("text", ["", "fast", "1gbit,", "1gbit,50", "none,1ms", "1gbit,-1us", "0gbit", "1gbit,1us,2us"])
def test_refuses_what_is_no_link_in_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        Link.parse(text)
    assert "e.g. 250mbit" in str(caught.value) or "such as 1gbit" in str(caught.value)


@given(st.integers(1, 10**13), st.integers(0, 10**6))
def test_one_link_is_written_in_one_way(bits_per_s: int, latency_us: int) -> None:
    text = str(Link(bits_per_s, latency_us * 1e-6))
    found = Link.parse(text)
    assert found is not None and canonical(text) == text
    assert (found.bits_per_s, found.latency_s) == (
        pytest.approx(bits_per_s),
        pytest.approx(latency_us * 1e-6, rel=1e-5),
    )

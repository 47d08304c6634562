"""The fit finds planted costs, and its predictions have the properties that the model states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.runtime.link.link_model import FEWEST_SIZES, LinkModel, Piece, held_out_error

SIZES = 2.0 ** np.arange(10, 31)
"""1 KiB to 1 GiB by factors of 2."""
LATENCY = st.floats(1e-6, 1e-2)
SECONDS_PER_BYTE = st.floats(1e-11, 1e-7)


@st.composite
def models(draw: st.DrawFn) -> LinkModel:
    """Any valid model, also with pieces that start below the end of the one before."""
    starts = sorted(draw(st.lists(st.floats(1, 2e9), max_size=3, unique=True)))
    cost = st.tuples(st.floats(0, 1), st.floats(0, 1e-6))
    return LinkModel(tuple(Piece(start, *draw(cost)) for start in [0.0, *starts]))


@settings(max_examples=10)
@given(LATENCY, SECONDS_PER_BYTE)
def test_one_line_comes_back_as_one_piece(latency: float, per_byte: float) -> None:
    (piece,) = LinkModel.fit(SIZES, latency + per_byte * SIZES).pieces
    assert piece.latency_s == pytest.approx(latency, rel=1e-4)
    assert piece.seconds_per_byte == pytest.approx(per_byte, rel=1e-4)


@settings(max_examples=10)
@given(LATENCY, SECONDS_PER_BYTE, st.floats(1.5, 20), st.integers(3, 17))
def test_a_break_comes_back_where_it_was_planted(latency: float, per_byte: float, times: float, place: int) -> None:
    """From one of the sizes on, all costs are larger by a factor."""
    planted = LinkModel((Piece(0, latency, per_byte), Piece(SIZES[place], times * latency, times * per_byte)))
    fitted = LinkModel.fit(SIZES, planted.seconds(SIZES))
    assert fitted.seconds(SIZES) == pytest.approx(planted.seconds(SIZES), rel=0.1)
    if len(fitted.pieces) > 1:
        assert any(SIZES[place - 1] < piece.from_bytes <= SIZES[place] for piece in fitted.pieces[1:])


def test_noise_makes_neither_pieces_nor_speed() -> None:
    """Noise of 5 %: most fits have one piece, and are near the true times, also at sizes that they have not seen."""
    true, counts = 1e-4 + 1e-9 * SIZES, []
    for seed in range(30):
        times = true * np.random.default_rng(seed).lognormal(0, 0.05, len(SIZES))
        fitted = LinkModel.fit(SIZES, times)
        counts.append(len(fitted.pieces))
        assert np.mean(np.abs(fitted.seconds(SIZES) / true - 1)) < 0.06
        assert held_out_error(SIZES, times) < 0.15
    assert counts.count(1) >= 20


def test_noise_pulls_neither_up_nor_down() -> None:
    """Errors relative to the measured times would pull the fit down: by more than 10 % with noise of 30 %."""
    true, ratios = 1e-4 + 1e-9 * SIZES, []
    for seed in range(30):
        noise = np.random.default_rng(seed).lognormal(0, 0.3, len(SIZES))
        ratios.append(np.log(LinkModel.fit(SIZES, true * noise, most_pieces=1).seconds(SIZES) / true))
    assert abs(np.mean(ratios)) < 0.04


def test_the_burst_of_a_shaper_hides_no_rate() -> None:
    """An all-reduce as measured on a link of 250 Mbit/s, 31.25 MB/s before headers, whose shaper allows a burst."""
    sizes = 2.0 ** np.array([12, 14, 16, 18, 20, 21, 22, 23, 24])
    times = 1e-3 * np.array([0.503, 0.531, 2.102, 8.418, 33.77, 67.65, 135.30, 270.69, 541.44])
    fitted, one = LinkModel.fit(sizes, times), LinkModel.fit(sizes, times, most_pieces=1)
    assert 1 / fitted.pieces[-1].seconds_per_byte == pytest.approx(31e6, rel=0.01)
    assert 1 / one.pieces[0].seconds_per_byte == pytest.approx(31e6, rel=0.025), "least squares: 32.7e6"
    assert fitted.seconds(sizes[4:]) == pytest.approx(times[4:], rel=0.01)
    assert held_out_error(sizes, times) < 0.01


@given(models(), st.lists(st.floats(0, 4e9), min_size=2))
def test_more_bytes_never_take_less_time(model: LinkModel, payloads: list[float]) -> None:
    predicted = model.seconds(np.sort(payloads))
    assert (np.diff(predicted) >= 0).all() and (predicted >= 0).all()


@given(models(), st.floats(0, 4e9))
def test_answers_keep_the_shape_of_the_question(model: LinkModel, payload: float) -> None:
    alone = float(model.seconds(payload))
    assert model.seconds([[payload, payload]]).tolist() == [[alone, alone]]
    inside = [piece for piece in model.pieces if piece.from_bytes <= payload][-1]
    assert alone >= inside.latency_s + inside.seconds_per_byte * payload


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=12), st.integers(1, 4))
def test_any_measurement_can_be_fitted(points: list[tuple[float, float]], most_pieces: int) -> None:
    sizes, times = zip(*points, strict=True)
    model = LinkModel.fit(sizes, times, most_pieces)
    assert 1 <= len(model.pieces) <= max(1, min(most_pieces, len(set(sizes)) // FEWEST_SIZES))
    assert np.isfinite(model.seconds(sizes)).all()


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """By absolute error, the wrong latency would be invisible beside a second at 1 GiB."""
    fitted = LinkModel.fit(SIZES, 1e-5 + 1e-9 * SIZES * np.where(SIZES > 1e8, 1.02, 1))
    assert fitted.seconds(1024.0) == pytest.approx(1.1e-5, rel=0.03)


def test_a_gap_between_pieces_waits_for_the_later_one() -> None:
    """100 bytes end at 110 s; the second line is there again from 210 bytes on."""
    model = LinkModel((Piece(0, 10, 1), Piece(100, 5, 0.5)))
    assert model.seconds([99, 100, 150, 210, 300]).tolist() == [109, 110, 110, 110, 155]


def test_held_out_sizes_are_not_seen() -> None:
    """Of the sizes from 1 MB on, the second-largest, fourth-largest and so on take twice as long: no fit can know."""
    sizes = SIZES[10:]
    wrong = np.where(np.arange(len(sizes)) % 2 == 1, 2.0, 1.0)
    assert held_out_error(sizes, 1e-9 * sizes * wrong) == pytest.approx(0.5)
    assert held_out_error(sizes, 1e-9 * sizes) == pytest.approx(0, abs=1e-9)
    assert np.isnan(held_out_error(sizes, 1e-9 * sizes, from_bytes=2**31)) and np.isnan(held_out_error([1e7], [1.0]))


@pytest.mark.parametrize(
    ("sizes", "times", "expected"),
    [
        ([1, 2], [1], "2 payloads and 1 times"),
        ([], [], "0 payloads"),
        ([-1], [1], "at least 0 bytes"),
        ([1], [0], "above 0 s"),
        ([1], [np.nan], "finite"),
    ],
)
def test_measurements_that_make_no_sense(sizes: list[float], times: list[float], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        LinkModel.fit(sizes, times)


def test_models_that_make_no_sense() -> None:
    for pieces in ((), (Piece(5, 1, 1),), (Piece(0, 1, 1), Piece(0, 1, 1)), (Piece(0, -1, 1),), (Piece(0, 1, np.inf),)):
        with pytest.raises(ValueError, match="must b"):
            LinkModel(pieces)
    with pytest.raises(ValueError, match="at least 0 bytes, not -1"):
        LinkModel((Piece(0, 1, 1),)).seconds([-1])

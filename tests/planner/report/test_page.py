"""The page of a plan, and its sliders: of known simulations, and in a browser."""

import itertools
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from playwright.sync_api import expect, sync_playwright

from planner import hardware
from planner.figures import MOST_POINTS, compute_by_phase, thinned
from planner.grid import AXES, axes_of, changed, figures, fill
from planner.page import plan_page, said
from planner.plan import Case, Knowledge, Outcome
from planner.plan_command import filled
from planner.recommendation import contenders
from planner.workers import simulations, whole
from tests.plans import GIB, case, made, simulation

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path")
FIGURES = (1.0, 2, 0.5)


def test_page_says_all_and_loads_nothing(tmp_path: Path) -> None:
    plan = made(simple_ddp=simulation(90, 20, 30), flat_ddp=simulation(100, 10, 20), zero3=None)
    page = plan_page(plan, fill(plan.case, {"flat_ddp": FIGURES}, lambda tasks: iter([FIGURES for _ in tasks]), 60))
    assert "Predicted: " in page and "Take flat_ddp" in page and "this one needs data" in page
    assert all(heading in page for heading in ("Memory over one step", "What takes memory: flat_ddp", "What if"))
    assert not re.search(r"<(script|link|img)\b[^>]{0,200}\b(src|href)=\"(?!data:)", page)
    assert "What if" not in plan_page(plan, None)


@needs_browser
def test_sliders_in_a_browser(tmp_path: Path) -> None:
    """A slider changes rates and table; a setting that was not simulated says so; nothing goes to the network."""
    plan = made(flat_ddp=simulation(100, 10, 20), zero3=None)

    def answers(tasks: Iterator[tuple[Case, str]]) -> Iterator[tuple[float, int, float] | None]:
        for there, choice in itertools.islice(tasks, 19):  # those that differ in one respect, but for the last one
            large = there.cluster.world_size == 4
            yield None if choice == "zero3" else (200.0 if large else 100.0, 30 * GIB if large else GIB, 50.0)

    path = tmp_path / "plan.html"
    path.write_text(plan_page(plan, fill(plan.case, {"flat_ddp": (100.0, GIB, 50.0), "zero3": None}, answers, 1e9)))
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: asked.append(str(error)))
        page.goto(path.as_uri())
        rows = page.locator(".whatif tbody tr")
        expect(rows.nth(0)).to_have_text("flat_ddp100801.00yes", timeout=20_000)
        expect(rows.nth(1)).to_contain_text("zero3")
        ranks = page.get_by_label("ranks", exact=True)
        ranks.fill("2")
        expect(rows.nth(0)).to_have_text("flat_ddp2008030.00no")  # twice the samples in twice the time
        expect(page.locator(".whatif [role=status]")).to_have_text("Global batch: 16 samples.")
        page.get_by_label("bucket size").fill("2")
        ranks.fill("1")
        expect(rows).to_have_count(1)
        expect(page.locator(".whatif [role=status]")).to_contain_text("1 of 2 choices were not simulated here")
        ranks.fill("2")
        page.get_by_label("rate of the links").fill("0")
        expect(page.locator(".whatif [role=status]")).to_contain_text("was not simulated")
        expect(rows).to_have_count(0)
        browser.close()
    assert asked == [path.as_uri()]


def test_grid_goes_outwards_until_time_is_up() -> None:
    asked: list[Case] = []

    def answers(tasks: Iterator[tuple[Case, str]]) -> Iterator[tuple[float, int, float]]:
        for there, _ in tasks:
            asked.append(there)
            yield 1.0, 2, 3.0

    grid = fill(case(), {"flat_ddp": FIGURES}, answers, 1e9)
    assert len(grid.cells) == grid.wanted == len(asked) + 1 == 4 * 3**4
    assert case() not in asked and grid.cells[grid.base] == {"flat_ddp": FIGURES}, "what is known is not asked again"
    few = fill(case(), {"flat_ddp": FIGURES}, answers, 0.0)
    assert list(few.cells) == [few.base] and few.wanted == 4 * 3**4


def test_contenders_go_first_and_other_choices_when_there_is_time() -> None:
    """All settings that differ in one respect with the first choices, then with the others."""
    planned = dict.fromkeys(("simple_ddp", "flat_ddp", "zero1", "zero3"), FIGURES)

    def answers(tasks: Iterator[tuple[Case, str]]) -> Iterator[tuple[float, int, float]]:
        for number, _ in enumerate(itertools.islice(tasks, 25)):
            yield float(number), 2, 3.0

    grid = fill(case(), planned, answers, 1e9, first={"zero1", "zero3"})
    asked = [place for place in grid.cells if place != grid.base]
    one = [place for place in asked if sum(mine != other for mine, other in zip(place, grid.base, strict=True)) == 1]
    assert len(asked) == len(one) == 11 and grid.cells[grid.base] == planned
    assert all({"zero1", "zero3"} <= grid.cells[place].keys() for place in asked)
    assert sum(len(grid.cells[place]) for place in asked) == 25
    page = plan_page(made(zero3=simulation(100, 10, 20)), grid)
    assert "From 25 simulations" in page and "figures for 12 of 324 settings, for 2 of them with every choice" in page


def test_time_is_looked_at_before_each_simulation() -> None:
    """Of one setting's three choices two, if that is when time is up."""
    moments = iter([0.0, 1.0, 2.0, 3.0, 4.0])
    planned = dict.fromkeys(("simple_ddp", "flat_ddp", "zero1"), FIGURES)
    with mock.patch("planner.grid.time.perf_counter", lambda: next(moments)):
        grid = fill(case(), planned, lambda tasks: (FIGURES for _ in tasks), 2.5)
    assert (grid.simulated, [len(found) for found in grid.cells.values()], grid.seconds) == (2, [3, 2], 4.0)


def test_sliders_of_a_plan_begin_with_what_is_recommended_fastest_and_leanest() -> None:
    """Of choices that are the same class one stands for both; one that cannot be simulated is not tried again."""
    steps = {
        "simple_ddp": simulation(100, 20, 8),
        "flat_ddp": simulation(90, 20, 30),  # does not fit
        "bucket_ddp_async": simulation(95, 20, 8),
        "baseline": simulation(95, 20, 8),
        "zero2": simulation(130, 20, 7),
        "zero3": replace(simulation(150, 20, 5), reads_bucket_cap=False),
    }
    plan = made(**steps, zero1=None)
    assert contenders(plan.rows) == ["bucket_ddp_async", "flat_ddp", "zero3"]
    with mock.patch("planner.plan_command.fill") as filled_in:
        filled(plan, 60, 1)
    _, planned, _, seconds = filled_in.call_args.args
    assert list(planned) == ["simple_ddp", "flat_ddp", "bucket_ddp_async", "zero2", "zero3"] and seconds == 60
    assert planned["zero2"] == (pytest.approx(130), 7 * GIB, pytest.approx(20))
    assert filled_in.call_args.kwargs["first"] == {"bucket_ddp_async", "flat_ddp", "zero3"}
    assert filled_in.call_args.kwargs["without_buckets"] == {"zero3"}
    assert filled(made(zero1=None), 60, 1) is None and contenders(made(zero1=None).rows) == []


def test_one_size_of_buckets_stands_for_all_where_it_is_nothing_to_the_choice() -> None:
    asked: list[tuple[float | str, str]] = []
    planned = {"flat_ddp": FIGURES, "zero1": FIGURES}

    def answers(tasks: Iterator[tuple[Case, str]]) -> Iterator[tuple[float, int, float]]:
        for there, choice in tasks:
            asked.append((there.config.bucket_cap_mb, choice))
            yield float(there.micro_batch_size), 2, 3.0

    grid = fill(case(), planned, answers, 1e9, without_buckets={"flat_ddp"})
    assert len(grid.cells) == grid.wanted == 4 * 3**4
    assert {cap for cap, choice in asked if choice == "flat_ddp"} == {"auto"}
    assert len(asked) == (3**4 - 1) + (4 * 3**4 - 1)
    for place, found in grid.cells.items():
        assert found["flat_ddp"] == grid.cells[(*place[:-1], grid.base[-1])]["flat_ddp"]


@pytest.mark.parametrize("gpus", ["2xL4", "4x8xH100"])
def test_settings_of_the_grid(gpus: str) -> None:
    """Each is a case of its own that divides, and the setting that was asked for is one of them."""
    asked = case(gpus, batch=128, bucket=10.0)
    axes = axes_of(asked)
    there = changed(asked, [axes["ranks"][-1], 4.0, 3, 5, 1.0])
    ranks = 2 * asked.cluster.world_size
    assert (
        there.cluster.world_size == ranks and there.cluster.inside.bytes_per_s == 4 * asked.cluster.inside.bytes_per_s
    )
    assert there.micro_batch_size == 3 and there.config.global_batch_size == 15 * ranks
    assert there.config.bucket_cap_mb == 1.0 and set(axes) == set(AXES) and 10.0 in axes["bucket_cap_mb"]
    assert changed(asked, [ranks // 2, 1.0, asked.micro_batch_size, 2, 10.0]) == asked


def test_ranks_of_the_grid_are_whole_nodes_and_share_a_machine() -> None:
    three = case("3x8xH100", batch=48)
    assert axes_of(three)["ranks"] == [8, 24, 48]
    for ranks, nodes in ((8, 1), (48, 6)):
        there = changed(three, [ranks, 1.0, 1, 1, 1.0]).cluster
        assert (there.nodes, there.ranks_per_node, there.between is None) == (nodes, 8, nodes == 1)
    of_cpu = replace(case(), cluster=hardware.cluster("2xcpu", "loopback"))
    memory = {ranks: changed(of_cpu, [ranks, 1.0, 1, 1, 1.0]).cluster.device.memory_bytes for ranks in (1, 2, 4)}
    assert memory[1] == 2 * memory[2] == 4 * memory[4]


def test_what_was_measured_for_so_many_ranks_keeps_the_grid_there() -> None:
    for knowledge, ranks, links in (
        (Knowledge(), 3, 3),
        (Knowledge(collectives=Path("c.json")), 1, 1),
        (Knowledge(collectives=Path("c.json"), rescale=True), 3, 1),
        (Knowledge(contention=Path("c.json"), rescale=True), 1, 3),
    ):
        axes = axes_of(replace(case(), knowledge=knowledge))
        assert (len(axes["ranks"]), len(axes["link"])) == (ranks, links)


def test_a_setting_without_costs_is_an_answer() -> None:
    """Of a slider: the file is not there, and the others go on."""
    there = replace(case(), knowledge=Knowledge(collectives=Path("nowhere.json")))
    (answer,) = simulations([(there, "flat_ddp")], 1, whole)
    assert answer.simulated is None and "nowhere.json" in answer.reason


def test_the_grid_has_each_choices_own_buckets() -> None:
    mine = case("2xL4", batch=128)
    axes = axes_of(mine)["bucket_cap_mb"]
    assert [said("bucket_cap_mb", value, mine) for value in axes] == ["each choice's own", "1 MiB", "25 MiB", "100 MiB"]
    assert changed(mine, [2, 1.0, 1, 2, axes[0]]).config.bucket_cap_mb == "auto"


def test_lines_of_many_points_keep_their_extremes() -> None:
    points = [(float(moment), float(moment % 7)) for moment in range(10_000)]
    points[5003] = (5003.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2 and kept[0] == points[0] and kept[-1] == points[-1]
    assert (5003.0, 99.0) in kept and set(kept) <= set(points)
    assert compute_by_phase(simulation(100, 20, 1))["backward"].tolist() == [[0.04, 0.08]]


def test_figures_of_a_cell() -> None:
    assert figures(Outcome("zero1", simulation(100, 20, 2))) == (100, 2 * GIB, 20)
    assert figures(Outcome("zero1", None, "why")) is None

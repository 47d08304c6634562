"""Pages: what a reader sees in a browser, by mouse and by keyboard, in both themes; and pages of large runs."""

import dataclasses
import shutil
from unittest import mock

import pandas as pd
import plotly.graph_objects as go
import pytest
from playwright.sync_api import expect, sync_playwright

from ddp_lab.analysis.columns import CsvColumn
from ddp_lab.analysis.comparison.traced import keep
from ddp_lab.analysis.report.figures import axis_end
from ddp_lab.analysis.report.figures.lanes_figure import lanes_figure
from ddp_lab.analysis.report.figures.times import ranks_figure
from ddp_lab.analysis.report.page import Block, render, table, write_page
from ddp_lab.analysis.report.pages.compare import Compared, write_comparison
from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import Window
from tests.analysis.windows import analysis_of
from tests.traces import cpu_trace, event, memory_of, record, timeline_of, write, write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path")
LARGEST_PAGE = 1_200_000
HOSTILE = """<script>alert(1)</script><img src=x onerror="alert(2)">'"</script><!--\x00\x1b\u202e{{ 7 * 7 }}%{x}"""
RUN_ID = "20261121-093000-0001"


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


LONGEST_WAIT_MS = 60_000
"""A browser beside other tests on two cores draws slowly."""
expect.set_options(timeout=LONGEST_WAIT_MS)


@pytest.fixture(scope="module")
def browser_pages(browser):
    """Opens each page once, and collects what it complains of and what it asks the network for."""
    complaints = []
    pages = {}

    def opened(path, **options):
        key = f"{path} {options}"
        if key not in pages:
            page = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options}).new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
            page.on(
                "request", lambda request: None if request.url[:4] == "file" else complaints.append(request.url[:99])
            )
            page.set_default_timeout(LONGEST_WAIT_MS)
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-drawn]")
            pages[key] = page
        return pages[key]

    yield opened, complaints


@pytest.fixture
def open_page(browser_pages):
    """`open_page(path, **options of a browser context)`; the test fails if a page complains or asks the network."""
    opened, complaints = browser_pages
    yield opened
    assert complaints == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Reports on a hand-made run of two ranks, with a kernel of a hostile name, and a comparison."""
    folder = tmp_path_factory.mktemp("pages")

    def make(rank):
        trace = cpu_trace(rank)
        trace["traceEvents"] += [
            event("cpu_op", HOSTILE * 10_000, 1450.0, 30),
            event("cpu_op", "aten::short", 1720.0, 5),
        ]
        return trace

    trace_dir = write_run(folder / "profile" / "x", make, RUN_ID)
    content = record("x", 0.2) | {"run_id": RUN_ID}
    content["memory"][0]["timeline"]["where"][1] = HOSTILE
    write(trace_dir / f"{RUN_ID}.run.json", content)
    analysis = analysis_of(trace_dir)
    write_summary(analysis, HOSTILE, folder)
    records = {"pytorch_ddp": record("pytorch_ddp", 0.2), "other": record("other", 0.1)}
    write_comparison(Compared(records, {"other": keep(analysis)}, "pytorch_ddp", [], []), folder)
    return folder


ROWS = pd.DataFrame({"name": ["b", "a", "c", "d"], "size": [9.0, float("nan"), 10.0, 9.0]})
COLUMNS = {"name": CsvColumn("name", "", "who"), "size": CsvColumn("size", "MiB", "how much it holds", 0.5)}


@pytest.fixture(scope="module")
def small_page(tmp_path_factory):
    """A page of the parts alone, as any author makes it."""
    figure = go.Figure(go.Bar(x=[1, 2], y=[3, 4], name=HOSTILE, hovertemplate=HOSTILE))
    blocks = [
        Block("Sizes", table=lambda: table("sizes", ROWS, COLUMNS), figure=lambda: figure),
        Block(HOSTILE, lambda: HOSTILE),
    ]
    path = tmp_path_factory.mktemp("small") / "page.html"
    write_page(path, render(HOSTILE, [HOSTILE], blocks, banner=f"Incomplete: rank 1 {HOSTILE}"))
    return path


def order(page, of_table, column):
    cells = page.locator(f"#{of_table} tbody td[data-column='{column}']")
    return [cell.get_attribute("data-value") or "" for cell in cells.all()]


@needs_browser
@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [("summary.html", "dark", 390), ("compare.html", "light", 1280)],
)
def test_pages_fit_and_draw_every_figure_where_it_stays(folder, open_page, name, scheme, width):
    viewport = {"viewport": {"width": width, "height": 800}} if width < 1280 else {}
    page = open_page(folder / name, color_scheme=scheme, **viewport)
    assert page.locator("html").get_attribute("data-theme") == scheme
    shifts = """() => new Promise(done => {
        new PerformanceObserver(list => done(list.getEntries().reduce((sum, shift) => sum + shift.value, 0)))
            .observe({type: 'layout-shift', buffered: true});
        setTimeout(() => done(0), 200);
    })"""
    assert page.evaluate(shifts) < 0.001
    for folded in page.locator("summary").all():
        folded.click()
    figures = page.locator(".plot").count()
    expect(page.locator(".plot > .plot-container")).to_have_count(figures)
    assert figures >= 3 and page.locator("html").evaluate("root => root.scrollWidth") == width
    levels = [int(heading.evaluate("heading => heading.tagName[1]")) for heading in page.locator("h1, h2, h3").all()]
    assert levels[0] == 1 and set(levels[1:]) == {2}
    unnamed = page.locator(".plot:not([aria-label]), [role=region]:not([aria-label]), html:not([lang])")
    assert unnamed.count() == 0 and page.locator("main").count() == 1
    assert (folder / name).stat().st_size < LARGEST_PAGE


@needs_browser
def test_tables_sort_by_click_and_by_keyboard(small_page, open_page):
    page = open_page(small_page)
    heading = page.get_by_role("columnheader", name="size")
    heading.get_by_role("button").click()
    assert order(page, "sizes", "name") == ["b", "d", "c", "a"], "by number, ties as they were, the unknown last"
    assert heading.get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Enter")
    assert order(page, "sizes", "name") == ["c", "b", "d", "a"] and heading.get_attribute("aria-sort") == "descending"
    page.get_by_role("columnheader", name="name").get_by_role("button").press("Space")
    assert order(page, "sizes", "name") == ["a", "b", "c", "d"] and heading.get_attribute("aria-sort") == "none"
    assert order(page, "sizes", "size") == ["", "9.0", "10.0", "9.0"]


@needs_browser
def test_lanes_zoom_to_a_kernel(folder, open_page):
    """The all-reduce of step 6 runs from 600 to 900 us, `aten::short` from 720 to 725 us."""
    page = open_page(folder / "summary.html", color_scheme="light")
    plot = page.locator(".plot").first
    bars = plot.evaluate("""plot => plot.data.flatMap(trace => trace.y.map((lane, at) =>
        [lane, trace.text[at], trace.base[at], trace.x[at]])).filter(bar => bar[1])""")
    assert ["rank 0 kernels 1", "aten::short", 0.72, 0.005] in bars
    assert ["rank 1 collectives 1", "all-reduce", 0.6, 0.3] in bars
    span = "plot => plot.layout.xaxis.range[1] - plot.layout.xaxis.range[0]"
    for _ in range(3):
        page.get_by_role("button", name="Zoom in").press("Enter")
    assert plot.evaluate(span) == pytest.approx(0.999 / 8)
    assert page.locator(".zoom output").text_content() == "0.437 to 0.562 ms"
    page.get_by_role("button", name="Later").press("Enter")
    assert plot.evaluate("plot => plot.layout.xaxis.range[0]") == pytest.approx(0.4371 + 0.0624, abs=1e-3)
    page.get_by_role("button", name="Whole step").click()
    assert plot.evaluate("plot => plot.layout.xaxis.range") == pytest.approx([0, 0.999])


@needs_browser
def test_hostile_names_are_text(folder, small_page, open_page):
    """`open_page` fails on any dialog, error or request."""
    for page in (open_page(folder / "summary.html", color_scheme="light"), open_page(small_page)):
        assert page.locator("h1").text_content().startswith("<script>alert(1)</script><img")
        assert "\x1b" not in page.content() and "\u202e" not in page.content()
        assert page.locator("img, main a[href^=javascript]").count() == 0
    assert (folder / "summary.html").stat().st_size < LARGEST_PAGE


def test_an_outlier_flattens_no_figure():
    """The axis ends near the others."""
    for values, end in (([1, 1, 1.2, 30], 1.5), ([1, 3, 4], 4), ([1, 9], 1.25), ([0, 0], 1), ([2, 2, 2, 8], 8)):
        assert axis_end(values) == end, values


RANKS = 17


def test_many_ranks_are_three_ranks_and_their_spread(tmp_path):
    """17 ranks: the later a rank, the longer its second operator and the later it arrives; rank 16 is the slowest."""
    files = {}
    for rank in range(RANKS):
        trace = cpu_trace(rank, RANKS)
        for span in trace["traceEvents"]:
            if span["name"] == "aten::add_":
                span["dur"] = 100 + rank
            if span["name"] == "gloo:all_reduce":
                span["ts"], span["dur"] = span["ts"] + rank, span["dur"] - rank
        files[rank] = write(tmp_path / f"rank_{rank}" / f"{RUN_ID}.step7.pt.trace.json.gz", trace)
    memory = [memory_of(rank, 1.0 + rank) for rank in range(RANKS)]
    write(tmp_path / f"{RUN_ID}.run.json", record("x", 0.2) | {"world_size": RANKS, "run_id": RUN_ID, "memory": memory})
    parts = dict.fromkeys(("compute_us", "non_compute_us", "idle_us", "total_us", "overlap_pct"), 1.0)
    with mock.patch(
        "ddp_lab.analysis.summary.holistic_figures", return_value=pd.DataFrame({"rank": list(files)} | parts)
    ):
        analysis = analyse_window(Window(RUN_ID, 7, files))  # HTA takes long for many ranks
    page = write_summary(analysis, "x", tmp_path / "reports")
    text = page.read_text()
    assert len(text) < LARGEST_PAGE and len(pd.read_csv(page.with_suffix(".csv"))) == RANKS
    assert "rank 0 (fastest), rank 8 (median), rank 16 (slowest)" in text
    heat = ranks_figure(analysis.exposure.steps, {"step_ms": "step time", "exposed_wait_ms": "exposed waiting"})
    assert [len(panel.z) for panel in heat.data] == [RANKS, RANKS]
    assert [row[0] for row in heat.data[1].z] == pytest.approx([(RANKS - 1 - rank) / 1000 for rank in range(RANKS)])


def test_many_kernels_stay_light(tmp_path):
    """2,000 kernels a step, with gaps that must be bridged in steps, and 100 collectives, each on its own stream."""

    def timeline(rank):
        events = [event("user_annotation", "ProfilerStep#5", 0.0, 2e5)]
        for index in range(2_000):
            name, stream = (
                ("ncclDevKernel_AllReduce", 100 + index) if index % 20 == 0 else ("gemm" + "<float>" * 900, 7)
            )
            more = {"stream": stream, "correlation": index + 1}
            events.append(event("cuda_runtime", "cudaLaunchKernel", index * 100.0, 1, correlation=index + 1))
            events.append(event("kernel", name, index * 100.0 + 2, 40, tid=stream, **more))
        return dataclasses.replace(
            timeline_of({"traceEvents": events}, rank, True), path=tmp_path / f"rank_{rank}" / "t.json"
        )

    timelines = [timeline(0), timeline(1)]
    figure = lanes_figure(timelines, 5)
    page = render("many kernels", [], [Block("Lanes", figure=lambda: figure)])
    assert len(page) < LARGEST_PAGE - 500_000, "room for the other blocks"
    assert 1200 < sum(len(bars.y) for bars in figure.data) <= 4000 + 2400
    assert len(figure.layout.yaxis.categoryarray) == 2 * (1 + 1 + 4), "compute, its kernels, and four of the streams"

"""Plans: rows, intervals, recommendation, page and sliders of known simulations; the command as a user runs it."""

import datetime
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest
from playwright.sync_api import expect, sync_playwright

from planner import hardware, models
from planner.choosing import CASES, CHOICES, COLUMNS, guide, section
from planner.columns import PLAN_COLUMNS
from planner.contracts import Contention, MemoryCurve, Simulated, Span
from planner.figures import MOST_POINTS, compute_by_phase, thinned
from planner.grid import AXES, axes_of, changed, figures, fill
from planner.page import plan_page, said
from planner.plan import Case, Costs, Knowledge, Outcome, Plan, choices, distinct, interval, without_costs
from planner.recommendation import reasons, recommended
from planner.sources import RECORD_ERROR, costs_of
from planner.workers import simulations, whole
from scripts import plan as script
from tests.in_process import run_in_process
from training.config import RunConfig
from training.errors import UserError

ROOT = Path(__file__).parent.parent
GIB = 2**30
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium on the path")
WHERE = ["--gpus", "2xL4", "--link", "pcie4"]
TINY = ["--d-model", "64", "--d-ff", "96", "--layers", "1", "--vocab", "50", "--sequence-length", "16"]


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(script, *arguments)


def simulation(step_ms: float, exposed_ms: float, peak_gib: float) -> Simulated:
    """A step that computes, in two phases, and then waits for one collective."""
    step, exposed = step_ms / 1e3, exposed_ms / 1e3
    half, busy = (step - exposed) / 2, step - exposed
    held = {"parameters": int(peak_gib * GIB / 2), "activations": int(peak_gib * GIB / 2)}
    resting = {"parameters": held["parameters"], "activations": 0}
    spans = [
        Span("phase", "forward", 0, half),
        Span("phase", "backward", half, busy),
        Span("compute", "aten.mm.default", 0, half),
        Span("compute", "aten.mm.default", half, busy),
        Span("communication 0", "all_reduce", half, step, {"payload_bytes": 8}),
    ]
    curve = MemoryCurve(resting, held, [(0.0, resting), (half, held), (busy, resting)])
    return Simulated(step, busy, half + exposed, exposed, spans, curve, {}, 0.1)


def case(gpus: str = "2xL4", batch: int = 8, price: float | None = None, bucket: float | str = "auto") -> Case:
    config = RunConfig(global_batch_size=batch, bucket_cap_mb=bucket)
    between = "ndr" if gpus.count("x") > 1 else None
    return Case(models.find("SmolLM2-135M"), hardware.cluster(gpus, "pcie4", between), config, 128, 128, price)


COSTS = Costs(mock.Mock(), mock.Mock(), Contention(), compute_error=0.2, link_error=0.3, sources=("from nowhere.",))


def made(price: float | None = None, **simulated: Simulated | None) -> Plan:
    reason = "this one needs data"
    outcomes = [Outcome(name, found, "" if found else reason) for name, found in simulated.items()]
    return Plan(case(price=price), COSTS, outcomes)


# Rows and intervals -------------------------------------------------------------------------------------------------


def test_a_row_says_what_the_simulation_says() -> None:
    """20.5 GiB of an L4's 22.5 GiB fit beside CUDA's 1; 8 samples in 100 ms; 2 devices for 12 an hour each."""
    (row,) = made(price=12, zero1=simulation(100, 20, 20.5)).rows
    usable = 23034 * 2**20 - GIB
    assert row["fits"] == "yes" and row["spare_bytes"] == usable - row["peak_bytes"] and row["peak_bytes"] == 20.5 * GIB
    assert row["entrypoint"] == "main_shard.py" and row["resting_bytes"] == row["peak_parameters_bytes"] == 10.25 * GIB
    assert row["samples_per_second"] == pytest.approx(80) and row["tokens_per_second"] == pytest.approx(80 * 128)
    assert row["exposed_ms"] == pytest.approx(20) and row["exposed_pct"] == pytest.approx(20)
    assert row["cost_per_million_samples"] == pytest.approx(2 * 12 * 1e6 / 80 / 3600)


def test_what_does_not_fit_says_by_how_much() -> None:
    (row,) = made(zero1=simulation(100, 20, 22.5)).rows
    assert row["fits"] == "no" and row["spare_bytes"] < 0 and "cost_per_million_samples" not in row


@pytest.mark.parametrize(
    ("compute_error", "link_error", "half"),
    [
        (0.2, 0.2, 20),  # of everything
        (0.2, 0.3, 20 + 0.1 * 60),  # communication is under way for 60 of 100 ms
        (0.3, 0.2, 20 + 0.1 * 80),  # and compute for 80
        (0.0, 0.0, 0),
    ],
)
def test_interval(compute_error: float, link_error: float, half: float) -> None:
    low, high = interval(
        simulation(100, 20, 1), Costs(mock.Mock(), mock.Mock(), Contention(), compute_error, link_error)
    )
    assert (low * 1e3, high * 1e3) == (pytest.approx(100 - half), pytest.approx(100 + half))


def test_choices_are_those_of_both_families() -> None:
    names = choices()
    assert names[0] == "simple_ddp" and "zero3" in names and "deepspeed_zero3" in names
    assert choices(["zero3", "flat_ddp"]) == ["flat_ddp", "zero3"]
    assert distinct(["bucket_ddp_async", "zero1", "baseline"]) == {
        "bucket_ddp_async": "bucket_ddp_async",
        "zero1": "zero1",
        "baseline": "bucket_ddp_async",
    }


# Recommendation -----------------------------------------------------------------------------------------------------


def test_the_fastest_that_fits_is_recommended() -> None:
    plan = made(simple_ddp=simulation(90, 20, 30), flat_ddp=simulation(100, 10, 20), zero3=simulation(150, 60, 5))
    assert recommended(plan.rows)["choice"] == "flat_ddp"  # type: ignore[index]
    text = " ".join(reasons(plan.rows))
    assert text.startswith("Take flat_ddp (main_ddp.py --ddp-choice flat_ddp): 100.0 ms a step (")
    assert "zero3, 50.0 ms a step slower, with 50.0 ms more of exposed communication" in text
    assert "Not on these devices: simple_ddp; of them simple_ddp comes nearest, short of 8.51 GiB." in text
    assert "zero3 has the smallest peak: 5.00 GiB, at 1.50 times the step time" in text


def test_of_equally_fast_ones_the_simplest_where_there_is_room() -> None:
    plan = made(simple_ddp=simulation(101.9, 0, 9), flat_ddp=simulation(100, 0, 8), zero3=simulation(102.1, 0, 1))
    assert recommended(plan.rows)["choice"] == "simple_ddp"  # type: ignore[index]
    assert "As fast within 2%: flat_ddp; simple_ddp is taken since there is ample room" in " ".join(reasons(plan.rows))


def test_of_equally_fast_ones_the_leanest_where_there_is_none() -> None:
    plan = made(simple_ddp=simulation(101.9, 0, 21), flat_ddp=simulation(100, 0, 20), zero3=simulation(102.1, 0, 19))
    assert recommended(plan.rows)["choice"] == "flat_ddp"  # type: ignore[index]
    text = " ".join(reasons(plan.rows))
    assert "simple_ddp; flat_ddp is taken since its peak is the smallest of them." in text
    assert "allocator keeps unused is not in the peak." in text
    roomier = made(flat_ddp=simulation(100, 0, 20), zero3=simulation(130, 0, 10))
    assert "; with more room the fastest is zero3, 130.0 ms a step." in " ".join(reasons(roomier.rows))


def test_where_nothing_fits_or_is_known() -> None:
    plan = made(simple_ddp=simulation(90, 0, 40), zero3=simulation(90, 0, 30), zero1=None)
    assert recommended(plan.rows) is None
    (line,) = reasons(plan.rows)
    assert line.startswith("No choice fits. zero3 comes nearest: its peak of 30.00 GiB is 8.51 GiB more")
    assert "nothing to recommend" in reasons(made(zero1=None).rows)[0]


# Page and grid ------------------------------------------------------------------------------------------------------

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
        for there, choice in itertools.islice(tasks, 20):  # those that differ in one respect
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


def test_operators_without_costs_are_said_with_their_share() -> None:
    """Of 10 ms, and 300 MB and 600 MB at 300 GB/s beside them: 3 of 13."""
    unknown = {"aten.mm.default": (2, 300 * 10**6), "aten.bmm.default": (1, 600 * 10**6)}
    step = replace(simulation(10, 1, 1), without_costs=unknown)
    assert without_costs(step, hardware.device("L4")) == (
        "no cost known, taken as 0: aten.bmm.default (1x), aten.mm.default (2x); to move their bytes alone takes 3 ms, "
        "23.1% of the step"
    )
    assert without_costs(replace(step, without_costs={}), hardware.device("L4")) == ""


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


# The command --------------------------------------------------------------------------------------------------------


def test_plan_from_beginning_to_end(tmp_path: Path) -> None:
    """On the real simulator: choices of both families, one that is not installed, table, CSV and page."""
    files = ["--csv", str(tmp_path / "a" / "plan.csv"), "--html", str(tmp_path / "plan.html"), "--grid-seconds", "0"]
    files += ["--traces", str(tmp_path / "traces")]
    where = ["--gpus", "2xL4", "--link", "pcie4", "--price", "0.8", "--jobs", "1"]
    answer = plan(*TINY, *where, "--choices", "pytorch_ddp,baseline,bucket_ddp_async,deepspeed_zero1", *files)
    assert answer.returncode == 0 and answer.stderr == "", answer.stderr
    assert answer.stdout.startswith("PREDICTED, not measured: Llama of 1 layers") and "Take " in answer.stdout
    table = pd.read_csv(tmp_path / "a" / "plan.csv")
    assert table.choice.tolist() == ["bucket_ddp_async", "pytorch_ddp", "baseline", "deepspeed_zero1"]
    assert list(table.columns) == [name for name in PLAN_COLUMNS if name in table.columns]
    assert table.fits.tolist()[:3] == ["yes"] * 3 and table.step_time_ms[0] == table.step_time_ms[2]
    known = table.dropna(subset=["step_time_ms"])
    parts = [name for name in table.columns if name.startswith("peak_") and name != "peak_bytes"]
    assert known[parts].sum(axis="columns").tolist() == known.peak_bytes.tolist()
    elements = models.from_numbers(64, 96, 1, None, 50).elements()
    assert (known.peak_parameters_bytes >= 4 * elements).all() and (known.peak_bytes < 40 * elements).all()
    assert (known.step_time_low_ms < known.step_time_ms).all() and (known.step_time_high_ms > known.step_time_ms).all()
    assert "not installed" in (tmp_path / "plan.html").read_text()
    assert len(list((tmp_path / "traces").glob("*/rank_0/*.pt.trace.json.gz"))) == 3


def test_a_straggler_computes_longer_and_waits_less(tmp_path: Path) -> None:
    tables = {}
    for factor in ("1", "3"):
        path = tmp_path / f"{factor}.csv"
        flags = ["--choices", "simple_ddp,bucket_ddp_async", "--straggler", factor, "--csv", str(path), "--jobs", "1"]
        answer = plan(*TINY, *WHERE, *flags)
        assert answer.returncode == 0 and ("computes 3 times as long" in answer.stdout) == (factor == "3")
        tables[factor] = pd.read_csv(path)
    compute = {factor: table.step_time_ms - table.exposed_ms for factor, table in tables.items()}
    without, with_overlap = compute["3"] / compute["1"]
    assert without == pytest.approx(3, rel=1e-6), "nothing goes on beside compute"
    assert 2.5 < with_overlap < 3, "and what collectives take from it stays the same"
    assert (tables["3"].exposed_ms <= tables["1"].exposed_ms * (1 + 1e-9)).all()


def test_all_wait_for_the_rank_with_the_longest_samples(tmp_path: Path) -> None:
    """Its step is everybody's, and its memory is shown; on four ranks a quarter of the tokens is its own."""
    tables, four = {}, ["--gpus", "4xL4", "--link", "pcie4", "--choices", "bucket_ddp_async,zero3", "--jobs", "1"]
    for name, lengths in {"uneven": ("64", "128"), "long": ("128", "128"), "short": ("64", "64")}.items():
        path = tmp_path / f"{name}.csv"
        flags = ["--sequence-length", lengths[0], "--longest-sequence-length", lengths[1], "--csv", str(path)]
        answer = plan(*TINY, *four, *flags)
        assert answer.returncode == 0 and ("128 on the rank with the longest" in answer.stdout) == (name == "uneven")
        tables[name] = pd.read_csv(path).drop(columns="simulation_s").set_index("choice")
    tokens = {name: table.pop("tokens_per_second") for name, table in tables.items()}
    pd.testing.assert_frame_equal(tables["uneven"], tables["long"])
    assert (tables["uneven"].peak_bytes > tables["short"].peak_bytes).all()
    assert (tokens["uneven"] / tokens["long"]).tolist() == pytest.approx([(128 + 3 * 64) / (4 * 128)] * 2)


def test_memory_prints_terms_and_ranks() -> None:
    answer = plan(
        "memory", "--d-model", "16384", "--d-ff", "53248", "--layers", "126", "--ffn-only", "--precision", "bf16"
    )
    assert answer.returncode == 0 and "Psi = 219,848,638,464 parameters" in answer.stdout
    row = next(line for line in answer.stdout.splitlines() if line.startswith("zero3")).split()
    assert row == ["zero3", "16/N", "879.4", "879.4", "1,758.8", "9.0", "3,526.6", "3,284.4", "41", "46"]
    answer = plan("memory", "--parameters", "7.5e9", "--ranks", "64", "--precision", "mixed")
    sums = [line.split()[-3] for line in answer.stdout.splitlines() if line.startswith(("replicated", "zero"))]
    assert sums == ["120.0", "31.4", "16.6", "1.9"]


def test_record_then_plan_with_it(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    flags = ["--micro-batch-sizes", "1", "--repeats", "2", "--device", "cpu", "--output", str(record)]
    with mock.patch("planner.record.sweep", lambda device: lambda on_phase: on_phase("forward")):  # which takes long
        answer = plan("record", *TINY, *flags)
    assert answer.returncode == 0 and "micro-batch of 1: step_s" in answer.stdout, answer.stderr
    assert json.loads(record.read_text())["precision"] == "fp32"
    content = json.loads(record.read_text())
    for error_pct, stated, half_width in ((-12.0, "12% off", 0.12), (1.0, "1% off", RECORD_ERROR)):
        content["steps"][0]["error_pct"] = error_pct
        record.write_text(json.dumps(content))
        model = models.from_numbers(64, 96, 1, None, 50)
        case = Case(model, hardware.cluster("2xcpu", "loopback"), RunConfig(), 16, 16, knowledge=Knowledge(record))
        costs = costs_of(case)
        assert stated in costs.sources[0] and costs.compute_error == pytest.approx(half_width)
    with pytest.raises(UserError, match="--efficiency is for rates of a table"):
        costs_of(replace(case, knowledge=Knowledge(record, efficiency=0.5)))
    content["steps"][0]["error_pct"], content["threads"] = -35.0, 7
    record.write_text(json.dumps(content))
    costs = costs_of(case)
    assert "7 threads" in " ".join(costs.sources) and costs.compute_error == pytest.approx(0.35)
    two = ["--gpus", "2xcpu", "--link", "loopback", "--choices", "simple_ddp,zero3", "--global-batch-size", "4"]
    here = " ".join(plan(*TINY, *two, "--jobs", "1", "--record", str(record)).stdout.split())
    said = re.search(r"by choice: ([\d.]+)% to ([\d.]+)% is of operators whose very shapes", here)
    assert said and 40 < float(said[1]) < float(said[2]) < 100, here
    wrong = plan(*TINY, "--gpus", "2xL4", "--link", "pcie4", "--record", str(record))
    assert wrong.returncode == 2 and "recorded on" in wrong.stderr and wrong.stderr.count("\n") == 1


SMOL = ["--model", "SmolLM2-360M"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pln"], "unknown command 'pln'; did you mean plan"),
        ([*SMOL, *WHERE, "--gpu", "2xL4"], "unknown argument '--gpu'; did you mean --gpus"),
        ([*SMOL], "the following arguments are required: --gpus, --link"),
        (["--model", "SmolLM2-361M", *WHERE], "unknown model 'SmolLM2-361M'; did you mean SmolLM2-360M"),
        (WHERE, "no model: give --model, or --d-model, --d-ff and --layers"),
        (["--d-model", "64", "--layers", "1", *WHERE], "--d-ff is missing"),
        ([*SMOL, "--layers", "3", *WHERE], "--layers is for a model by numbers"),
        (["--d-model", "100", "--d-ff", "1", "--layers", "1", *WHERE], "--d-model 100: not a multiple of 64"),
        ([*TINY, "--heads", "5", *WHERE], "--heads 5: --d-model 64 must divide"),
        ([*TINY, "--heads", "4", "--kv-heads", "3", *WHERE], "--kv-heads 3: must divide --heads 4"),
        (["--d-model", "64", "--d-ff", "0", "--layers", "1", *WHERE], "--d-ff 0: must be a whole number from 1 to"),
        ([*SMOL, "--gpus", "2xL40", "--link", "pcie4"], "unknown device 'L40'; did you mean L4"),
        ([*SMOL, "--gpus", "2xL4", "--link", "pcie44"], "unknown link 'pcie44'; did you mean pcie4"),
        ([*SMOL, "--gpus", "0xL4", "--link", "pcie4"], "devices '0xL4': give how many"),
        ([*SMOL, "--gpus", "9999999xL4", "--link", "pcie4"], "at most 1048576 are planned for"),
        ([*SMOL, "--gpus", "2x2xL4", "--link", "pcie4"], "2 nodes: give the link between them"),
        ([*SMOL, *WHERE, "--global-batch-size", "6"], "--global-batch-size 6 does not divide"),
        ([*SMOL, *WHERE, "--precision", "fp16"], "unknown precision 'fp16'"),
        ([*SMOL, *WHERE, "--choices", "zero4"], "--choices: unknown strategy 'zero4'; did you mean zero"),
        (
            ["--model", "gpt2", *WHERE, "--sequence-length", "2048"],
            "--sequence-length 2048: openai-community/gpt2 has 1024",
        ),
        ([*SMOL, *WHERE, "--sequence-length", "0"], "--sequence-length 0: must be from 1 to"),
        ([*SMOL, *WHERE, "--longest-sequence-length", "256"], "--longest-sequence-length 256: must be from 512 to"),
        (["--model", "resnet-50", *WHERE, "--longest-sequence-length", "600"], "takes images, which are all of one"),
        ([*SMOL, *WHERE, "--bucket-cap-mb", "0"], "--bucket-cap-mb 0.0: must be a size above 0"),
        ([*SMOL, *WHERE, "--efficiency", "1.5"], "efficiency 1.5 of compute: give a part above 0 and at most 1"),
        ([*SMOL, *WHERE, "--straggler", "0.5"], "--straggler 0.5: must be from 1"),
        ([*SMOL, *WHERE, "--record", "nowhere.json"], "nowhere.json"),
        ([*SMOL, *WHERE, "--price", "-1"], "--price -1: must be from 0"),
        (["memory", "--parameters", "7e9", "--model", "gpt2"], "--parameters: stands instead of a model"),
        (["memory", "--parameters", "7e9", "--precision", "int4"], "unknown precision 'int4'"),
        (["memory", *SMOL, "--ranks", "0"], "--ranks 0: must be from 1"),
        (["record", *SMOL, "--output", "x.json", "--micro-batch-sizes", "1,b"], "--micro-batch-sizes 1,b: up to 6"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str) -> None:
    answer = plan(*arguments)
    assert answer.returncode == 2 and answer.stdout == "", answer.stdout
    assert answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1 and expected in answer.stderr


# Documentation ------------------------------------------------------------------------------------------------------


def test_flags_and_columns_are_documented() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text().split("## `scripts/plan.py`")[1].split("\n## ")[0]
    for command in script.COMMANDS:
        section = text.split(f"### {command}\n")[1].split("\n### ")[0]
        flags = [action.option_strings[-1] for action in script.build_parser(command)._actions if action.option_strings]
        assert re.findall(r"^\| `(--[^`]+)` \|", section, re.MULTILINE) == [flag for flag in flags if flag != "--help"]
    columns = text.split("| column |")[1]
    documented = [
        name for row in re.findall(r"^\| (`[a-z_`, ]+`) \| ", columns, re.MULTILINE) for name in re.findall(r"\w+", row)
    ]
    assert documented == list(PLAN_COLUMNS)


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from scripts import plan; print([len(plan.build_parser(c).format_help()) for c in plan.COMMANDS]);"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code + "print('torch' in sys.modules, 'pandas' in sys.modules)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.stdout.endswith("False False\n"), answer.stderr


def test_figures_of_a_cell() -> None:
    assert figures(Outcome("zero1", simulation(100, 20, 2))) == (100, 2 * GIB, 20)
    assert figures(Outcome("zero1", None, "why")) is None


def test_guide_has_the_form_that_its_generator_writes() -> None:
    """docs/choosing.md: each of its cases with its command, a recommendation, and a row for each of its choices."""
    text = (ROOT / "docs" / "choosing.md").read_text()
    head, *sections = text.split("\n## ")
    date = re.search(r"Written on (\d{4}-\d\d-\d\d), not by hand", head)
    asked = re.search(r"--output docs/choosing.md(?: --cases (\S+))?\n", head)
    assert date and asked
    names = asked[1].split(",") if asked[1] else list(CASES)
    assert head.strip() == guide([], names, datetime.date.fromisoformat(date[1])).strip()
    headings = {CASES[name].heading: CASES[name] for name in names}
    assert [of_case.split("\n")[0] for of_case in sections] == list(headings)
    for of_case in sections:
        heading, command, *rest = [line for line in of_case.splitlines() if line]
        assert command.strip() == headings[heading].command and rest[0].startswith(("- Take ", "- No choice fits"))
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in rest if line.startswith("|")]
        assert [row[0] for row in table[2:]] == CHOICES.split(",") and {row[1] for row in table[2:]} <= {"yes", "no"}
        taken = rest[0].split()[2]
        assert rest[0].startswith("- No") or taken in [row[0] for row in table[2:] if row[1] == "yes"]
        assert {len(row) for row in table} == {len(COLUMNS)}


def test_a_section_of_the_guide() -> None:
    plan = made(flat_ddp=simulation(100, 10, 20), zero3=simulation(150, 60, 5))
    text = section(next(iter(CASES.values())), plan)
    assert "- Take flat_ddp" in text and "| choice | fits | to spare, GiB |" in text
    assert "| zero3 | yes | 16.49 | 5.00 | 150.0 |" in text and "from nowhere." in text

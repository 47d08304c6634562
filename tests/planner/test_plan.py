"""Plans: rows, intervals and recommendation of known simulations; the command as a user runs it."""

import datetime
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from planner import hardware, models
from planner.choosing import CASES, CHOICES, COLUMNS, guide, section
from planner.columns import PLAN_COLUMNS
from planner.contracts import Contention
from planner.plan import Case, Costs, Knowledge, choices, distinct, interval, without_costs
from planner.recommendation import reasons, recommended
from planner.sources import RECORD_ERROR, costs_of
from scripts import plan as script
from tests.in_process import run_in_process
from tests.plans import GIB, made, simulation
from training.config import RunConfig
from training.errors import UserError

ROOT = Path(__file__).parents[2]
WHERE = ["--gpus", "2xL4", "--link", "pcie4"]
TINY = ["--d-model", "64", "--d-ff", "96", "--layers", "1", "--vocab", "50", "--sequence-length", "16"]


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(script, *arguments)


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


def test_operators_without_costs_are_said_with_their_share() -> None:
    """Of 10 ms, and 300 MB and 600 MB at 300 GB/s beside them: 3 of 13."""
    unknown = {"aten.mm.default": (2, 300 * 10**6), "aten.bmm.default": (1, 600 * 10**6)}
    step = replace(simulation(10, 1, 1), without_costs=unknown)
    assert without_costs(step, hardware.device("L4")) == (
        "no cost known, taken as 0: aten.bmm.default (1x), aten.mm.default (2x); to move their bytes alone takes 3 ms, "
        "23.1% of the step"
    )
    assert without_costs(replace(step, without_costs={}), hardware.device("L4")) == ""


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
        flags = ["--choices", "simple_ddp,simple_ddp_async", "--straggler", factor, "--csv", str(path), "--jobs", "1"]
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
    tables, four = {}, ["--gpus", "4xL4", "--link", "pcie4", "--choices", "simple_ddp_async,zero3", "--jobs", "1"]
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

"""All choices side by side: figures worked out by hand, which choice wins, what is refused, and the page."""

import html
import json
import re
from types import MappingProxyType

import numpy as np
import pandas as pd
import pytest

from ddp_lab.analysis.columns import kind_of
from ddp_lab.analysis.comparison.choices import report_on_choices
from ddp_lab.analysis.comparison.compare import comparison, standings, unsteady
from ddp_lab.analysis.comparison.fairness import FIELDS, affected, require_comparable, with_one_link
from ddp_lab.analysis.comparison.outcome import conclude, fastest
from ddp_lab.analysis.comparison.timing import with_passes
from ddp_lab.analysis.comparison.traced import keep
from ddp_lab.analysis.report.pages.compare import Compared, comparison_page, write_comparison
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.collectives.kinds import LABELS
from ddp_lab.runtime.errors import UserError
from tests.analysis.test_analysis import not_shown
from tests.tables import each_row
from tests.traces import record, timed, write, write_run


def analysed(folder, choice, changes=MappingProxyType({})):
    """A run of `cpu_trace` with its record."""
    trace_dir = write_run(folder / "profile" / choice)
    (window,) = find_windows(trace_dir)
    write(trace_dir / f"{window.run_id}.run.json", {**record(choice, 0.2), **changes})
    return analyse_window(window)


def body_of(text):
    return text[text.index("<body>") : text.index("</main>")]


# Figures -------------------------------------------------------------------------------------------------------------


def test_runs_are_held_against_the_reference():
    """40 steps of exactly 2, 1.1 and 0.5 times the reference's. With one run a side, a spread of 4 % is expected: with
    2.776, which is t of four degrees of freedom, an interval reaches 15.7 % of logarithms."""
    records = {"a": timed("a", 0.1), "b": timed("b", 0.2), "c": timed("c", 0.05), "d": timed("d", 0.11)}
    records["b"]["train_loss"] = [*records["a"]["train_loss"][:-1], 1.25]
    table = comparison(records, {}, "a").set_index("choice")
    assert table["verdict"].to_dict() == {"a": "reference", "b": "slower", "c": "faster", "d": "not known"}
    assert table.loc[["b", "c", "d"], "paired_ratio"].tolist() == pytest.approx([2, 0.5, 1.1])
    reach = 2.7764 * 2**0.5 * 0.04
    ends = table.loc["d", ["paired_ratio_low", "paired_ratio_high"]].tolist()
    assert ends == pytest.approx([1.1 * np.exp(-reach), 1.1 * np.exp(reach)], abs=1e-4)
    assert table["passes"].tolist() == [None, 1, 1, 1]
    assert table["step_time_ratio"].tolist() == pytest.approx([1, 2, 0.5, 1.1])
    assert table["loss_difference"].tolist() == [0.0, 0.25, 0.0, 0.0]
    few = comparison({"a": timed("a", 0.1, steps=5), "b": timed("b", 0.2, steps=5)}, {}, "a").set_index("choice")
    assert few.loc["b", ["verdict", "passes", "step_time_ratio"]].tolist() == ["not known", 0, 2.0]
    assert np.isnan(few.loc["b", "paired_ratio"])
    alone = comparison({"b": timed("b", 0.2)}, {}, "a")
    assert alone["verdict"].tolist() == ["not known"]
    assert alone[["step_time_ratio", "loss_difference"]].isna().all(axis=None)


def test_a_busy_machine_makes_a_verdict_less_sure():
    """A thread has no core in half of a step. A quarter would not count as busy, so 25 % more are expected."""
    busy = {"throughput": [{"core_s": 0.1, "step_s": 0.2}]}
    for changes, judged in (({}, "slower"), (busy, "not known")):
        records = {"a": timed("a", 0.1) | changes, "b": timed("b", 0.2) | changes}
        assert comparison(records, {}, "a")["verdict"].tolist()[1] == judged


# Passes of a sweep ---------------------------------------------------------------------------------------------------


def in_passes(choice, *seconds):
    """A choice in passes of 20 steps; `seconds` a step, by pass."""
    runs = {number: timed(choice, step_s, steps=20) for number, step_s in enumerate(seconds, 1)}
    return with_passes(runs[1], runs)


BY_PASSES = {
    "all alike": ([0.1, 0.1], [0.12, 0.12], "slower", "1.20 1.20", ""),
    "one of two disturbed": ([0.1, 0.1], [0.09, 0.45], "not known", "0.90 4.50", "b: 90.9 ms (pass 1) and 454.5 ms"),
    "the reference's": ([0.5, 0.1], [0.11, 0.11], "not known", "0.22 1.10", "b: 111.1 ms (pass 1) and 111.1 ms"),
    "one of three disturbed": ([0.1] * 3, [0.09, 0.45, 0.09], "not known", "0.90 4.50 0.90", "454.5 ms (pass 2)"),
    "passes disagree": ([0.1] * 3, [0.115, 0.115, 0.0999], "not known", "1.15 1.15 1.00", ""),
    "a pass in which all is slower": ([0.1, 0.12], [0.12, 0.144], "slower", "1.20 1.20", ""),
}


@each_row("case", BY_PASSES)
def test_a_verdict_is_what_every_pass_says_on_an_equal_machine(case):
    reference, candidate, verdict, by_pass, sentence = BY_PASSES[case]
    records = {"a": in_passes("a", *reference), "b": in_passes("b", *candidate)}
    records["c"] = in_passes("c", *(2 * seconds for seconds in reference))
    table = comparison(records, {}, "a").set_index("choice")
    assert table.loc["b", ["verdict", "step_time_ratio_by_pass"]].tolist() == [verdict, by_pass]
    line = unsteady(records, "a")
    assert sentence in line and bool(line) == bool(sentence)


def test_a_machine_that_changed_is_named_and_nothing_is_claimed(tmp_path):
    records = {"pytorch_ddp": in_passes("pytorch_ddp", 0.5, 0.5), "b": in_passes("b", 0.09, 0.45)}
    compared_runs = Compared(records, {}, "pytorch_ddp", [], [])
    text = write_comparison(compared_runs, tmp_path).read_text()
    assert "No strategy wins" in text and text.count("The machine changed") == 1
    assert not any(claim in text for claim in ("is fastest", "Believe")) and compared_runs.unsteady[0] in text


# Who wins ------------------------------------------------------------------------------------------------------------

FAST_PARTS = {"exposed_wait_ms": 10.0, "exposed_transfer_ms": 20.0, "compute_ms": 60.0, "idle_ms": 10.0}
SLOW_PARTS = {"exposed_wait_ms": 15.0, "exposed_transfer_ms": 35.0, "compute_ms": 58.0, "idle_ms": 10.0}


def concluded(
    records,
    parts=None,
    affected=(),
    equal_compute=False,
    **peaks,
):
    """What is concluded of hand-made runs. By choice: `parts` of profiled steps, and peaks of memory in MiB."""
    table = comparison(records, {}, "ref").set_index("choice", drop=False)
    for choice, columns in (parts or {}).items():
        table.loc[choice, [*columns, "exposed_copy_ms"]] = [*columns.values(), 0.0]
        table.loc[choice, "profiled_step_ms"] = sum(columns.values())
    for choice, mib in peaks.items():
        table.loc[choice, "peak_bytes"] = mib * 2**20
    best, table = fastest(table), table.reset_index(drop=True)
    standing = standings(records, best) if best else {}
    outcome = conclude(table, standing, affected, equal_compute)
    assert outcome.is_sure == outcome.belief.startswith("Believe it")
    return str(outcome)


STEP = {"ref": SLOW_PARTS, "fast": FAST_PARTS}
RUNS = {"ref": timed("ref", 0.2), "fast": timed("fast", 0.1)}
PASSES = {"ref": in_passes("ref", 0.2, 0.2), "fast": in_passes("fast", 0.1, 0.1)}
NO_CLAIM = ("fastest", "less", "Believe")
CONCLUSIONS = [
    # of 100.5 ms `fast` computes 0.6 and is exposed 0.3; of 201 ms `ref` computes 58 / 118, is exposed 50 / 118
    (
        RUNS | {"alike": timed("alike", 0.1001, 0.01)},
        {"parts": STEP, "ref": 10, "fast": 20, "alike": 20},
        ("fast and alike are fastest", "2.00 times as fast as the reference ref", "55.0 ms less exposed",
         "38.5 ms less", "Believe it", "over 1 pass,", "0.43 to 0.59", "10.0 MiB (ref), 50 % less than fast"),
        (),
    ),
    (PASSES, {"parts": STEP, "equal_compute": True}, ("55.3 ms less exposed", "over 2 passes"), ("compute",)),
    ({"ref": in_passes("ref", 0.1, 0.12), "fast": in_passes("fast", 0.11, 0.09)}, {}, ("No strategy wins",), NO_CLAIM),
    ({"ref": timed("ref", 0.1001), "fast": timed("fast", 0.1, 0.01)}, {"parts": STEP}, ("No strategy wins",), NO_CLAIM),
    ({"ref": record("ref", 0.2), "fast": record("fast", 0.1)}, {"parts": STEP}, ("Too few steps",), NO_CLAIM),
    (
        {"ref": timed("ref", 0.1), "b": timed("b", 0.1), "c": timed("c", 0.2)}, {},
        ("No strategy wins: ref and b tie", "All need the same memory"), ("fastest",),
    ),
    ({"ref": RUNS["ref"]}, {}, ("Only one strategy",), NO_CLAIM),
    ({name: record(name, 0.1) | {"step_time_s": [0.1, None]} for name in RUNS}, {}, ("Fewer than two",), NO_CLAIM),
    (
        {"ref": timed("ref", 0.1), "a": timed("a", 0.3), "b": timed("b", 0.2)}, {"ref": 20, "a": 10, "b": 10},
        ("10.0 MiB (b, a), 50 % less than ref; b, the fastest of these, takes 2.00 times as long",), (),
    ),
    (RUNS, {"affected": ["step times"], "ref": 10, "fast": 20}, ("no strategy wins", "10.0 MiB (ref)"), NO_CLAIM),
    (RUNS, {"affected": ["step times", "memory"]}, ("no strategy wins",), ("memory:", *NO_CLAIM)),
]  # fmt: skip


@each_row("records, how, says, never", CONCLUSIONS)
def test_who_wins_and_why(records, how, says, never):
    text = concluded(records, **how)
    assert all(word in text for word in says) and not any(word in text for word in never), text


def test_a_fast_choice_that_fails_its_audit_is_suspected():
    table = comparison(RUNS, {}, "ref")
    for failures, is_sure in (([0, 2], False), ([0, 0], True)):
        table["audit_failures"] = failures
        outcome = conclude(table, standings(RUNS, "fast"))
        assert outcome.is_sure == is_sure and ("fast fails its audit" in outcome.belief) != is_sure


# Backend classes -----------------------------------------------------------------------------------------------------

NCCL2, LEGACY = {"backend_class": "ProcessGroupNCCL2"}, {"backend_class": "ProcessGroupNCCL"}
SHARED = {"gpu_sharing": "2 ranks a GPU, in turns"}


@each_row("setup, other_setup", [(NCCL2, LEGACY), (NCCL2 | SHARED, NCCL2)])
def test_ratios_are_among_runs_over_one_class_that_share_gpus_alike(setup, other_setup):
    """Over torch's `nccl` the reference takes twice as long as `ours`, over the older class a quarter longer."""
    records = {
        "ours": timed("ours", 0.1) | setup,
        "pytorch_ddp": timed("pytorch_ddp", 0.2) | setup,
        "ours@nccl-legacy": timed("ours", 0.1) | other_setup,
        "pytorch_ddp@nccl-legacy": timed("pytorch_ddp", 0.125) | other_setup,
    }
    table = comparison(records, {}, "pytorch_ddp").set_index("choice")
    assert table["step_time_ratio"].tolist() == [0.5, 1.0, 0.8, 1.0]
    assert table["paired_ratio"].tolist()[::2] == [0.5, 0.8]
    assert table["verdict"].tolist() == ["faster", "reference"] * 2
    assert table["backend_class"].tolist() == [setup["backend_class"]] * 2 + [other_setup["backend_class"]] * 2
    assert table["gpu_sharing"].isna().tolist() == ["gpu_sharing" not in setup] * 2 + [True] * 2


# Fairness ------------------------------------------------------------------------------------------------------------

DIFFERENT = {
    "precision": ({"config": {"precision": "bf16"}}, "precision (fp32: a; bf16: b)"),
    "paced link": ({"config": {"link": "1gbit,50us"}}, "link (none: a; 1gbit,50us: b); train them alike"),
    "torch": ({"versions": {"torch": "2.16"}}, "torch-version (2.15: a; 2.16: b)"),
    "backend class": ({"backend_class": "X"}, "backend-class (ProcessGroupGloo: a; X: b)"),
    "shared GPU": (SHARED, "(ProcessGroupGloo: a; ProcessGroupGloo, 2 ranks a GPU, in turns: b)"),
    "two": (
        {"world_size": 3, "config": {"precision": "bf16"}},
        "ranks (2: a; 3: b); train them alike, or give --allow-different precision --allow-different ranks",
    ),
}


@each_row("case", DIFFERENT)
def test_runs_that_differ_stand_in_no_table(case):
    changes, expected = DIFFERENT[case]
    machine = {"host": "here", "threads": 1, "versions": {"torch": "2.15", "nccl": "2.30"}}
    first, second = record("a", 1.0) | machine, record("b", 1.0) | machine
    assert require_comparable({"a": first, "b": second}) == []
    changed = {**second, **changes, "config": {**second["config"], **changes.get("config", {})}}
    with pytest.raises(UserError) as caught:
        require_comparable({"a": first, "b": changed})
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_over_another_link_is_told_apart():
    """As when it was trained beside a sweep. Of two runs, neither is the odd one."""
    runs = {name: record(name, 1.0) for name in "abc"}
    for name in "ac":
        runs[name]["config"]["link"] = "1gbit"
    comparable, line = with_one_link(runs)
    assert list(comparable) == ["a", "c"]
    assert line == "left out, since their links are not those of the other runs (--link 1gbit): b (--link none)"
    del runs["c"]
    assert with_one_link(runs) == (runs, "") and with_one_link({}) == ({}, "")


def test_what_may_differ_is_named_and_says_what_does_not_compare():
    """Nobody can allow different links."""
    first, second = record("a", 1.0), record("b", 1.0)
    second["config"]["lr"], second["device_name"] = 0.2, "other"
    with pytest.raises(UserError, match=r"differ in device \(cpu: a; other: b\); .* --allow-different device$"):
        require_comparable({"a": first, "b": second}, ["lr"])
    differences = require_comparable({"a": first, "b": second}, ["lr", "device"])
    assert [str(difference) for difference in differences] == ["lr (0.1: a; 0.2: b)", "device (cpu: a; other: b)"]
    assert affected(differences) == ["step times", "losses"] and affected(differences[:1]) == ["losses"]
    second["config"]["link"] = "1gbit"
    with pytest.raises(UserError, match=r"link \(none: a; 1gbit: b\); train them alike$"):
        require_comparable({"a": first, "b": second}, [*FIELDS, "link"])


# The page ------------------------------------------------------------------------------------------------------------


def compared(folder, allowed=(), **changes):
    """Two choices. `other` is twice as fast, and `changes` go into its record."""
    records = {"pytorch_ddp": timed("pytorch_ddp", 0.2), "other": timed("other", 0.1) | changes}
    traced = {choice: keep(analysed(folder, choice, content)) for choice, content in records.items()}
    return Compared(records, traced, "pytorch_ddp", ["failed<b>"], require_comparable(records, allowed))


def test_page_terminal_and_json_say_one_string(tmp_path, capsys):
    for choice, seconds in (("pytorch_ddp", 0.2), ("other", 0.1)):
        content = timed(choice, seconds)
        content["config"]["no_profile"] = True
        write(tmp_path / "profile" / choice / "1.run.json", content)
    page = report_on_choices(tmp_path, "reports", ["pytorch_ddp", "other"], [])
    sentences = capsys.readouterr().out.splitlines()[-1]
    assert "is fastest" in sentences and "Believe it" in sentences and "need the same memory" in sentences
    assert sentences in html.unescape(re.sub("<[^>]*>", "", page.read_text()))
    outcome = json.loads((tmp_path / "reports" / "compare.json").read_text())["outcomes"][0]
    assert sentences == " ".join(outcome[name] for name in ("claim", "belief", "memory"))
    assert outcome["best"] == "other"


def test_the_page_says_what_the_csv_says(tmp_path):
    page = write_comparison(compared(tmp_path), tmp_path)
    table = pd.read_csv(tmp_path / "compare.csv")
    left_out = not_shown(page, tmp_path / "compare.csv") - set(table.columns[table.isna().all()])
    assert {kind_of(name) for name in left_out} == LABELS.keys() - {"all_reduce"} and not table[
        sorted(left_out)
    ].to_numpy().any()
    body = body_of(page.read_text())
    assert body.count("<details>") == body.count("<h2") - 1 == 5, "all but one step of each choice is folded"
    assert "other is fastest, 2.00 times as fast as the reference pytorch_ddp" in body
    assert "failed<b>" not in body and "Warning" not in body


def test_the_page_warns_of_what_differs_and_of_what_fails_its_audit(tmp_path):
    wrong = {"device_name": "<i>", "expected_traffic": [{"kind": "all_reduce", "count": 2, "payload_bytes": 4000}]}
    compared_runs = compared(tmp_path, ("device",), **wrong)
    body = body_of(comparison_page(compared_runs))
    assert "device (cpu: pytorch_ddp; &lt;i&gt;: other)" in body and "<i>" not in body and "is fastest" not in body
    assert "These figures cannot be compared: step times." in body
    assert "Warning: other does not do what its own formula and configuration say: all-reduce: calls" in body
    assert compared_runs.table["audit_failures"].tolist()[1] >= 2  # of each rank

"""All choices side by side: figures worked out by hand, what the page says in words, and what it refuses."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddp_lab.analysis.comparison.compare import comparison, standings
from ddp_lab.analysis.comparison.conclusion import fastest, leanest, verdict
from ddp_lab.analysis.comparison.fairness import FIELDS, affected, require_comparable
from ddp_lab.analysis.comparison.steady import steady, with_passes
from ddp_lab.analysis.comparison.traced import Traced, keep
from ddp_lab.analysis.metrics.significance import fewest_pairs
from ddp_lab.analysis.report.pages.compare import Compared, comparison_page, write_comparison
from ddp_lab.analysis.report.pages.heads import labels
from ddp_lab.analysis.report.pages.summary import summary_page
from ddp_lab.analysis.summary import WindowAnalysis, analyse_window
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.runtime.errors import UserError
from tests.analysis.test_analysis import not_shown
from tests.tables import each_row
from tests.traces import record, record_of_eight_steps, write, write_run

RHYTHM = np.tile([1.0, 1.02, 0.98, 1.01], 11)[:41]
"""Of a machine, over the steps of a run: some are slower."""


def timed(choice: str, seconds: float, jitter: float = 0.0, steps: int = 41) -> dict[str, Any]:
    """The record of a run whose steps but the first were timed; `jitter` makes every other batch slower or faster."""
    times = (seconds * RHYTHM * (1 + jitter * np.tile([1, 1, 1, 1, -1, -1, -1, -1], 6)[:41]))[:steps]
    return record_of_eight_steps(choice, seconds) | {"step_time_s": times.tolist()}


def analysed(folder: Path, choice: str, changes: Mapping[str, Any] = MappingProxyType({})) -> WindowAnalysis:
    """A run of `cpu_trace` with its record."""
    trace_dir = write_run(folder / "profile" / choice)
    (window,) = find_windows(trace_dir)
    write(trace_dir / f"{window.run_id}.run.json", {**record(choice, 0.2), **changes})
    return analyse_window(window)


# Figures -------------------------------------------------------------------------------------------------------------


def test_step_times_are_held_against_the_reference_step_by_step() -> None:
    """40 steps of exactly 1.1 and 0.9 of the reference's, and one that is now above and now below."""
    records = {"a": timed("a", 0.1), "b": timed("b", 0.11), "c": timed("c", 0.09), "d": timed("d", 0.1, 0.01)}
    table = comparison(records, {}, "a").set_index("choice")
    assert table["verdict"].to_dict() == {"a": "reference", "b": "slower", "c": "faster", "d": "no difference seen"}
    assert table.loc["b", ["paired_ratio", "paired_ratio_low", "paired_ratio_high"]].tolist() == [1.1] * 3
    assert table.loc["c", "paired_ratio"] == 0.9 and table.loc["a", "pairs"] is None
    assert table["pairs"].tolist()[1:] == [40] * 3
    # 10 batches, all on one side: 2 / 2^10, times the three comparisons, and the next no less
    assert table.loc[["b", "c"], "paired_p_value"].tolist() == pytest.approx([3 / 512] * 2)
    assert table.loc["d", "paired_ratio_low"] < 1 < table.loc["d", "paired_ratio_high"]
    assert table["step_time_ratio"].tolist()[:3] == pytest.approx([1, 1.1, 0.9])


@each_row("steps", [2, 18])
def test_too_few_steps_and_no_reference_are_unknown(steps: int) -> None:
    few = {"a": timed("a", 0.1, steps=steps), "b": timed("b", 0.2, steps=steps)}
    table = comparison(few, {}, "a").set_index("choice")
    assert table.loc["b", "verdict"] == "unknown" and np.isnan(table.loc["b", "paired_ratio"])
    assert table.loc["b", "step_time_ratio"] == 2.0 and table.loc["b", "pairs"] == steps - 1
    alone = comparison({"b": timed("b", 0.2)}, {}, "a")
    assert alone["verdict"].tolist() == ["unknown"] and alone["step_time_ratio"].isna().all()


def test_losses_are_held_against_the_reference_step_by_step() -> None:
    first, second = record("a", 1.0), record("b", 1.0)
    second["train_loss"] = [2.0, 1.25]
    table = comparison({"a": first, "b": second}, {}, "a")
    assert table["loss_difference"].tolist() == [0.0, 0.25]
    assert comparison({"b": second}, {}, "a")["loss_difference"].isna().all()


# Passes of a sweep ---------------------------------------------------------------------------------------------------


def in_passes(choice: str, *seconds: float) -> dict[str, Any]:
    """A choice whose passes of 20 steps took so long a step."""
    runs = {number: timed(choice, each, steps=20) for number, each in enumerate(seconds, 1)}
    return with_passes(runs[1], runs)


BY_PASSES = {
    "all alike": ([0.1, 0.1], [0.11, 0.11], "slower", "1.10 1.10", ""),
    "one of two disturbed": ([0.1, 0.1], [0.09, 0.45], "withheld", "", "90.9 ms (b, pass 1) and 454.5 ms (b, pass 2)"),
    "the reference's": ([0.5, 0.1], [0.11, 0.11], "withheld", "", "101.0 ms (a, pass 2) and 505.0 ms (a, pass 1)"),
    "one of three disturbed": ([0.1, 0.1, 0.1], [0.09, 0.45, 0.09], "faster", "0.90 0.90", "454.5 ms (b, pass 2)"),
    "passes disagree": ([0.1] * 3, [0.115, 0.115, 0.0999], "no difference seen", "1.15 1.15 1.00", ""),
    "a pass in which all is slower": ([0.1, 0.12], [0.11, 0.132], "slower", "1.10 1.10", ""),
}


@each_row("case", BY_PASSES)
def test_a_verdict_is_what_every_pass_says_on_an_equal_machine(case: str) -> None:
    reference, other, judged, by_pass, said = BY_PASSES[case]
    records = {"a": in_passes("a", *reference), "b": in_passes("b", *other), "c": in_passes("c", *[0.2] * len(other))}
    table = comparison(records, {}, "a").set_index("choice")
    assert table.loc["b", "verdict"] == judged and (table.loc["b", "step_time_ratio_by_pass"] == by_pass or not by_pass)
    found = steady(records, {})
    assert bool(found.withheld) == (judged == "withheld") == (table.loc["c", "verdict"] == "withheld")
    assert said in (found.withheld or "".join(found.left_out)) and bool(found.left_out) == ("three" in case)
    assert table.loc["a", "withheld"] == (found.withheld or None)
    if judged == "withheld":
        assert found.withheld.startswith("the machine changed during the sweep: a step of equal work took ")
        assert found.withheld.endswith("; run again, or --passes 4")


def computing(*passes: float) -> Traced:
    """What the traces of a run say that computes so many ms in each pass."""
    steps = [pd.DataFrame({"step": [5, 6], "rank": 0, "compute_ms": [ms, 1.01 * ms]}) for ms in passes]
    nothing: Any = pd.DataFrame()
    return Traced(nothing, steps[0], nothing, nothing, 5, dict(enumerate(steps[1:], 2)))


def test_compute_of_equal_work_takes_equal_time() -> None:
    """Of one choice in all passes; of single runs that do equal compute. Sharded choices copy, and are not held so."""
    records = {name: in_passes(name, 0.1, 0.1) | {"shards": []} for name in ("a", "b")}
    assert not steady(records, {"a": computing(252, 260), "b": computing(500, 510)}).withheld
    found = steady(records, {"a": computing(252, 260), "b": computing(252, 5000)}).withheld
    assert "compute of equal work took 253.3 ms (b, pass 1) and 5,025.0 ms (b, pass 2)" in found
    alone = {name: timed(name, 0.1) | {"shards": []} for name in ("a", "b")}
    found = steady(alone, {"a": computing(252), "b": computing(5000)}).withheld
    said = "the machine changed between the runs: compute of equal work took 253.3 ms (a) and 5,025.0 ms (b); run again"
    assert found.startswith(said) and found.endswith(", or in passes: ddp-lab sweep FAMILY RANKS")
    stopped = {name: in_passes(name, 0.1) | {"shards": []} for name in ("a", "b")}
    found = steady(stopped, {"a": computing(252), "b": computing(5000)}).withheld
    assert found.endswith("; run again, or finish a sweep of --passes 2")
    assert not steady(alone, {"a": computing(252), "b": computing(350)}).withheld
    sharded = alone | {"b": alone["b"] | {"shards": ["gradients"]}}
    assert not steady(sharded, {"a": computing(252), "b": computing(5000)}).withheld


def test_a_disturbed_pass_withholds_every_claim(tmp_path: Path) -> None:
    """Nor is anything ranked by time."""
    records = {"pytorch_ddp": in_passes("pytorch_ddp", 0.5, 0.5), "b": in_passes("b", 0.09, 0.45)}
    found = Compared(records, {}, "pytorch_ddp", [], [])
    text = write_comparison(found, tmp_path).read_text()
    assert "The verdict is withheld: the machine changed during the sweep: a step of equal work took 90.9 ms" in text
    assert "fastest," not in text and "times as long" not in text and "Believe" not in text
    assert text.count("the machine changed") == 1 and "0.18 0.90" in text
    first = text[: text.index("<section")]
    assert "step_time_ratio" not in first and first.index("<b>pytorch_ddp") < first.index("<b>b<")
    assert "ratio of step time, ×" in text and "ratio of peak memory, ×" in text and "(1.0 thousand parameters)" in text
    assert found.withheld == [f"Verdicts are withheld: {found.steadiness[0].withheld}."] and not found.left_out
    assert pd.read_csv(tmp_path / "compare.csv")["withheld"].str.contains("--passes 4").all()


def test_an_unknown_verdict_has_its_reason() -> None:
    short = {"ref": timed("ref", 0.2, steps=4), "b": timed("b", 0.1, steps=4), "c": timed("c", 0.1)}
    (said,) = Compared(short, {}, "ref", [], []).unknown
    assert said == (
        "Verdicts on b and c are unknown: 3 pairs of steps with ref were timed; to tell a difference from chance "
        f"takes {fewest_pairs(2)} (--max-steps)."
    )
    alone = Compared({"b": timed("b", 0.1)}, {}, "ref", [], []).unknown
    assert alone == ["Verdicts are unknown: there is no run of ref, the reference."]
    disturbed = {"ref": in_passes("ref", 0.5, 0.5), "b": in_passes("b", 0.09, 0.45)}
    assert Compared(disturbed, {}, "ref", [], []).unknown == [], "`withheld` says why"
    assert Compared({"ref": timed("ref", 0.2), "b": timed("b", 0.1)}, {}, "ref", [], []).unknown == []


def test_the_least_memory_of_equals_names_the_fastest_of_them() -> None:
    records = {"ref": timed("ref", 0.1), "a": timed("a", 0.3), "b": timed("b", 0.2)}
    text = words(records, ref=20, a=10, b=10)
    assert text.endswith("10.0 MiB (b, a), 50 % less than ref; b, the fastest of these, takes 2.00 times as long.")


# In words ------------------------------------------------------------------------------------------------------------

FAST_PARTS = {"exposed_wait_ms": 10.0, "exposed_transfer_ms": 20.0, "compute_ms": 60.0, "idle_ms": 10.0}
SLOW_PARTS = {"exposed_wait_ms": 15.0, "exposed_transfer_ms": 35.0, "compute_ms": 58.0, "idle_ms": 10.0}


def words(
    records: dict[str, Any],
    parts: dict[str, Any] | None = None,
    affected: Any = (),
    equal_compute: bool = False,
    **peaks: float,
) -> str:
    """What is said of hand-made runs; `parts` of profiled steps, and peaks of memory in MiB, by choice."""
    table = comparison(records, {}, "ref").set_index("choice", drop=False)
    for choice, columns in (parts or {}).items():
        table.loc[choice, [*columns, "exposed_copy_ms"]] = [*columns.values(), 0.0]
        table.loc[choice, "profiled_step_ms"] = sum(columns.values())
    for choice, mib in peaks.items():
        table.loc[choice, "peak_bytes"] = mib * 2**20
    best, table = fastest(table), table.reset_index(drop=True)
    standing = standings(records, best) if best else {}
    lean = "" if "memory" in affected else leanest(table, {} if "step times" in affected else standing)
    claim, belief, is_sure = verdict(table, standing, affected, equal_compute=equal_compute)
    assert is_sure == belief.startswith("Believe it")
    return " ".join(part for part in (claim, belief, lean) if part)


def test_the_fastest_and_why() -> None:
    """Of 100.5 ms `fast` computes 0.6 and is exposed 0.3; of 201 ms `ref` computes 58 / 118, is exposed 50 / 118."""
    records = {"ref": timed("ref", 0.2), "fast": timed("fast", 0.1), "alike": timed("alike", 0.1001, 0.01)}
    text = words(records, {"ref": SLOW_PARTS, "fast": FAST_PARTS}, ref=10, fast=20, alike=20)
    assert text == (
        "fast and alike are fastest (they cannot be told apart), 2.00 times as fast as the reference ref, step by "
        "step (medians: 100.5 and 201.0 ms), thanks to 55.0 ms less exposed communication and 38.5 ms less compute. "
        "Believe it, unless the machine changed between the runs: over 40 pairs of steps, a step of fast takes 0.50 "
        "to 0.50 of one of ref (95 % interval) and losses are at most 0 nats apart. Least peak memory: 10.0 MiB "
        "(ref), 50 % less than fast; ref takes 2.00 times as long."
    )


def test_equal_compute_is_nobodys_merit() -> None:
    records = {"ref": in_passes("ref", 0.2, 0.2), "fast": in_passes("fast", 0.1, 0.1)}
    text = words(records, {"ref": SLOW_PARTS, "fast": FAST_PARTS}, equal_compute=True)
    assert "thanks to 55.3 ms less exposed communication. Believe it: over 38 pairs of steps in 2 passes, a" in text
    text = words(records, {"ref": SLOW_PARTS, "fast": SLOW_PARTS | {"compute_ms": 40.0}}, equal_compute=True)
    assert "compute" not in text
    records = {"ref": in_passes("ref", 0.1, 0.12), "fast": in_passes("fast", 0.11, 0.09)}
    assert "Passes disagree on which is faster" in words(records)


def test_no_winner_where_it_cannot_be_told() -> None:
    text = words({"ref": timed("ref", 0.1001), "b": timed("b", 0.1, 0.01)}, {"ref": SLOW_PARTS, "b": FAST_PARTS})
    assert re.match(
        r"No choice wins: b has the lowest .*, but the reference ref cannot be told apart from it. The difference may",
        text,
    )
    assert "fastest" not in text and "less" not in text
    text = words({"ref": record("ref", 0.2), "b": record("b", 0.1)}, {"ref": SLOW_PARTS, "b": FAST_PARTS})
    assert text.startswith(
        "Too few steps to name a winner: so far b has the lowest median step time, 100.0 ms against 200.0 ms of ref."
    )
    assert "fastest" not in text and "less" not in text


@pytest.mark.parametrize("others", [1, 6])
def test_as_many_steps_as_are_asked_for_are_enough(others: int) -> None:
    """Every further comparison makes chance likelier, so that each needs more pairs."""
    names = ["ref", *(f"choice_{place}" for place in range(others))]
    enough = fewest_pairs(others)
    for pairs, begins in ((enough - 1, "Too few steps"), (enough, "ref is fastest")):
        records = {name: timed(name, 0.1 + 0.1 * place, steps=pairs + 1) for place, name in enumerate(names)}
        assert words(records).startswith(begins)
        assert (f"takes {enough}: " in words(records)) == (pairs < enough)


def test_ties_single_choices_and_untimed_runs() -> None:
    tied = words({"ref": timed("ref", 0.1), "b": timed("b", 0.1), "c": timed("c", 0.2)})
    assert tied.startswith("No choice wins: ref and b tie for the lowest") and "All need the same memory" in tied
    assert words({"ref": timed("ref", 0.1)}) == "Only one choice was run, so there is nothing to compare it with."
    none = {name: record(name, 0.1) | {"step_time_s": [0.1, None]} for name in ("ref", "b")}
    assert words(none).startswith("Fewer than two choices have timed steps")


def test_a_fast_choice_that_fails_its_audit_is_suspected() -> None:
    records = {"ref": timed("ref", 0.2), "b": timed("b", 0.1)}
    table = comparison(records, {}, "ref")
    table["audit_failures"] = [0, 2]
    found = verdict(table, standings(records, "b"))
    assert found.belief.startswith("Doubt it: b fails its audit") and not found.is_sure
    table["audit_failures"] = [0, 0]
    assert verdict(table, standings(records, "b")).belief.endswith("and every audit passes.")


def test_what_does_not_compare_is_not_judged() -> None:
    records = {"ref": timed("ref", 0.2), "fast": timed("fast", 0.1)}
    no_winner = "Step times cannot be compared here, so no choice wins."
    text = words(records, affected=["step times"], ref=10, fast=20)
    assert text == f"{no_winner} Least peak memory: 10.0 MiB (ref)."
    assert words(records, affected=["step times"], ref=0.0625, fast=0.03125).endswith("memory: 32.0 KiB (fast).")
    assert words(records, affected=["step times", "memory"]) == no_winner


# Backend classes -----------------------------------------------------------------------------------------------------

NCCL2, LEGACY = {"backend_class": "ProcessGroupNCCL2"}, {"backend_class": "ProcessGroupNCCL"}
SHARED = {"gpu_sharing": "2 ranks a GPU, in turns"}


def over_two_classes(one: dict[str, str] = NCCL2, other: dict[str, str] = LEGACY) -> dict[str, dict[str, Any]]:
    """Over torch's `nccl` the reference takes twice as long as `ours`, over the older class a tenth longer."""
    return {
        "ours": timed("ours", 0.1) | one,
        "pytorch_ddp": timed("pytorch_ddp", 0.2) | one,
        "ours@nccl-legacy": timed("ours", 0.1) | other,
        "pytorch_ddp@nccl-legacy": timed("pytorch_ddp", 0.11) | other,
    }


@each_row("one, other", [(NCCL2, LEGACY), (NCCL2 | SHARED, NCCL2)])
def test_ratios_are_among_runs_over_one_class_that_share_gpus_alike(one: dict[str, str], other: dict[str, str]) -> None:
    table = comparison(over_two_classes(one, other), {}, "pytorch_ddp").set_index("choice")
    assert table["step_time_ratio"].tolist() == [0.5, 1.0, 0.9091, 1.0]
    assert table["paired_ratio"].tolist()[::2] == [0.5, 0.9091]
    assert table["verdict"].tolist() == ["faster", "reference"] * 2
    assert table["backend_class"].tolist() == [one["backend_class"]] * 2 + [other["backend_class"]] * 2
    assert table["gpu_sharing"].isna().tolist() == ["gpu_sharing" not in one] * 2 + [True] * 2


# Fairness ------------------------------------------------------------------------------------------------------------


DIFFERENT = {
    "precision": ({"config": {"precision": "bf16"}}, "precision (fp32: a; bf16: b)"),
    "model": ({"parameters": 2000}, "parameters (1000: a; 2000: b)"),
    "compression": ({"config": {"compress": "int8"}}, "gradient compression (none: a; int8: b)"),
    "paced link": (
        {"config": {"link": "1gbit,50us"}},
        "link (not paced: a; 1gbit,50us, paced: b); train them alike",
    ),
    "scheduling": ({"scheduling": "batch"}, "scheduling (other: a; batch: b)"),
    "torch": ({"versions": {"torch": "2.16"}}, "torch version (2.15: a; 2.16: b)"),
    "backend class": ({"backend_class": "X"}, "backend class (ProcessGroupGloo: a; X: b)"),
    "shared GPU": (SHARED, "(ProcessGroupGloo: a; ProcessGroupGloo, 2 ranks a GPU, in turns: b)"),
    "two": (
        {"world_size": 3, "config": {"precision": "bf16"}},
        "precision (fp32: a; bf16: b), ranks (2: a; 3: b); train them alike, or give --allow-different precision "
        "--allow-different ranks",
    ),
}


@each_row("case", DIFFERENT)
def test_runs_that_differ_stand_in_no_table(case: str) -> None:
    changes, expected = DIFFERENT[case]
    said = {"host": "here", "threads": 1, "versions": {"torch": "2.15", "nccl": "2.30"}}
    first, second = record("a", 1.0) | said, record("b", 1.0) | said
    assert require_comparable({"a": first, "b": second}) == []
    other = {**second, **changes, "config": {**second["config"], **changes.get("config", {})}}
    with pytest.raises(UserError) as caught:
        require_comparable({"a": first, "b": other})
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_nobody_can_allow_different_links() -> None:
    first, second = record("a", 1.0), record("b", 1.0)
    second["config"]["link"] = "1gbit"
    with pytest.raises(UserError, match=r"link \(not paced: a; 1gbit, paced: b\); train them alike$"):
        require_comparable({"a": first, "b": second}, [*FIELDS, "link"])


def test_what_may_differ_is_named_and_says_what_does_not_compare() -> None:
    first, second = record("a", 1.0), record("b", 1.0)
    second["config"]["lr"], second["device_name"] = 0.2, "other"
    with pytest.raises(UserError, match=r"differ in device \(cpu: a; other: b\); .* --allow-different device$"):
        require_comparable({"a": first, "b": second}, ["learning-rate"])
    found = require_comparable({"a": first, "b": second}, ["learning-rate", "device"])
    assert [str(difference) for difference in found] == ["learning rate (0.1: a; 0.2: b)", "device (cpu: a; other: b)"]
    assert affected(found) == ["step times", "losses"] and affected(found[:1]) == ["losses"]


# The page ------------------------------------------------------------------------------------------------------------


def compared(folder: Path, allowed: tuple[str, ...] = (), **changes: Any) -> Compared:
    """Two choices, of which `other` is as fast again; `changes` are to its record."""
    slow = timed("pytorch_ddp", 0.2)
    fast = timed("other", 0.1) | changes
    traced: dict[str, Traced] = {}
    for choice, content in (("pytorch_ddp", slow), ("other", fast)):
        traced[choice] = keep(analysed(folder, choice, content))
    records = {"pytorch_ddp": slow, "other": fast}
    return Compared(records, traced, "pytorch_ddp", ["failed<b>"], require_comparable(records, allowed))


def test_the_page_says_what_the_csv_says(tmp_path: Path) -> None:
    page = write_comparison(compared(tmp_path), tmp_path)
    table = pd.read_csv(tmp_path / "compare.csv")
    left_out = not_shown(page, tmp_path / "compare.csv") - set(table.columns[table.isna().all()])
    assert {name.rsplit("_", 3)[0] for name in left_out} == {
        "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "reduce", "send_recv", "other"
    }  # fmt: skip
    assert not table[sorted(left_out)].to_numpy().any()
    text = page.read_text()
    body = text[text.index("<body>") : text.index("</main>")]
    assert body.count("<details>") == body.count("<h2") == 6
    assert "the runs agree, as far as" in body and "pytorch_ddp, rank 0, step 5; other, rank 0, step 5" in body
    assert "other is fastest, 2.00 times as fast as the reference pytorch_ddp" in body
    assert "by more than 0.0e+00 nats" in body
    assert "failed<b>" not in body and "Warning" not in body


def test_pages_label_what_changes_a_run(tmp_path: Path) -> None:
    assert labels(None) == labels(record("a", 1.0)) == []
    settings = {"compress": "int8", "overlap_optimizer": True, "precision": "bf16-true", "link": "1gbit"}
    changed = {"config": record("a", 1.0)["config"] | settings, "notes": ["2 buckets fit this <link>"]} | SHARED
    text = summary_page(analysed(tmp_path, "other", changed), "other")
    for said in ("Gradients are compressed (int8)", "updated while other buckets", "This is lossy"):
        assert said in text
    assert "2 ranks a GPU, in turns: step times tell about overlap and order, not about as many GPUs" in text
    assert "Every rank had a link of 1gbit" in text and "other: 2 buckets fit this &lt;link&gt;." in text


def test_the_page_warns_of_what_differs_and_of_what_fails_its_audit(tmp_path: Path) -> None:
    wrong = {"device_name": "<i>", "expected_traffic": [{"kind": "all_reduce", "count": 2, "payload_bytes": 4000}]}
    found = compared(tmp_path, ("device",), **wrong)
    text = comparison_page(found)
    body = text[text.index("<body>") : text.index("</main>")]
    assert "These runs differ in more than their choice: device (cpu: pytorch_ddp; &lt;i&gt;: other)" in body
    assert "These figures cannot be compared: step times." in body and "<i>" not in body
    assert "Step times cannot be compared here, so no choice wins." in body and "is fastest" not in body
    assert "Warning: other does not do what its own formula and configuration say: all-reduce: calls" in body
    assert found.table["audit_failures"].tolist()[1] >= 2  # of each rank

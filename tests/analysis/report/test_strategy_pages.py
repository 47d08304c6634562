"""The pages of docs/how-it-works: that none is missing or incomplete, and what is said and drawn of a run."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from ddp_lab.analysis.report.figures.traced_step import TracedStep
from ddp_lab.analysis.report.pages.strategy_page import (
    PICTURE,
    filled,
    problems,
    run_block,
    without_picture,
)
from ddp_lab.analysis.traces.collectives import COLUMNS
from scripts.draw_pages import MESHED, PAGES, hand_written
from tests.tables import each_row
from tests.traces import cpu_trace, event, parsed, record, timeline_of

MIB_BYTES = 2**20


def test_every_hand_written_choice_has_a_whole_page() -> None:
    assert list(hand_written()) == [
        *("simple_ddp", "simple_ddp_ga", "flat_ddp", "simple_ddp_hook", "simple_ddp_async", "bucket_ddp_async"),
        *("zero1", "zero2", "zero3"),
    ]
    assert problems(PAGES, hand_written()) == []
    assert [without_picture(PAGES / f"{page}.md", PICTURE.format(choice=page)) for page in MESHED] == [[]] * len(MESHED)
    index = (PAGES / "README.md").read_text()
    assert all(f"]({choice}.md)" in index for choice in hand_written())


def test_links_lead_somewhere() -> None:
    for page in (*PAGES.glob("*.md"), PAGES.parent / "glossary.md"):
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        assert links, page
        assert [link for link in links if not (page.parent / link).exists()] == [], page


def rewritten(change: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda page: page.write_text(change(page.read_text())) and None


@each_row(
    ("damage", "said"),
    [
        (Path.unlink, "no page"),
        (lambda page: page.with_suffix(".png").unlink(), "no picture"),
        (rewritten(lambda text: text.replace("(zero1.png)", "(zero2.png)")), "no picture"),
        (rewritten(lambda text: filled(text, "")), "no figures"),
        (rewritten(lambda text: text + "\n" * 40), "40 to 80"),
        (rewritten(lambda text: text.replace("## Paper", "## Thanks")), "no paper"),
    ],
)
def test_what_is_missing_is_named(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    for name in ("zero1.md", "zero1.png"):
        shutil.copy(PAGES / name, tmp_path)
    assert problems(tmp_path, ["zero1"]) == []
    damage(tmp_path / "zero1.md")
    (problem,) = problems(tmp_path, ["zero1"])
    assert "zero1.md" in problem and said in problem


def traced_step() -> TracedStep:
    """Step 6 of `cpu_trace`, 1000 to 1999 us, with a forward pass before its backward pass, two layers and two
    gradients; in flight are a reduce-scatter over Gloo and an all-gather that the step before has issued."""
    trace = cpu_trace()
    more = [event("user_annotation", "forward", 1010, 60)]
    for name, ends in {"aten::linear": (1030, 1060), "torch::autograd::AccumulateGrad": (1300, 1700)}.items():
        more += [event("cpu_op", name, end - 10, 10) for end in ends]
    events = [*trace["traceEvents"], *more]
    timeline = timeline_of({**trace, "traceEvents": events})
    calls = [
        ("broadcast", 900, 1100, 2 * MIB_BYTES, 890),
        ("broadcast", 950, 1050, 2 * MIB_BYTES, 891),
        ("scatter", 1400, 1500, 4 * MIB_BYTES, 1390),
        ("scatter", 1450, 1600, 4 * MIB_BYTES, 1391),
    ]
    rows = [
        [kind, start, end, size, "all ranks", 2, "float", "gloo 1", issued] for kind, start, end, size, issued in calls
    ]
    content = record("zero1", 0.1)
    content["config"] |= {"depth": 2, "width": 8}
    content["parameters"] = MIB_BYTES
    content["expected_traffic"] = [
        {
            "kind": "scatter",
            "count": 2,
            "payload_bytes": 8 * MIB_BYTES,
            "wire_bytes": 2 * MIB_BYTES,
            "purpose": "gradients",
        },
        {
            "kind": "broadcast",
            "count": 2,
            "payload_bytes": 4 * MIB_BYTES,
            "wire_bytes": 2 * MIB_BYTES,
            "purpose": "parameters",
        },
        {"kind": "all_gather", "count": 2, "payload_bytes": 64, "wire_bytes": 32, "purpose": "bookkeeping"},
    ]
    memory = content["memory"][0]["timeline"]
    samples = {0.0: "start", 1.0: "layers.0", 3.0: "layers.1", 5.0: "gradient of 1", 6.0: "gradient of 0", 9.0: "end"}
    memory |= {"ms": list(samples), "where": list(samples.values())}
    memory |= {name: values[:1] * len(samples) for name, values in memory.items() if name.endswith("_bytes")}
    timeline = dataclasses.replace(timeline, collectives=pd.DataFrame(rows, columns=COLUMNS))
    return TracedStep(6, timeline, parsed(*events), content)


def test_memory_lies_where_the_traced_step_did_the_same() -> None:
    memory = traced_step().memory().set_index("where")["at"]
    expected = {
        "start": 0,
        "layers.0": 0.03,
        "layers.1": 0.06,
        "gradient of 1": 0.3,
        "gradient of 0": 0.7,
        "end": 0.999,
    }
    assert memory.to_dict() == pytest.approx(expected)


def test_calls_over_gloo_are_shown_as_the_collective_that_they_stand_for() -> None:
    gather, reduction = traced_step().collectives().to_dict("records")
    assert (gather["name"], gather["bytes"], gather["is_of_step"]) == ("all-gather", 4 * MIB_BYTES, False)
    assert (gather["issued"], gather["start"], gather["end"]) == pytest.approx((0, 0, 0.1))
    assert (reduction["name"], reduction["bytes"], reduction["is_of_step"]) == ("reduce-scatter", 4 * MIB_BYTES, True)
    assert (reduction["issued"], reduction["start"], reduction["end"]) == pytest.approx((0.39, 0.4, 0.6))


def test_figures_of_a_run() -> None:
    text = run_block(traced_step(), exposed_ms=0.25)
    assert "P = 1,048,576 parameters, so 4P = 4 MiB" in text
    assert "| gradients, at rest | 4P/N = 20 MiB | 20 MiB |" in text
    assert "| optimizer states, at rest | 8P = 80 MiB | 80 MiB |" in text
    assert "reduce-scatters | 1 call, (N-1)/N x 4 MiB = 2 MiB | 1 call, 2 MiB |" in text
    assert "all-gathers | 1 call, (N-1)/N x 4 MiB = 2 MiB | 0 calls, 0 B |" in text
    assert "| sent in all | 4 MiB = 1 x 4P | 2 MiB = 0.5 x 4P |" in text
    assert "| 25 % of the step's time |" in text

"""The page of a plan."""

import re
from dataclasses import replace

from ddp_lab.planner.report.figures import compute_by_phase
from ddp_lab.planner.report.page import plan_page
from tests.plans import made, simulation


def test_page_says_all_and_loads_the_script_beside_it() -> None:
    page = plan_page(made(simple_ddp=simulation(90, 20, 30), flat_ddp=simulation(100, 10, 20), zero1=None))
    assert "Predicted: " in page and "Take flat_ddp" in page and "this one needs data" in page
    assert all(heading in page for heading in ("Memory over one step: flat_ddp", "One step of each choice"))
    loaded = re.findall(r"<(?:script|link|img)\b[^>]{0,200}\b(?:src|href)=\"(?!data:)([^\"]*)", page)
    assert loaded == ["plotly.min.js"]
    assert "nothing to recommend" in plan_page(made(zero1=None))


def test_compute_by_phase() -> None:
    step = simulation(100, 20, 1)
    assert compute_by_phase(step)["backward"].tolist() == [[0.04, 0.08]]
    outside = replace(step, spans=[replace(step.spans[0], details={"phase": ""})])
    assert compute_by_phase(outside)["other compute"].tolist() == [[0.0, 0.04]]

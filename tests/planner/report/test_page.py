"""The page of a plan, and the other settings on it."""

import re
from dataclasses import replace

import pytest

from planner.costs.links import LinkCosts
from planner.plan import Case, Outcome
from planner.report import variations
from planner.report.figures import compute_by_phase
from planner.report.page import plan_page
from planner.report.variations import what_else
from tests.plans import case, made, simulation


def outcomes(tasks: list[tuple[Case, str]], jobs: int | None = None) -> list[Outcome]:
    """As many milliseconds as the cluster has ranks; zero3 cannot be simulated."""
    steps = [None if choice == "zero3" else simulation(there.cluster.world_size, 0, 1) for there, choice in tasks]
    return [Outcome(choice, step) for (_, choice), step in zip(tasks, steps, strict=True)]


def test_page_says_all_and_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variations, "outcomes", outcomes)
    plan = made(simple_ddp=simulation(90, 20, 30), flat_ddp=simulation(100, 10, 20), zero1=None)
    page = plan_page(plan, what_else(plan, 1e9))
    assert "Predicted: " in page and "Take flat_ddp" in page and "this one needs data" in page
    assert all(heading in page for heading in ("Memory over one step: flat_ddp", "One step of each choice", "What if"))
    assert not re.search(r"<(script|link|img)\b[^>]{0,200}\b(src|href)=\"(?!data:)", page)
    assert "What if" not in plan_page(plan)
    assert "nothing to recommend" in plan_page(made(zero1=None), what_else(made(zero1=None), 1e9))


def test_other_settings_of_those_choices_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recommended one, the fastest (which does not fit), and the one with the smallest peak."""
    monkeypatch.setattr(variations, "outcomes", outcomes)
    steps = {"simple_ddp": (100, 8), "flat_ddp": (90, 30), "bucket_ddp_async": (95, 8), "zero3": (150, 5)}
    plan = made(zero1=simulation(130, 20, 7), **{name: simulation(ms, 20, gib) for name, (ms, gib) in steps.items()})
    frame = what_else(plan, 1e9)
    assert set(frame.choice) == {"bucket_ddp_async", "flat_ddp", "zero3"}
    of_flat = frame[frame.choice == "flat_ddp"].set_index("setting").step_time_ms
    assert of_flat["as planned"] == pytest.approx(90) and of_flat["4 ranks"] == pytest.approx(4)
    assert (frame[(frame.choice == "zero3") & (frame.setting != "as planned")].fits == "unknown").all()
    assert set(what_else(plan, 0.0).setting) == {"as planned"}, "time is up"


@pytest.mark.parametrize(
    ("gpus", "batch", "samples", "ranks"),
    [
        ("2xL4", 8, {1, 4}, {1, 4}),
        ("2xL4", 4, {2}, {1, 4}),
        ("3x8xH100", 48, {2}, {48}),
        ("4x8xH100", 64, {2}, {16, 64}),
    ],
)
def test_settings_that_differ_in_one_respect(gpus: str, batch: int, samples: set[int], ranks: set[int]) -> None:
    planned = case(gpus, batch)
    found = dict(variations.variations(planned))
    names = {f"micro-batches of {size} samples" for size in samples} | {f"{number} ranks" for number in ranks}
    assert set(found) == names | {"links of 0.5 times the rate", "links of 2 times the rate"}
    for name, there in found.items():
        assert there.cluster == planned.cluster or there.costs.collectives == LinkCosts(there.cluster)
        assert there.micro_batch_size == (int(name.split()[2]) if "samples" in name else planned.micro_batch_size)
        assert there.cluster.world_size == (int(name.split()[0]) if "ranks" in name else planned.cluster.world_size)
        factor = there.cluster.inside.bytes_per_s / planned.cluster.inside.bytes_per_s
        assert factor == (float(name.split()[2]) if "rate" in name else 1.0)


def test_compute_by_phase() -> None:
    step = simulation(100, 20, 1)
    assert compute_by_phase(step)["backward"].tolist() == [[0.04, 0.08]]
    outside = replace(step, spans=[replace(step.spans[0], details={"phase": ""})])
    assert compute_by_phase(outside)["other compute"].tolist() == [[0.0, 0.04]]

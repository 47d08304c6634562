"""Other settings than the planned one for the page: in each, one thing is half or twice of what is planned."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from analysis.columns import Column
from planner.costs.cluster import Link
from planner.costs.links import LinkCosts
from planner.plan import Case, Plan, outcomes, row
from planner.report.columns import PLAN_COLUMNS
from planner.report.recommendation import contenders

COLUMNS = {"setting": Column("setting", "", "what differs from the plan")} | {
    name: PLAN_COLUMNS[name]
    for name in ("choice", "fits", "step_time_ms", "samples_per_second", "exposed_ms", "peak_bytes", "spare_bytes")
}


def what_else(plan: Plan, budget_s: float, jobs: int | None = None) -> pd.DataFrame:
    """A row for each setting and each of the recommended choice, the fastest, and the one with the smallest peak.
    Columns: `COLUMNS`. Empty if no choice can be simulated.

    Args:
        budget_s: In seconds. When it is over, the setting that has begun is finished, and others are left out.
        jobs: As for `planner.plan.outcomes`.
    """
    began, choices = time.perf_counter(), contenders(plan.rows)
    rows = [{"setting": "as planned", **of_choice} for of_choice in plan.rows if of_choice["choice"] in choices]
    for setting, case in variations(plan.case):
        if time.perf_counter() - began >= budget_s or not choices:
            break
        found = outcomes([(case, name) for name in choices], jobs)
        rows += [{"setting": setting, **row(outcome, case)} for outcome in found]
    frame = pd.DataFrame(rows)
    return frame[[name for name in COLUMNS if name in frame]]


def variations(case: Case) -> Iterator[tuple[str, Case]]:
    """Settings that differ from `case` in one respect, each with what differs."""
    cluster, samples = case.cluster, case.micro_batch_size
    for up, down in ((1, 2), (2, 1)):
        factor = up / down
        faster = replace(
            cluster,
            inside=scaled(cluster.inside, factor),
            between=cluster.between and scaled(cluster.between, factor),
        )
        costs = replace(case.costs, collectives=LinkCosts(faster))
        yield f"links of {factor:g} times the rate", replace(case, cluster=faster, costs=costs)
        if samples * up % down == 0:
            batch = case.config.global_batch_size * up // down
            config = replace(case.config, global_batch_size=batch)
            yield f"micro-batches of {samples * up // down} samples", replace(case, config=config)
        resized = None
        if cluster.nodes > 1 and cluster.nodes * up % down == 0:
            resized = replace(cluster, nodes=cluster.nodes * up // down)
        elif cluster.nodes == 1 and cluster.ranks_per_node * up % down == 0:
            resized = replace(cluster, ranks_per_node=cluster.ranks_per_node * up // down)
        if resized:
            config = replace(case.config, global_batch_size=case.config.global_batch_size * up // down)
            costs = replace(case.costs, collectives=LinkCosts(resized))
            yield f"{resized.world_size} ranks", replace(case, cluster=resized, config=config, costs=costs)


def scaled(link: Link, factor: float) -> Link:
    return replace(link, bytes_per_s=link.bytes_per_s * factor)

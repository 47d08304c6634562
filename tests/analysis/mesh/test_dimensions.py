"""The dimension of a process group, and figures by dimension, worked out by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_lab.analysis.mesh import coordinates, dimension_of, in_order, mesh_of
from ddp_lab.analysis.metrics.audit import audit
from ddp_lab.analysis.metrics.dimensions import dimensions
from ddp_lab.analysis.metrics.exposure import exposure
from ddp_lab.analysis.metrics.stragglers import stragglers
from ddp_lab.analysis.record import checked
from ddp_lab.analysis.traces.collectives import ranks_of, shown
from ddp_lab.collectives.ranks import Ranks
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import DATA_DIMENSIONS, Mesh
from ddp_lab.strategy.account import EVERYONE, Collective
from ddp_lab.strategy.groups import on_mesh
from tests.analysis.metrics.test_exposure import timeline
from tests.tables import each_row
from tests.traces import record_of_eight_steps

MESHES = ("dp=2,tp=2", "dp=4", "tp=4", "dp=1,tp=2", "replicate=2,shard=2", "replicate=2,shard=3,tp=2", "dp=3,tp=1")
SQUARE = {"dp": 2, "tp": 2}


def of_text(text):
    mesh = mesh_of({"config": {"mesh": text}})
    assert mesh is not None
    return mesh


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40, unique=True).map(sorted), st.integers(0, 2))
def test_ranks_are_read_from_the_name_of_a_mark(ranks, alike):
    name = f"ranks {Ranks(ranks)}" + (f" ({alike + 1})" if alike else "")
    assert ranks_of(name, 1000) == tuple(ranks) and shown(name, 1000) == name
    assert ranks_of(f"ranks {str(ranks).strip('[]')}, group 7", 1000) == tuple(ranks)


def test_names_of_groups():
    assert shown("ranks 0-3 (2)", 4) == "all ranks (2)" and shown("ranks 0, 1, group 5", 2) == "all ranks, group 5"
    assert ranks_of("all ranks (2)", 3) == (0, 1, 2)
    for unknown in ("", "group 3", "ranks ", "ranks 0-99999999999", "ranks 0, 1, ..., 63, group 0", "ranks 1-x"):
        assert ranks_of(unknown, 4) == ()


@each_row("text", MESHES)
def test_coordinates_and_dimensions_agree_with_those_of_training(text):
    parsed, mesh = Mesh.parse(text), of_text(text)
    assert [coordinates(mesh, rank) for rank in range(parsed.size)] == [
        parsed.coordinates(rank) for rank in range(parsed.size)
    ]
    data = [rank for rank in range(parsed.size) if rank % parsed.model_size == 0]
    groups = {"": data, "tp": range(parsed.model_size), EVERYONE: range(parsed.size)}
    for dimension, ranks in groups.items():
        (announced,) = on_mesh([Collective("all_reduce", 1, 4, len(ranks), "gradients", dimension)], parsed)
        if len(ranks) > 1 or dimension == "":
            assert dimension_of(mesh, list(ranks)) == announced.dimension
    (nowhere,) = on_mesh([Collective("all_reduce", 1, 4, 2, "gradients", EVERYONE)], None)
    assert nowhere.dimension == ""


def test_dimensions_of_groups():
    mesh = of_text("replicate=2,shard=2,tp=4")
    expected = {
        (0, 1, 2, 3): "tp",
        (6, 7): "tp",  # a part of the four
        (1, 5): "shard",
        (2, 10): "replicate",
        (3, 7, 11, 15): "dp",
        tuple(range(16)): "mesh",
        tuple(range(8)): "",
        (): "",
    }
    assert {ranks: dimension_of(mesh, ranks) for ranks in expected} == expected
    assert in_order(mesh, ["", "mesh", "tp", "dp", "tp", "shard"]) == ["shard", "tp", "dp", "mesh", ""]
    assert mesh_of(None) is None and mesh_of({"config": {}}) is None
    of_two = record_of_eight_steps("x", 1.0)
    for text in ("dp", "dp=3"):
        with pytest.raises(UserError, match=r"config\.mesh: "):
            checked(of_two | {"config": of_two["config"] | {"mesh": text}}, "r")
    assert set(DATA_DIMENSIONS) == {"dp", "replicate", "shard", "ep"}


DP, TP = "ranks 0,2", "ranks 0,1"


def test_exposed_time_by_dimension():
    """Compute until 40. dp from 30 to 70, tp from 60 to 90: exposed 50 in all, of which 10 are of both."""
    calls = [("all_reduce", 8, 30, 70, DP, 2), ("all_reduce", 16, 60, 90, TP, 2)]
    tables = exposure([timeline(0, [(0, 100)], [(0, 40)], calls, world_size=4)], False, SQUARE)
    table = tables.dimensions.set_index("dimension")
    assert table.index.tolist() == ["dp", "tp"]
    assert table["exposed_ms"].tolist() == [0.03, 0.02] and table["exposed_while_ms"].tolist() == [0.03, 0.03]
    assert table["running_ms"].tolist() == [0.04, 0.03] and table["bytes"].tolist() == [8, 16]
    assert table["exposed_ms"].sum() == pytest.approx(tables.steps["exposed_ms"].sum())
    assert tables.collectives["dimension"].tolist() == ["dp", "tp"]


def test_a_message_that_is_posted_ahead_counts_where_it_is_waited_for_or_alone(monkeypatch):
    """From 10 to 90 it is on its way, and awaited from 50. tp runs from 40 to 60; compute until 30."""
    calls = [("send_recv", 8, 10, 90, "ranks 0,2", 2), ("all_reduce", 16, 40, 60, TP, 2)]
    monkeypatch.setattr("ddp_lab.analysis.metrics.exposure.message_waits", lambda _: np.array([[50.0, 90.0]]))
    tables = exposure([timeline(0, [(0, 100)], [(0, 30)], calls, world_size=4)], False, {"pp": 2, "tp": 2})
    assert tables.dimensions.set_index("dimension")["exposed_ms"].to_dict() == {"pp": 0.05, "tp": 0.01}


def on_square(start):
    """Timelines of ranks of `SQUARE`. Each starts an all-reduce over tp at `start[rank]`, and one over dp at 60."""
    timelines = []
    for rank, at in start.items():
        tp, dp = f"ranks {rank // 2 * 2},{rank // 2 * 2 + 1}", f"ranks {rank % 2},{rank % 2 + 2}"
        calls = [("all_reduce", 8, at, 50, tp, 2), ("all_reduce", 16, 60, 70, dp, 2)]
        timelines.append(timeline(rank, [(0, 100)], [(0, 5)], calls, world_size=4))
    return timelines


def test_the_audit_tells_dimensions_apart():
    """Two ranks of four on a mesh. A payload on the wrong dimension is right by kind alone."""
    square = [replace(timeline, steps=timeline.steps.assign(number=5)) for timeline in on_square({0: 10, 1: 10})]
    run = record_of_eight_steps("x", 0.1)
    run["config"]["mesh"] = "dp=2,tp=2"
    part = {"kind": "all_reduce", "count": 1, "group_size": 2, "purpose": "gradients"}
    right = [{**part, "payload_bytes": 8, "dimension": "tp"}, {**part, "payload_bytes": 16, "dimension": "dp"}]
    swapped = [{**part, "payload_bytes": 16, "dimension": "tp"}, {**part, "payload_bytes": 8, "dimension": "dp"}]

    def failing(traffic, timelines):
        table = audit(timelines, {**run, "expected_traffic": traffic})
        table = table[table["unit"].str.endswith("/step")]
        assert len(table)
        return set(table.loc[table["result"] != "pass", "subject"])

    assert failing(right, square) == set()
    assert failing(swapped, square) == {"dp all-reduce: payload", "tp all-reduce: payload"}
    assert failing([{**part, "rank": rank} for part in right for rank in range(2)], square) == set()
    assert failing([{**part, "rank": 0} for part in right], square) == set(), "nothing is known of rank 1"
    assert failing([{**part, "rank": int(part in swapped[:1])} for part in [*right, *swapped]], square)
    unmarked = [replace(timeline, collectives=timeline.collectives.assign(group="")) for timeline in square]
    assert failing(swapped, unmarked) == set()  # the trace does not say: by kind, as without a mesh
    assert dimensions(pd.Series(["", "ranks 0,3"]), SQUARE).tolist() == ["", ""]


def test_stages_of_a_pipeline_are_no_stragglers():
    """Rank 1 is 10 late for rank 0, with which it shares layers, or a pipeline. Over dp nobody is late."""
    timelines = on_square({0: 10, 1: 20, 2: 10, 3: 10})
    for mesh, counted, late in ((SQUARE, 2, 0.01), ({"dp": 2, "pp": 2}, 1, 0)):
        table = stragglers(exposure(timelines, True, mesh)).set_index("rank")
        assert table["collectives"].eq(counted).all() and table.loc[1, "lateness_ms"] == pytest.approx(late)

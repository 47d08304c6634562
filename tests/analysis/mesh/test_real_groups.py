"""Real ranks on a mesh: traces say in which group each collective ran, and a run's audit passes by dimension."""

import tempfile
from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from ddp_lab.analysis.report.pages.summary import write_summary
from ddp_lab.analysis.traces.collectives import only_group
from ddp_lab.analysis.traces.gloo import gloo_collectives
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext, meshed
from ddp_lab.runtime.link.group import paced_groups
from ddp_lab.runtime.link.speed import SimulatedLink
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.runtime.run import train_and_record
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.sequence import recorded_collectives
from tensor_parallel import REGISTRY
from tests.analysis.windows import analysis_of
from tests.ranks import RankPool
from tests.runtime.checkpoint.test_mesh_runs import small_language

SIZES, ALIKE = (10, 20, 30), 10
"""Elements of a rank's share in each group, and of the all-reduces, which are alike in all."""


def issued(paced: bool) -> tuple[list[tuple[str, str, float]], str]:
    """Group, kind and bytes of collectives over dp, tp and all ranks, several under way at once; and `only_group`."""
    with tempfile.TemporaryDirectory() as folder, paced_groups(SimulatedLink(10**9, 1e-5) if paced else None):
        with (
            recorded_collectives(FlightRecorder.create(dist.get_rank())),
            mesh_groups(Mesh.parse("dp=2,tp=2"), "cpu") as groups,
        ):
            dist.barrier()
            with profile(
                activities=[ProfilerActivity.CPU],
                record_shapes=True,
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            ) as profiler:
                works = []
                for size, group in zip(SIZES, (groups.data, groups.model, groups.everyone), strict=True):
                    ranks = dist.get_world_size(group)
                    full, shard = torch.ones(ranks * size), torch.ones(size)
                    works += [
                        dist.all_reduce(torch.ones(ALIKE), group=group, async_op=True),
                        dist.reduce_scatter_tensor(shard, full, group=group, async_op=True),
                        dist.all_gather_into_tensor(torch.empty(ranks * size), shard, group=group, async_op=True),
                    ]
                for work in works:
                    work.wait()
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            works.clear()
        trace = read_trace(path)
        unmarked = only_group(trace.info)
        calls = gloo_collectives(trace.events, 4, unmarked)[0]
    assert (calls["end"] >= calls["start"]).all() and (calls["start"] >= calls["issued"]).all()
    return list(zip(calls["group"], calls["kind"], calls["bytes"], strict=True)), unmarked


@pytest.mark.parametrize("paced", [False, True])
def test_each_call_is_of_its_group(ranks: RankPool, paced):
    for rank, (calls, unmarked) in enumerate(ranks.run(4, issued, paced)):
        data, model = f"ranks {rank % 2},{rank % 2 + 2}, dp", f"ranks {rank // 2 * 2},{rank // 2 * 2 + 1}, tp"
        assert unmarked == ""
        assert calls == [
            (group, kind, 4 * (ALIKE if kind == "all_reduce" else size * share))
            for share, (group, size) in zip(SIZES, ((data, 2), (model, 2), ("all ranks", 4)), strict=True)
            for kind in ("all_reduce", "reduce_scatter", "all_gather")
        ]


def train_on_mesh(folder: str, mesh: str, choice: str, **changes):
    settings = {"train_samples": 40, "eval_samples": 8, "global_batch_size": 8}
    settings |= {"sequence_length": 8, "profile_wait": 1, "profile_repeat": 1, "mesh": mesh, "choice": choice}
    rank = dist.get_rank()
    here = RankContext(rank, dist.get_world_size(), torch.device("cpu"), "gloo")
    config = RunConfig.of(**(settings | changes), output_dir=folder)  # type: ignore[arg-type]
    with recorded_collectives(FlightRecorder.create(rank)), meshed(here, mesh) as ranks:
        train_and_record(config, ranks, REGISTRY.load, None, REGISTRY.load_parallelize)


@pytest.mark.parametrize(
    ("choice", "mesh", "expected"),
    [
        pytest.param("zero2", "dp=2,tp=2", {"dp", "tp", "mesh"}, marks=pytest.mark.slow),
        pytest.param("simple_ddp", "dp=2,tp=2", {"dp", "tp", "mesh"}, marks=pytest.mark.exhaustive),
        pytest.param("zero1", "replicate=2,shard=2", {"replicate", "shard", "dp"}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_on_a_mesh_does_what_it_says_in_each_dimension(ranks: RankPool, tmp_path, choice, mesh, expected):
    ranks.run(4, partial(train_on_mesh, **small_language(tmp_path)), str(tmp_path), mesh, choice)
    analysis = analysis_of(tmp_path / "profile" / f"{choice}@{Mesh.parse(mesh).label}")
    page = write_summary(analysis, choice, tmp_path / "reports").read_text()
    traffic = analysis.audit[analysis.audit["unit"].str.endswith("/step")]
    assert set(traffic["result"]) == {"pass"}, traffic[traffic["result"] != "pass"].to_string()
    assert {subject.split()[0] for subject in traffic["subject"]} == {*expected, "sent"}
    dimensions = pd.read_csv(tmp_path / "reports" / "dimensions.csv")
    assert set(dimensions["dimension"]) == expected and set(dimensions["rank"]) == set(range(4))
    place = ["rank", "step"]
    parts = dimensions.groupby(place)["exposed_ms"].sum().to_numpy()
    assert parts == pytest.approx(analysis.exposure.steps.set_index(place).sort_index()["exposed_ms"].to_numpy())
    assert analysis.exposure.collectives["wait_ms"].notna().all()
    assert "Dimensions of the mesh" in page and f"{min(expected)} collectives" in page

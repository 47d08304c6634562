"""Plans on meshes: which there are, which are left out and why, and the command as a user runs it."""

from dataclasses import replace

import pandas as pd
import pytest

from ddp_lab.planner import command as script
from ddp_lab.planner import models
from ddp_lab.planner.costs import hardware
from ddp_lab.planner.outcome import outcome
from ddp_lab.planner.search import Search
from ddp_lab.planner.space import WITH_DIMENSION, Space, all_meshes, filled, on_all_meshes, required
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import CONTEXT
from tests.in_process import run_in_process
from tests.plans import case
from tests.tables import each_row

PLAIN = {name: RunConfig().as_dict()[name] for names in WITH_DIMENSION.values() for name in names}
TINY = ["--d-model", "64", "--d-ff", "96", "--layers", "1", "--vocab", "50", "--sequence-length", "16"]


@each_row(
    ("gpus", "meshes"),
    [
        ("1xL4", ["dp=1"]),
        ("4xL4", ["dp=4", "dp=2,tp=2", "tp=4", "dp=2,pp=2", "pp=2,tp=2", "pp=4"]),
        (
            "2x4xL4",
            [
                *("dp=8", "replicate=2,shard=4", "dp=4,tp=2", "replicate=2,shard=2,tp=2", "dp=2,tp=4"),
                *("dp=4,pp=2", "replicate=2,shard=2,pp=2", "dp=2,pp=2,tp=2", "pp=2,tp=4", "dp=2,pp=4", "pp=4,tp=2"),
                "pp=8",
            ],
        ),
        ("2x1xL4", ["dp=2", "pp=2"]),
        ("2x3xL4", ["dp=6", "replicate=2,shard=3", "dp=2,tp=3", "pp=2,tp=3", "dp=2,pp=3", "pp=6"]),
    ],
)
def test_meshes_of_a_cluster(gpus, meshes):
    cluster = hardware.cluster(gpus, "pcie4", "ndr" if gpus.count("x") > 1 else None)
    planned = list(all_meshes(cluster))
    with_context = list(all_meshes(cluster, [CONTEXT]))[len(planned) :]
    assert [mesh.degrees[CONTEXT] for mesh in with_context] == [
        size for size in (2, 3, 4) if cluster.ranks_per_node % size == 0
    ]
    assert [str(mesh) for mesh in planned] == meshes
    for mesh in planned:
        mesh.require_ranks(cluster.world_size, cluster.ranks_per_node)


def test_a_mixture_has_meshes_of_its_own():
    """Eight experts, and four heads. What only tp cuts has no plan, but with ep it has."""
    large = replace(case("2x4xL4", batch=16), model=models.find("sample-moe"))
    fitting, left_out = on_all_meshes(large, PLAIN)
    meshes = [str(point.mesh) for point in fitting]
    assert meshes[-2:] == ["dp=4,ep=2", "dp=2,ep=4"] and "dp=8" in meshes and "ep=" not in "".join(meshes[:-2])
    assert any(line.startswith("dp=4,tp=2: --mesh with tp: sample-moe is a mixtral") for line in left_out)
    combined = replace(large, config=large.config.but(mesh="dp=2,ep=2,tp=2"))
    assert required(combined) is combined
    with pytest.raises(UserError, match="has 8 experts; take an ep that divides them"):
        required(replace(case("3xL4", batch=6), model=large.model, config=combined.config.but(mesh="ep=3")))


def test_meshes_that_do_not_fit_are_left_out_with_the_reason():
    """SmolLM2-135M has 9 heads; 8 samples are 2 micro-batches of 1 on each of 4 ranks, but not on each of 8."""
    fitting, left_out = on_all_meshes(case("4xL4"), PLAIN)
    assert [str(point.mesh) for point in fitting] == ["dp=4", "dp=2,pp=2", "pp=4"] and fitting[0].micro_batch_size == 1
    assert len(left_out) == 3 and left_out[1].startswith("tp=4: ")
    assert left_out[1].endswith("has 9 heads and 3 of keys and values, which 4 ranks of tp cannot share")
    large = replace(case("8xL4"), model=models.from_sizes(64, 96, 2, 8, 2, 50))
    settings = PLAIN | {"sequence_parallel": True, "pipeline_schedule": "gpipe"}
    fitting, left_out = on_all_meshes(large, settings)
    assert [
        (str(point.mesh), point.micro_batch_size, point.config.sequence_parallel, point.config.pipeline_schedule)
        for point in fitting
    ] == [
        ("dp=4,tp=2", 1, True, "1f1b"),
        ("dp=2,tp=4", 2, True, "1f1b"),
        ("tp=8", 4, True, "1f1b"),
        ("dp=4,pp=2", 1, False, "gpipe"),
        ("dp=2,pp=2,tp=2", 2, True, "gpipe"),
        ("pp=2,tp=4", 4, True, "gpipe"),
    ]
    assert left_out[0].startswith("dp=8: --global-batch-size 8 does not divide") and len(left_out) == 4
    assert left_out[-1] == "pp=8: --mesh with pp: 2 blocks cannot be cut into 8 stages; take fewer"
    with pytest.raises(UserError, match="--mesh auto: no mesh fits; dp=8: --global-batch-size 8"):
        on_all_meshes(replace(large, model=models.from_sizes(64, 96, 1, 1, 1, 50)), PLAIN)


@pytest.mark.parametrize("gpus", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_what_is_said_of_a_pipeline_that_is_not_simulated_holds_for_it(gpus):
    """Its step takes at least as long as its bound, and is not the fastest."""
    few = replace(case(f"{gpus}xL4", batch=gpus, grad_accum_steps=1), sequence_length=2048)
    root = replace(few, model=models.from_sizes(256, 1024, 2, 2, 2, 50))
    space = Space([filled(point) for point in on_all_meshes(root, PLAIN)[0]], ("zero1",), any_mesh=True)
    search = Search(space)
    outcomes = list(search.run(lambda cases: map(outcome, cases), 1))
    names = [result.case.name for result in outcomes]
    pipelines = [point for point in space.roots() if point.config.has_stages and point.name not in names]
    assert pipelines and len(search.left_out) == len(pipelines)
    for point in pipelines:
        assert search.best and outcome(point).step_s >= search.least_s(point) > search.best.step_s, point.mesh


@each_row(("layers", "left_out"), [(4, ""), (8, "simple_ddp@dp4: "), (40, "simple_ddp@dp4: ")])
def test_what_cannot_fit_is_left_out(layers, left_out):
    """Layers of 0.2 billion parameters. With 40 layers nothing fits, and the leanest choice is kept."""
    few = replace(case("4xL4", batch=64), model=models.from_sizes(4096, 11008, layers, 1, 1, 50))
    space = Space(on_all_meshes(few, PLAIN)[0][:1], ("simple_ddp", "zero3"), any_mesh=True)
    search = Search(space)
    fitting = search.that_may_fit(list(space.roots()))
    assert len(fitting) == 2 - bool(left_out) and search.left_out.get("states", "").startswith(left_out)


@each_row(("choice", "micro_batches"), [("zero1", 4), ("simple_ddp", 1)])
def test_pipelines_are_left_out_where_less_than_their_bound_can_be_used(choice, micro_batches):
    """The bound follows from the plan of a mesh without pipelines, and is not above what a pipeline holds."""
    few = replace(case(batch=16, grad_accum_steps=micro_batches, precision="bf16"), sequence_length=1024)
    few = replace(few, model=replace(models.from_sizes(512, 1024, 2, 1, 1, 2000), task="causal-lm"))
    space = Space(on_all_meshes(few, PLAIN)[0], (choice,), any_mesh=True)
    flat, pipeline = space.roots()
    search = Search(space)
    search.learn(outcome(flat))
    peak, least = outcome(pipeline).peak_bytes, search.least_peak(pipeline)
    assert 0.4 * peak < least <= peak
    for usable, is_needless in ((peak, False), (least - 1, True)):
        device = replace(few.cluster.device, memory_bytes=int(usable + pipeline.outside_bytes))
        smaller = replace(pipeline, cluster=replace(few.cluster, device=device))
        assert search.is_needless(smaller, 0.0) is is_needless
    search.leave_out(smaller, 0.0)
    assert search.left_out["room"].startswith(f"{choice}@pp2: states and activations are at least")


def test_zero1_moves_gradients_of_a_pipeline_into_buckets_as_they_come():
    """Parameters and gradients of 2 bytes: no sum of all gradients is beside that of the fp32 bucket."""
    few = case("4xL4", batch=16, choice="zero1", mesh="dp=2,pp=2", grad_accum_steps=4, param_dtype="bf16")
    model = replace(models.from_sizes(2048, 8192, 4, 4, 4, 1000), task="causal-lm")
    assert outcome(replace(few, model=model)).simulated.memory.at_peak["gradients"] < 5 * model.elements() / 2


def test_plan_of_all_meshes(tmp_path):
    """A rank of dp=4 holds more of the model than one of dp=2,tp=2. The table and the reasons name meshes."""
    files = ["--csv", str(tmp_path / "plan.csv"), "--jobs", "1"]
    flags = ["--heads", "2", "--choices", "zero1,pytorch_tp", "--mesh", "auto", "--sequence-parallel"]
    answer = run_in_process(script, *TINY, "--gpus", "4xL4", "--link", "pcie4", *flags, *files)
    assert answer.returncode == 0, answer.stderr
    table = pd.read_csv(tmp_path / "plan.csv")
    assert table.mesh.tolist() == ["dp=4", "dp=2,tp=2", "dp=2,tp=2"] and list(table.columns)[1] == "mesh"
    assert table.choice.tolist() == ["zero1", "zero1", "pytorch_tp"] and table.fits.tolist() == [
        "yes",
        "yes",
        "unknown",
    ]
    assert table.entrypoint.tolist() == ["main_shard.py", "main_parallel.py", "main_parallel.py"]
    assert table.peak_parameters_bytes[1] < 0.6 * table.peak_parameters_bytes[0]
    assert "Left out: tp=4: Llama of 1 layers" in answer.stdout and "pytorch_tp@dp2-tp2: " in answer.stdout


@pytest.mark.slow
def test_a_pipeline_is_found_where_nothing_else_fits():
    """Replicas of 1.9 billion parameters do not fit, and one head cannot be cut."""
    sizes = ["--d-model", "8192", "--d-ff", "28672", "--layers", "2", "--heads", "1", "--vocab", "50"]
    where = ["--gpus", "2xL4", "--link", "pcie4", "--choices", "simple_ddp", "--mesh", "auto", "--jobs", "1"]
    how = ["--sequence-length", "64", "--global-batch-size", "8", "--pipeline-schedule", "zb-h1"]
    answer = run_in_process(script, *sizes, *where, *how)
    assert answer.returncode == 0, answer.stderr
    assert "Take simple_ddp@pp2: " in answer.stdout
    assert "simple_ddp@pp2: rank 0 of the pipeline holds most" in answer.stdout
    assert "Left out: simple_ddp@dp2: parameters, gradients" in answer.stdout

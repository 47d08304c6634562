"""Every choice against training in one process, on every backend: four steps of Adam in fp32 without TF32."""

import pytest

from tests.parity import IN_OWN_LOOPS, Case, check

pytestmark = pytest.mark.gpu

BACKENDS = ("nccl", "nccl-legacy")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
IN_PARTS = {
    **{f"tp in stages, {schedule}": ("tp", "pp=2", "deep", {"pipeline_schedule": schedule}) for schedule in SCHEDULES},
    "zero3 in stages": ("zero3", "pp=2", "deep", {"pipeline_schedule": "1f1b"}),
    "tp": ("tp", "tp=2", "deep", {}),
    "context parallelism": ("tp", "cp=2", "lm, long", {}),
    "expert parallelism": ("zero1", "ep=2", "lm, mixtral", {}),
}
"""By name: choice, what cuts the model in two, model, and settings."""


def case_of(name: str, ranks: int) -> Case:
    """Of a choice, or of `IN_PARTS`."""
    if name not in IN_PARTS:
        split = [[[3]] * ranks] * 4
        return Case(name, "llama", f"dp={ranks}", {"bucket_cap_mb": 0.01}, split, "fused", counted=False)
    choice, cut, model, options = IN_PARTS[name]
    if cut == "pp=2":
        options = {**options, "stages_per_rank": 2 if options["pipeline_schedule"] == "interleaved" else 1}
    mesh = cut if ranks == 2 else f"dp={ranks // 2},{cut}"
    optimizer = "fused" if cut == "pp=2" else "sgd"
    return Case(choice, model, mesh, options, [[[2, 1]] * ranks] * 4, optimizer, counted=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*IN_OWN_LOOPS, *IN_PARTS])
def test_parity(place, pools, name, backend):
    if not place.has_gpus:
        if backend != "nccl":
            pytest.skip("a CPU has Gloo alone")
        backend = "gloo"
    if name in IN_PARTS and (place.ranks % 2 or (place.ranks > 2 and place.shares_gpu)):
        pytest.skip("an even number of ranks, each with a GPU, or two that share one")
    check(pools(backend), case_of(name, place.ranks), place.folder)
    place.rows.append({"choice": name, "backend": backend, "": "as one process computes it"})

"""The arithmetic of meshes."""

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Shard

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import TENSOR, Mesh, mesh_groups
from tensor_parallel.plan import Column, Row, read_plan
from tests.ranks import RankPool

degrees = st.fixed_dictionaries({"dp": st.integers(1, 5), "tp": st.integers(1, 4)})


@given(degrees)
def test_ranks_and_coordinates(given_degrees):
    mesh = Mesh({name: given_degrees[name] for name in ("dp", "tp")})
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size == mesh.data_size * mesh.model_size
    assert places == sorted(places), "the innermost dimension runs fastest"
    assert [mesh.data_rank(rank) for rank in range(mesh.size)] == [place[0] for place in places]
    assert Mesh.parse(str(mesh)) == mesh
    for order in permutations(mesh.degrees.items()):
        parsed = Mesh.parse(",".join(f"{name}={degree}" for name, degree in order))
        assert list(parsed.degrees.items()) == list(mesh.degrees.items())


def test_a_mesh_must_fit_the_ranks():
    mesh = Mesh.parse("dp=2,tp=4")
    mesh.require_ranks(8, 4)
    with pytest.raises(UserError, match="2 x 4 = 8 ranks, and the job has 6; change a degree, or start 8 ranks"):
        mesh.require_ranks(6, 6)
    with pytest.raises(UserError, match="the 4 ranks of tp, the innermost dimension, do not stay within nodes of 2"):
        mesh.require_ranks(8, 2)


def test_plans_from_files(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('"layers.*.wq" = { style = "column", heads = 8 }\n"layers.*.wo" = "row"\n')
    assert read_plan(path) == {"layers.*.wq": Column(heads=8), "layers.*.wo": Row()}
    for content, expected in (
        ('"a" = "diagonal"', "style must be one of column, row"),
        ('"a" = { style = "row", parts = 3 }', "row has no parts"),
        ('"a" = { style = "column", heads = "8" }', "Expected `int"),
        ("a", "not a TOML file"),
    ):
        path.write_text(content)
        with pytest.raises(UserError, match=expected):
            read_plan(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_plan(tmp_path / "none.toml")


def of_two_meshes() -> list[list[float]]:
    """Each with a `DTensor`, and an operator on it whose answer torch keeps."""
    tensors = []
    for _ in range(2):
        with mesh_groups(Mesh.parse("dp=2,tp=2"), "cpu") as groups:
            part = DTensor.from_local(torch.ones(1, device="cpu"), groups.device_mesh[TENSOR], [Shard(0)])
            tensors.append((part + 1).full_tensor().tolist())
    return tensors


def test_a_later_mesh_has_groups_of_its_own(ranks: RankPool):
    assert ranks.run(4, of_two_meshes) == [[[2.0, 2.0], [2.0, 2.0]]] * 4

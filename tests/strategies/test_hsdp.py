"""Hybrid sharding: model states are sharded over a part of the ranks, and replicated over the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ddp_lab.runtime.checkpoint.state import tensors_to_save
from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.strategy.accounting import ModelSize
from tests.models import build, make_batch
from tests.parity import (
    OPTIMIZERS,
    TOLERANCE,
    Choice,
    assert_parity,
    build_and_step,
    global_batch,
    gone_on,
    is_refused,
    load,
    message_of,
    one_step,
    options_of,
    oracle,
    saved_halfway,
    train_on_rank,
)
from tests.ranks import RankPool
from tests.tables import by_default
from tests.traffic import Totals, announced, counted

CHOICES = [("sharding", name) for name in ("zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3")]
for_each_choice = pytest.mark.parametrize("choice", CHOICES, ids="-".join)
FOUR, WIDE, TALL = "replicate=2,shard=2", "replicate=2,shard=3", "replicate=3,shard=2"
UNEVEN = {4: [[2, 1], [3], [1], [1, 1, 2]], 6: [[1], [2, 1], [1], [3, 1], [1, 1], [2]]}
"""Micro-batch sizes by rank, by world size."""
Function = Callable[..., Any]


def meshed(mesh: str, function: Function, options: dict[str, Any], *arguments: Any) -> Any:
    """`function(options, *arguments)` with the groups of `mesh` among the options."""
    with mesh_groups(Mesh.parse(mesh), "cpu") as groups:
        _clear_sharding_prop_cache()  # which holds meshes of groups that are gone
        return function({**options, "shard_groups": groups.shard_groups}, *arguments)


def run(ranks: RankPool, mesh: str, function: Function, options: dict[str, Any], *arguments: Any) -> list[Any]:
    return ranks.run(Mesh.parse(mesh).size, meshed, mesh, function, options, *arguments)


def trained(options: dict[str, Any], both: dict[str, Any], *arguments: Any) -> dict[str, Any]:
    return train_on_rank(*arguments, options=options, **both)


def check(
    ranks: RankPool, mesh: str, choice: Choice, model: str, optimizer: str, options: dict[str, Any], **both: Any
) -> None:
    """Parity with one process, and between all ranks bit by bit, in steps of several uneven micro-batches."""
    if is_refused(ranks, choice, model):
        return
    steps = [UNEVEN[Mesh.parse(mesh).size]] * 3
    results = run(ranks, mesh, trained, options, both, choice, model, steps, optimizer)
    assert_parity(results, oracle(model, steps, optimizer, **both), TOLERANCE[optimizer])


SMALL = {"bucket_cap_mb": 0.0005}


@for_each_choice
def test_parity(ranks: RankPool, choice: Choice) -> None:
    model = "adapted" if choice[1] in ("zero2", "pytorch_zero3") else "odd" if choice[1] == "zero3" else "plain"
    check(ranks, FOUR, choice, model, "sgd" if model == "odd" else "adam", SMALL, clip=0.5)


@pytest.mark.parametrize(("mesh", "name"), [(WIDE, "zero3"), (TALL, "zero2")])
def test_parity_of_six_ranks(ranks: RankPool, mesh: str, name: str) -> None:
    check(ranks, mesh, ("sharding", name), "tied" if mesh == WIDE else "plain", "adam", SMALL, groups=mesh == TALL)


@pytest.mark.exhaustive
@for_each_choice
@pytest.mark.parametrize("mesh", [FOUR, WIDE, TALL])
@pytest.mark.parametrize("model", ["plain", "tied", "frozen", "adapted", "odd", "llama"])
def test_parity_of_all(ranks: RankPool, choice: Choice, mesh: str, model: str) -> None:
    check(ranks, mesh, choice, model, "sgd" if mesh == WIDE else "adam", {} if mesh == TALL else SMALL, clip=0.5)


@pytest.mark.parametrize(("mesh", "name"), [("replicate=1,shard=4", "zero3"), ("replicate=4,shard=1", "zero2")])
def test_meshes_of_one_row_or_one_column(ranks: RankPool, mesh: str, name: str) -> None:
    check(ranks, mesh, ("sharding", name), "plain", "sgd", {}, clip=0.5)


def traffic(options: dict[str, Any], choice: Choice, model: str, micro_batches: int) -> tuple[Totals, Totals]:
    """What a step announces, and what it issues."""
    strategy = load(choice)(build(model), OPTIMIZERS["adam"], options_of(choice, **options))
    batches = [make_batch(model, 3, index) for index in range(micro_batches)]
    one_step(strategy, batches)
    one_step(strategy, batches)
    with counted() as seen:
        one_step(strategy, batches)
    return announced(strategy, micro_batches), seen


@for_each_choice
def test_expected_traffic_is_what_runs(ranks: RankPool, choice: Choice) -> None:
    """In the group of that size: a row's, a column's or everyone's."""
    mesh = TALL if choice[1] in ("zero1", "zero3") else FOUR
    for model, micro_batches in (("plain", 1), ("normed", 3)) if mesh == TALL else (("adapted", 2),):
        for wanted, seen in run(ranks, mesh, traffic, SMALL, choice, model, micro_batches):
            assert wanted == seen, f"{model}, {micro_batches} micro-batches"
            if mesh == TALL:
                assert seen["all_reduce", 3][0] > 0


def unlike_gradients(options: dict[str, Any], choice: Choice) -> list[float]:
    """What becomes of gradients that are large in one row and small in the other; the same for every element."""
    module = torch.nn.Linear(8, 8, bias=False)
    strategy = load(choice)(module, OPTIMIZERS["sgd"], options_of(choice, **options))
    with strategy.micro_batch():
        (strategy(torch.ones(1, 8)) * (256.0, 1.0, 2.0**-9, 2.0**-9)[dist.get_rank()]).sum().backward()
    return strategy.full_gradients().get("weight", torch.empty(0)).unique().tolist()


@pytest.mark.parametrize("choice", CHOICES[:3], ids="-".join)
def test_replicas_add_up_in_fp32(ranks: RankPool, choice: Choice) -> None:
    """Whatever parameters are cast to: in bf16 the first row's 257 would be rounded, and the small ones lost."""
    for options in ({}, {"param_dtype": "bf16"}):
        assert run(ranks, FOUR, unlike_gradients, options, choice)[0] == [64.25 + 2.0**-10], options


def resting_memory(options: dict[str, Any], choice: Choice) -> tuple[dict[str, int], dict[str, int]]:
    size = ModelSize.of(build("plain"))
    strategy = build_and_step(choice, options=options_of(choice, **options), optimizer="adam")
    return strategy.memory_breakdown(), strategy.expected_memory(size)


ELEMENTS, ALIGNED = 6 * 11 + 11 + 11 * 7 + 7 + 7 + 1, 4
"""Of model `plain`; a shard is a multiple of 4 elements long."""


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_a_rank_holds_its_part_of_a_row(ranks: RankPool, name: str) -> None:
    """To the byte, with one bucket or unit of all elements: 1/S of what is sharded, with S = 3."""
    shard = -(-ELEMENTS // (3 * ALIGNED)) * ALIGNED
    whole = 3 * shard
    held = {"zero1": (whole, whole), "zero2": (whole, shard), "zero3": (shard, shard)}[name]
    choice, options = ("sharding", name), {"bucket_cap_mb": 25.0}
    for memory, expected in run(ranks, WIDE, resting_memory, options, choice):
        states = memory.pop("optimizer_state")
        assert (memory["parameters"], memory["gradients"]) == (4 * held[0], 4 * held[1])
        assert (
            8 * shard - 8 * (whole - ELEMENTS) <= states <= 8 * shard + 4 * 6
        )  # padding has none; counters of tensors
        per_rank = -(-4 * ELEMENTS // 3)
        assert expected["optimizer_state"] == -(-8 * ELEMENTS // 3)
        assert expected["gradients"] == (4 * ELEMENTS if name == "zero1" else per_rank)
        assert expected["parameters"] == (per_rank if name == "zero3" else 4 * ELEMENTS)


def there_and_back(options: dict[str, Any], choice: Choice, first: dict[str, Tensor]) -> list[Any]:
    """A state dict of plain DDP goes to `choice`, trains, and goes to DDP, which trains on."""
    steps = [UNEVEN[4]] * 2
    found = train_on_rank(choice, "tied", steps, "sgd", options=options, state=first)["state"]
    shared = [found if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    last = train_on_rank(("ddp", "simple_ddp"), "tied", steps, "sgd", state=shared[0], first_step=2)["state"]
    return [found, last]


@pytest.mark.parametrize("choice", by_default(CHOICES, CHOICES[1], CHOICES[2]), ids="-".join)
def test_state_dicts_go_to_ddp_and_back(ranks: RankPool, choice: Choice) -> None:
    first = oracle("tied", [UNEVEN[4]])["state"]
    expected = oracle("tied", [UNEVEN[4]] * 4, state=first)["state"]
    last = run(ranks, FOUR, there_and_back, {}, choice, first)[0][1]
    for name, wanted in expected.items():
        assert torch.allclose(last[name], wanted, rtol=1e-5, atol=1e-6), name


def poisoned(options: dict[str, Any], choice: Choice) -> str:
    strategy = build_and_step(choice, options=options_of(choice, **options))
    batch = make_batch("plain", 2, 1)
    if dist.get_rank() == 3:
        batch["x"][0, 0] = float("nan")
    strategy.zero_grad()
    return message_of(NonFiniteError, strategy.forward_backward, [batch])


@pytest.mark.parametrize("choice", by_default(CHOICES, CHOICES[2], CHOICES[4]), ids="-".join)
def test_what_is_not_finite_on_one_rank_is_seen_by_all(ranks: RankPool, choice: Choice) -> None:
    for message in run(ranks, FOUR, poisoned, {}, choice):
        assert "rank 3" in message and "step 1" in message


def with_settings(options: dict[str, Any], choice: Choice) -> tuple[list[Any], list[Any]]:
    """Digests of this rank's states, and the parameters' values that it computes with."""
    strategy = load(choice)(build("plain"), OPTIMIZERS["adam"], options_of(choice, **options))
    for step in range(3):
        one_step(strategy, global_batch("plain", [[2, 1]] * 4, step)[dist.get_rank()])
    state = strategy.full_state_dict()
    held = [strategy.on_this_rank(piece.tensor).clone() for piece in strategy.parameter_pieces()]
    return held, list(state.values())


SETTINGS: list[dict[str, Any]] = [
    {"param_dtype": "bf16"},
    {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    {"offload": "optimizer"},
    {"offload": "parameters"},
    {"precision": "fp16"},
    {"activation_checkpointing": "block"},
]


@for_each_choice
def test_settings(ranks: RankPool, choice: Choice) -> None:
    """Another one for each; zero3 has two."""
    check_settings(ranks, choice, SETTINGS[3:5] if choice[1] == "zero3" else [SETTINGS[CHOICES.index(choice) % 3]])


@pytest.mark.exhaustive
@for_each_choice
def test_all_settings(ranks: RankPool, choice: Choice) -> None:
    check_settings(ranks, choice, SETTINGS)


def check_settings(ranks: RankPool, choice: Choice, settings: list[dict[str, Any]]) -> None:
    """Replicas hold the same bits under each setting, and nearly what one row of all ranks computes."""
    for options in settings:
        try:
            load(choice).supports.require(options_of(choice, **options))
        except UnsupportedError:
            continue
        own = run(ranks, FOUR, with_settings, options, choice)
        flat = ranks.run(4, with_settings, options, choice)
        for one, two in ((own[0], own[2]), (own[1], own[3])):
            assert all(map(torch.equal, one[0], two[0])), options
        tolerance = 0.05 if "param_dtype" in options else 1e-3 if "precision" in options else 1e-5
        for mine, wanted in zip(own[0][1], flat[0][1], strict=True):
            assert torch.allclose(mine.float(), wanted.float(), atol=tolerance), options


def saved_elements(options: dict[str, Any], choice: Choice) -> list[tuple[str, int]]:
    """Keys and lengths of what this rank saves."""
    strategy = build_and_step(choice, options=options_of(choice, **options), optimizer="adam")
    return [(key, tensor.numel()) for key, tensor in tensors_to_save(strategy).items()]


@pytest.mark.parametrize("choice", by_default(CHOICES, CHOICES[1], CHOICES[2]), ids="-".join)
def test_one_replica_saves_each_element(ranks: RankPool, choice: Choice) -> None:
    saved = [entry for of_rank in run(ranks, FOUR, saved_elements, SMALL, choice) for entry in of_rank]
    for kind in ("parameter/", "optimizer/exp_avg/", "optimizer/exp_avg_sq/"):
        assert sum(length for key, length in saved if key.startswith(kind)) == ELEMENTS, kind
    assert len({key for key, _ in saved}) == len(saved)


@pytest.mark.parametrize("choice", by_default(CHOICES, CHOICES[2], CHOICES[4]), ids="-".join)
def test_checkpoints_go_on_here_and_elsewhere(ranks: RankPool, tmp_path: Path, choice: Choice) -> None:
    """Bit by bit on the same mesh, and nearly on another one or under a choice that shards nothing."""
    case = "tied", tmp_path / "saved"
    wanted = run(ranks, FOUR, saved_halfway, SMALL, choice, *case)[0]
    same = run(ranks, FOUR, gone_on, SMALL, choice, *case)[0]
    assert all(torch.equal(same[name], tensor) for name, tensor in wanted.items())
    if choice[1] in ("zero2", "pytorch_zero3"):
        other = run(ranks, TALL, gone_on, {}, choice, *case)[0]
    else:
        other = ranks.run(2, gone_on, {}, ("ddp", "flat_ddp"), *case)[0]
    for name, tensor in wanted.items():
        assert torch.allclose(other[name], tensor, rtol=1e-4, atol=1e-6), name

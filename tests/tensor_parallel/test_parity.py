"""Each choice on each mesh computes what one process computes on the whole global batch."""

from collections.abc import Iterable

import pytest

from tests.covering import pairwise
from tests.models import LANGUAGE
from tests.parity import assert_close, naming, oracle
from tests.ranks import RankPool
from tests.tables import by_default, each_row
from tests.tensor_parallel.meshes import HAND_WRITTEN, PLANS, check_on_mesh, even, train_on_mesh

MESHES = ("tp=2", "dp=2,tp=2", "tp=4", "dp=3,tp=2", "dp=2,tp=3", "tp=6")
TRAINED = {"mesh": MESHES[1:3], "model": list(LANGUAGE), "sequence_parallel": (False, True)}
COVERING = pairwise(TRAINED)
for_each_choice = pytest.mark.parametrize("choice", HAND_WRITTEN)


@for_each_choice
def test_language_models(ranks: RankPool, choice: str) -> None:
    """Each model on each mesh of four ranks, with and without sequence parallelism; the choices in turn.

    With SGD: the true gradient of a bias of keys is 0, and Adam would magnify its rounding.
    """
    rows = COVERING[HAND_WRITTEN.index(choice) :: len(HAND_WRITTEN)]
    assert rows
    for row in rows:
        check(ranks, choice, **row)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "choice"), [("dp=2,tp=3", "zero3"), ("dp=3,tp=2", "zero1")])
def test_six_ranks(ranks: RankPool, mesh: str, choice: str) -> None:
    check(ranks, choice, mesh, "lm, llama", sequence_parallel=choice == "zero3")


def check(ranks: RankPool, choice: str, mesh: str, model: str, sequence_parallel: bool) -> None:
    with naming((mesh, model)):
        check_on_mesh(ranks, mesh, choice, model, [even(mesh)] * 2, sequence_parallel=sequence_parallel, clip=0.5)


def models_on(mesh: str) -> list[str]:
    """Two heads of keys and values cannot be cut over three ranks."""
    return [model for model in LANGUAGE if model != "lm, gqa" or "tp=3" not in mesh]


def test_three_dimensions(ranks: RankPool) -> None:
    """Sharded inside a node, replicated outside, and layers cut."""
    check(ranks, "zero3", "replicate=2,shard=2,tp=2", "lm, gqa", sequence_parallel=True)


@for_each_choice
def test_trap_modules(ranks: RankPool, choice: str) -> None:
    """One of them for each, in turn."""
    check_trap_modules(ranks, choice, [list(PLANS)[HAND_WRITTEN.index(choice) % len(PLANS)]])


@pytest.mark.exhaustive
@for_each_choice
def test_all_trap_modules(ranks: RankPool, choice: str) -> None:
    check_trap_modules(ranks, choice, PLANS)


def check_trap_modules(ranks: RankPool, choice: str, models: Iterable[str]) -> None:
    for model in models:
        mesh = "tp=2" if model in ("deep", "odd") else "dp=2,tp=2"
        check_on_mesh(ranks, mesh, choice, model, [even(mesh)] * 2)


@pytest.mark.parametrize("choice", by_default(["tp", "zero3"], "tp"))
def test_a_classifier(ranks: RankPool, choice: str) -> None:
    """Its head is the same on all ranks; so tokens come together before it."""
    check_on_mesh(ranks, "dp=2,tp=2", choice, "llama", [even("dp=2")] * 3, "adam", sequence_parallel=choice == "tp")


@pytest.mark.parametrize("choice", by_default(HAND_WRITTEN, "zero3"))
def test_uneven_micro_batches(ranks: RankPool, choice: str) -> None:
    """Ranks with different numbers of samples and micro-batches, and one without any."""
    steps = [[[2, 1], [1]], [[1], [3]], [[2], []]]
    check_on_mesh(ranks, "dp=2,tp=2", choice, "lm, gqa", steps, sequence_parallel=True)


@pytest.mark.parametrize("mesh, choice", [("tp=2", "pytorch_tp"), ("dp=2,tp=2", "pytorch_fsdp_tp")])
def test_pytorchs_own(ranks: RankPool, mesh: str, choice: str) -> None:
    """Of layers that divide evenly; others it cannot cut. Its sequence parallelism takes only such sequences, too."""
    model = "lm, even, tied" if "dp" in mesh else "lm, even"
    check_on_mesh(ranks, mesh, choice, model, [even(mesh)] * 2, clip=0.5)


@pytest.mark.parametrize("setting", by_default(["block", "every:2", "selective", "op", "torch:block"], "block", "op"))
def test_blocks_computed_again(ranks: RankPool, setting: str) -> None:
    """Backward repeats f and g in the same order on all ranks."""
    options = {"activation_checkpointing": setting}
    for sequence_parallel, choice, model in ((False, "zero3", "lm, llama"), (True, "tp", "lm, gpt2")):
        check_on_mesh(ranks, "tp=2", choice, model, [even("tp=2")] * 2, "sgd", sequence_parallel, options=options)


@each_row("mesh, choice", [("tp=4", "tp"), ("dp=2,tp=2", "zero2"), ("shard=2,tp=2", "zero3")])
def test_sequence_parallel_recomputed_in_bf16(ranks: RankPool, mesh: str, choice: str) -> None:
    """As near as bf16 allows: ranks round partial sums before they add them up, each by up to 2**-8 of its size."""
    options, steps = {"activation_checkpointing": "block", "precision": "bf16"}, [even(mesh)] * 3
    found = ranks.run(4, train_on_mesh, mesh, choice, "lm, llama", steps, True, "sgd", None, options)[0]
    wanted = oracle("lm, llama", steps, precision="bf16")
    assert found["loss"] == pytest.approx(wanted["loss"], rel=2**-8)
    assert_close(found["gradients"], wanted["gradients"], 2**-7, "gradient")
    assert_close(found["state"], wanted["state"], 2**-8, "parameter")


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES)
@for_each_choice
def test_every_model(ranks: RankPool, mesh: str, choice: str) -> None:
    for index, model in enumerate(models_on(mesh), HAND_WRITTEN.index(choice)):
        check(ranks, choice, mesh, model, sequence_parallel=index % 2 == 0)

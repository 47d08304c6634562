"""What sharding promises beyond the right numbers: memory to the byte, order, repeatability, and clear refusals."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.strategy.communication.collectives import all_gather, groups_of_roots, reduce_scatter
from ddp_lab.strategy.options import StrategyOptions
from tests.models import UNUSUAL, Lookup, batch, build, make_batch
from tests.parity import OPTIMIZERS, check_messages, check_parity, load, message_of, one_step, train_on_rank
from tests.ranks import RankPool
from tests.tables import by_default, each_row

STAGES = ["zero1", "zero2", "zero3"]


def make(name: str, module: nn.Module, optimizer: Any = OPTIMIZERS["adam"], **options: Any) -> Any:
    return load(("sharding", name))(module, optimizer, StrategyOptions(**options))


# Collectives ---------------------------------------------------------------------------------------------------------


def sum_and_gather(elements: int) -> tuple[Tensor, Tensor, Tensor]:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    mine = torch.arange(elements * size, dtype=torch.float32) * (rank + 1)
    apart, full = torch.empty(elements), mine.clone()
    reduce_scatter(apart, full, group).wait()
    in_place = mine.clone()
    reduce_scatter(in_place.view(size, -1)[rank], in_place, group).wait()
    whole = torch.zeros(elements * size)
    whole.view(size, -1)[rank] = apart
    all_gather(whole, group).wait()
    return apart, in_place.view(size, -1)[rank].clone(), whole


@each_row("world_size", [1, 2, 3, 4])
def test_collectives(ranks: RankPool, world_size: int) -> None:
    for elements in (1, 5, 1000):
        expected = torch.arange(elements * world_size, dtype=torch.float32) * sum(range(1, world_size + 1))
        for rank, (apart, in_place, whole) in enumerate(ranks.run(world_size, sum_and_gather, elements)):
            assert torch.equal(apart, expected.view(world_size, -1)[rank])
            assert torch.equal(in_place, apart)
            assert torch.equal(whole, expected)


def roots() -> tuple[list[list[int]], bool, bool]:
    """The ranks in each root's group; whether these groups are made once; whether they time out as their parent."""
    parent = dist.new_group(timeout=timedelta(seconds=77))
    assert isinstance(parent, dist.ProcessGroup)
    groups = groups_of_roots(parent, torch.device("cpu"))
    timeouts = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    again = groups_of_roots(parent, torch.device("cpu"))
    ranks, is_same = [dist.get_process_group_ranks(group) for group in groups], again is groups
    return ranks, is_same and len(set(groups)) == len(groups), timeouts == {timedelta(seconds=77)}


def test_each_root_has_a_group_of_its_own(ranks: RankPool) -> None:
    for members, are_kept, time_out in ranks.run(3, roots):
        assert members == 3 * [[0, 1, 2]] and are_kept and time_out


def groups_after_others() -> list[int]:
    """Before `parent`, groups are made that not all ranks know of."""
    pair, cpu, me = dist.new_group([1, 2]), torch.device("cpu"), dist.get_rank()
    made = [pair, *groups_of_roots(pair, cpu)] if isinstance(pair, dist.ProcessGroup) else []
    parent = dist.new_group()  # named after a count that groups of roots must leave as it was
    if me == 2:
        made.append(dist.new_group([me], use_local_synchronization=True))
    assert isinstance(parent, dist.ProcessGroup)
    roots = groups_of_roots(parent, cpu)
    if me != 2:
        made.append(dist.new_group([me], use_local_synchronization=True))  # from here on all ranks count the same
    dist.barrier()
    for group in (*made, *roots, parent):
        dist.destroy_process_group(group)  # or later traces would list groups of different ranks
    return [group.size() for group in roots]


def test_groups_of_roots_find_each_other_after_groups_that_not_all_ranks_joined(ranks: RankPool) -> None:
    assert ranks.run(3, groups_after_others) == 3 * [[3, 3, 3]]


# Memory --------------------------------------------------------------------------------------------------------------


def memory_at_rest(name: str, model: str, precision: str) -> tuple[dict[str, int], list[list[int]], int]:
    """Bytes by component after a step; the sizes of the parameters in each flat tensor; bytes of buffers."""
    module = build(model)
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    strategy = make(name, module, precision=precision, bucket_cap_mb=0.0005)
    for step in range(2):
        one_step(strategy, [make_batch(model, 2, 10 * step + i) for i in range(2)])
    strategy.finish_parameter_synchronization()
    flats = [[p.numel() for p in flat.parameters] for flat in strategy.flats]
    return strategy.memory_breakdown(), flats, buffers


@pytest.mark.parametrize("name", STAGES)
@each_row("world_size, precision", [(2, "fp32"), (3, "bf16")])
def test_memory_at_rest_is_the_formula(ranks: RankPool, name: str, world_size: int, precision: str) -> None:
    """Fp32 states in either precision: 4 bytes an element each for parameters and gradients, whole or a shard; 8 for
    Adam on the shard's elements without padding, and its 4-byte step counter for each piece of a parameter."""
    for model in ("plain", "llama"):
        for rank, (memory, flats, buffers) in enumerate(ranks.run(world_size, memory_at_rest, name, model, precision)):
            shards = [4 * -(-sum(sizes) // (4 * world_size)) for sizes in flats]  # begin at 16 bytes
            padded = sum(shards) * world_size
            states = 0
            for sizes, shard in zip(flats, shards, strict=True):
                start = 0
                for size in sizes:
                    held = min(start + size, (rank + 1) * shard) - max(start, rank * shard)
                    states += 8 * held + 4 if held > 0 else 0
                    start += size
            assert sum(map(sum, flats)) == sum(p.numel() for p in build(model).parameters())
            assert memory == {
                "parameters": 4 * (sum(shards) if name == "zero3" else padded),
                "gradients": 4 * (padded if name == "zero1" else sum(shards)),
                "optimizer_state": states,
                "buffers": buffers,
            }


def parameters_in_use(micro_batches: int) -> tuple[int, int, int, int, int]:
    """Most bytes of full parameters, and of all model states beyond rest; the root's, a block's, those at an update."""
    module = build("deep")
    strategy = make("zero3", module)
    root, block = (sum(flat.full_bytes for flat in unit.flats) for unit in (strategy.root, strategy.schedule.units[0]))
    one_step(strategy, [batch(2, i) for i in range(micro_batches)])
    at_rest = sum(strategy.memory_breakdown().values())
    full, held = [], []

    def look(*_: object) -> None:
        full.append(sum(flat.full.untyped_storage().nbytes() for flat in strategy.flats))
        received = sum(b.flat.full_bytes for buckets in strategy.schedule.in_flight for b in buckets if b.in_flight)
        held.append(sum(strategy.memory_breakdown().values()) + received // 2)  # what a scatter of two ranks receives

    for layer in module.modules():
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    strategy.optimizer.register_step_pre_hook(look)  # behind it nothing of before the update is kept anyway
    one_step(strategy, [batch(2, i) for i in range(micro_batches)])
    return max(full), max(held) - at_rest, root, block, full[-1]


@each_row("micro_batches", [1, 2])
def test_zero3_holds_the_root_and_two_blocks(ranks: RankPool, micro_batches: int) -> None:
    for full, beyond_rest, root, block, left in ranks.run(2, parameters_in_use, micro_batches):
        # Parts of the root of 6 * 20 + 20 and 20 + 1 elements, and 20 * 20 + 20: each padded to twice 4 elements.
        assert (root, block) == (4 * (144 + 24), 4 * 424)
        assert root + block < full <= root + 2 * block
        assert beyond_rest <= root + 6 * block, "of two: parameters, gradients, their sum with what is received"
        assert left == 0


# Order, re-use, checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", by_default(["baseline", *STAGES], "zero1", "zero3"))
@each_row("which", UNUSUAL)
def test_unusual_modules(ranks: RankPool, name: str, which: str) -> None:
    check_parity(ranks, ("sharding", name), which, [[[2, 2], [2, 2]]] * 3)


def embedding_in_backward(reads: str) -> set[int]:
    """Bytes that the embedding's storage has when a block's gradient is there, in all steps but the first's forward."""
    module = Lookup(reads)
    strategy = make("zero3", module)
    seen: set[int] = set()
    for parameter in module.blocks.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: seen.add(strategy.embeddings.flats[0].full.untyped_storage().nbytes())
        )
    for step in range(2):
        one_step(strategy, [batch(2, 10 * step + index) for index in range(2)])
    assert all(flat.full.untyped_storage().nbytes() == 0 for flat in strategy.flats)
    return seen


def test_zero3_frees_an_embedding_before_backward_that_does_not_read_it(ranks: RankPool) -> None:
    assert ranks.run(2, embedding_in_backward, "") == [{0}, {0}]
    assert ranks.run(2, embedding_in_backward, "head") == [{4 * 30 * 8}] * 2


def test_two_runs_are_bitwise_equal(ranks: RankPool) -> None:
    arguments = (("sharding", "zero3"), "llama, checkpointed", [[[2, 2]] * 3] * 2)
    first, second = (ranks.run(3, train_on_rank, *arguments)[0]["state"] for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


# What goes wrong -----------------------------------------------------------------------------------------------------


def mistakes_with_zero3() -> dict[str, str]:
    """A parameter is written to, its data is replaced, and backward reads an embedding in a later step only: what this
    rank says, by what it must say."""
    module = build("plain")
    strategy = make("zero3", module)
    weight = module.net[0].weight
    written = message_of(RuntimeError, weight.data.mul_, 2)
    assert weight.isnan().all(), "a sharded parameter reads as NaN"
    one_step(strategy, [batch(2, 0)])
    weight.data = torch.zeros(11, 6)
    lookup = Lookup()
    looking_up = make("zero3", lookup)
    one_step(looking_up, [batch(2, 0)])
    lookup.reads = "head"
    return {
        "single memory location": written,
        "(11, 6) was replaced between steps": message_of(ValueError, one_step, strategy, [batch(2, 1)]),
        "use zero2 for such a model": message_of(OneRankError, one_step, looking_up, [batch(2, 1)]),
    }


def test_mistakes_with_zero3_are_refused(ranks: RankPool) -> None:
    check_messages(ranks, 2, mistakes_with_zero3)


def unshardable(name: str) -> dict[str, str]:
    two_elements = nn.LayerNorm(1)
    return {
        "2 trainable elements cannot be sharded over 3 ranks": message_of(ValueError, make, name, two_elements),
        "Adafactor is not known to work on each element by itself": message_of(
            ValueError, make, name, build("plain"), torch.optim.Adafactor
        ),
    }


@each_row("name", STAGES)
def test_what_cannot_be_sharded_is_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    check_messages(ranks, 3, unshardable, name)

"""What sharding promises beyond the right numbers: memory to the byte, order, repeatability, and clear refusals."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sharding.collectives import all_gather, groups_of_roots, reduce_scatter
from tests.models import answer, batch, build, make_batch
from tests.parity import OPTIMIZERS, TOLERANCE, assert_close, load
from tests.ranks import RankPool
from training.config import StrategyOptions
from training.strategy import Strategy

STAGES = ["zero1", "zero2", "zero3"]


def make(name: str, module: nn.Module, optimizer: Any = OPTIMIZERS["adam"], **options: Any) -> Any:
    return load(("sharding", name))(module, optimizer, StrategyOptions(**options))


def one_step(strategy: Strategy, batches: list[dict[str, Tensor]]) -> float:
    strategy.zero_grad()
    loss = strategy.forward_backward(batches)
    strategy.step()
    return loss.item()


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_at_rest_is_the_formula(ranks: RankPool, name: str, world_size: int, precision: str) -> None:
    """Fp32 states in either precision: 4 bytes an element each for parameters and gradients, whole or a shard; 8 for
    Adam on the shard's elements without padding, and its 4-byte step counter for each piece of a parameter."""
    for model in ("plain", "llama"):
        for rank, (memory, flats, buffers) in enumerate(ranks.run(world_size, memory_at_rest, name, model, precision)):
            shards = [-(-sum(sizes) // world_size) for sizes in flats]
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


class Deep(nn.Module):
    """An embedding-like layer, six equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 20), nn.Tanh()) for _ in range(6))
        self.last = nn.Linear(20, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return answer(self.last(hidden), y)


def parameters_in_use(micro_batches: int) -> tuple[int, int, int, int, int]:
    """Most bytes of full parameters, and of all model states beyond rest; the bytes of the root, of a block, left."""
    module = Deep()
    strategy = make("zero3", module)
    root, block = (sum(flat.full_bytes for flat in unit.flats) for unit in (strategy.root, strategy.schedule.units[0]))
    one_step(strategy, [batch(2, i) for i in range(micro_batches)])
    at_rest = sum(strategy.memory_breakdown().values())
    full, held = [], []

    def look(*_: object) -> None:
        full.append(sum(flat.full.untyped_storage().nbytes() for flat in strategy.flats))
        received = sum(flat.full_bytes for b in strategy.schedule.in_flight if b.in_flight for flat in [b.flat])
        held.append(sum(strategy.memory_breakdown().values()) + received // 2)  # what a scatter of two ranks receives

    for layer in module.modules():
        layer.register_forward_pre_hook(look)
        layer.register_forward_hook(look)
        layer.register_full_backward_hook(look)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    one_step(strategy, [batch(2, i) for i in range(micro_batches)])
    left = sum(flat.full.untyped_storage().nbytes() for flat in strategy.flats)
    return max(full), max(held) - at_rest, root, block, left


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_zero3_holds_the_root_and_two_blocks(ranks: RankPool, micro_batches: int) -> None:
    for full, beyond_rest, root, block, left in ranks.run(2, parameters_in_use, micro_batches):
        assert (root, block) == (4 * (6 * 20 + 20 + 20 + 1 + 1), 4 * (20 * 20 + 20)), "with an element of padding"
        assert root + block < full <= root + 2 * block
        assert beyond_rest <= root + 4 * block, "two of them gradients: some being made, some being reduced"
        assert left == 0


# Order, re-use, checkpoints ------------------------------------------------------------------------------------------


class OutOfOrder(nn.Module):
    """Blocks run in another order than they are registered in, and one of them twice; the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 1)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        for index in (2, 0, 3, 1, 0):
            x = x + torch.tanh(self.blocks[index](x))
        return answer(self.last(x), y)


class Lookup(nn.Module):
    """An embedding outside of all blocks; `reads` says what else reads it: nothing, the head, or backward itself."""

    def __init__(self, reads: str = "") -> None:
        super().__init__()
        self.reads = reads
        self.table = nn.Embedding(30, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        at = (10 * x.abs()).long() % 30
        if self.reads == "checkpoint":
            hidden = checkpoint(lambda: self.table(at).tanh().mean(1), use_reentrant=False)
        else:
            hidden = self.table(at).tanh().mean(1)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        if self.reads == "head":
            scores = functional.linear(hidden, self.table.weight)
            hidden = hidden + 0.1 * scores.softmax(-1) @ self.table.weight
        return answer(self.last(hidden), y)


def checkpointed(reentrant: bool) -> Callable[[], nn.Module]:
    def make_module() -> nn.Module:
        module = build("llama")
        module.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
        module.train()
        return module

    return make_module


MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "out of order": (OutOfOrder, "plain"),
    "lookup": (Lookup, "plain"),
    "lookup, read by the head": (partial(Lookup, "head"), "plain"),
    "lookup, checkpointed": (partial(Lookup, "checkpoint"), "plain"),
    "checkpointed": (checkpointed(False), "llama"),
    "checkpointed, re-entrant": (checkpointed(True), "llama"),
}


def train(name: str, which: str, steps: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    make_module, samples = MODULES[which]
    module, rank = make_module(), dist.get_rank()
    strategy = make(name, module, OPTIMIZERS["sgd"])
    for step in range(steps):
        one_step(strategy, [make_batch(samples, 2, 100 * step + 10 * rank + i) for i in range(2)])
    return strategy.full_state_dict()


@pytest.mark.parametrize("which", MODULES)
@pytest.mark.parametrize("name", ["baseline", *STAGES])
def test_unusual_modules(ranks: RankPool, name: str, which: str) -> None:
    torch.manual_seed(0)
    make_module, samples = MODULES[which]
    module = make_module()
    optimizer = OPTIMIZERS["sgd"](list(module.parameters()))
    for step in range(3):
        optimizer.zero_grad()
        micro = [make_batch(samples, 2, 100 * step + 10 * rank + i) for rank in range(2) for i in range(2)]
        module(**{key: torch.cat([m[key] for m in micro]) for key in micro[0]}).loss.backward()
        optimizer.step()
    expected = dict(module.state_dict())
    assert_close(ranks.run(2, train, name, which, 3)[0], expected, TOLERANCE["sgd"], "parameter")


def table_in_backward(reads: str) -> set[int]:
    """Bytes that the table's storage has when a block's gradient is there, in all steps but the first's forward."""
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


def test_zero3_frees_a_table_before_backward_that_does_not_read_it(ranks: RankPool) -> None:
    assert ranks.run(2, table_in_backward, "") == [{0}, {0}]
    assert ranks.run(2, table_in_backward, "head") == [{4 * 30 * 8}] * 2


def read_later() -> str:
    module = Lookup()
    strategy = make("zero3", module)
    one_step(strategy, [batch(2, 0)])
    module.reads = "head"
    with pytest.raises(RuntimeError) as caught:
        one_step(strategy, [batch(2, 1)])
    return str(caught.value)


def test_a_table_that_backward_reads_in_a_later_step_only(ranks: RankPool) -> None:
    assert all("use zero2 for such a model" in message for message in ranks.run(2, read_later))


def train_twice(name: str) -> bool:
    first, second = (train(name, "checkpointed", 3) for _ in range(2))
    return all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", STAGES)
def test_two_runs_are_bitwise_equal(ranks: RankPool, name: str) -> None:
    assert ranks.run(3, train_twice, name) == [True] * 3


# What goes wrong -----------------------------------------------------------------------------------------------------


def fail_and_go_on(name: str, where: str) -> tuple[str, float, list[dict[str, Tensor]], list[dict[str, int]]]:
    """Train two steps with a failing one in between, and two without: messages, states and memory at rest."""
    states, memory, message, loss = [], [], "", 0.0
    for fails in (True, False):
        torch.manual_seed(0)
        module = Deep()
        strategy = make(name, module)
        one_step(strategy, [batch(2, 1), batch(2, 2)])
        if fails:

            def planted(*_: object) -> None:
                raise ValueError("planted")

            layer = module.blocks[2][0]
            assert isinstance(layer, nn.Linear)
            handle = layer.register_forward_hook(planted) if where == "forward" else layer.weight.register_hook(planted)
            with pytest.raises(ValueError, match="planted") as caught:
                one_step(strategy, [batch(2, 3), batch(2, 4)])
            message = str(caught.value)
            handle.remove()
            with torch.no_grad():
                loss = strategy.forward(batch(4, 5)).loss.item()
        one_step(strategy, [batch(2, 3), batch(2, 4)])
        states.append(strategy.full_state_dict())
        memory.append(strategy.memory_breakdown())
    return message, loss, states, memory


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", ["baseline", *STAGES])
def test_an_exception_leaves_a_model_that_can_go_on(ranks: RankPool, name: str, where: str) -> None:
    """Evaluated, saved, and trained further as if the failed step had not been."""
    for message, loss, states, memory in ranks.run(2, fail_and_go_on, name, where):
        assert message == "planted" and 0 < loss < 100
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
        assert memory[0] == memory[1]


def replace_data() -> str:
    module = build("plain")
    strategy = make("zero3", module)
    one_step(strategy, [batch(2, 0)])
    module.net[0].weight.data = torch.zeros(11, 6)  # type: ignore[index, union-attr]
    with pytest.raises(ValueError) as caught:
        one_step(strategy, [batch(2, 1)])
    return str(caught.value)


def test_replaced_data_is_refused(ranks: RankPool) -> None:
    assert all("(11, 6) was replaced between steps" in message for message in ranks.run(2, replace_data))


def write_to_sharded_parameter() -> tuple[str, bool]:
    module = build("plain")
    make("zero3", module)
    weight = module.net[0].weight  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError) as caught:
        weight.data.mul_(2)
    return str(caught.value), bool(weight.isnan().all())


def test_a_sharded_parameter_reads_as_nan_and_refuses_writes(ranks: RankPool) -> None:
    for message, reads_nan in ranks.run(2, write_to_sharded_parameter):
        assert "single memory location" in message and reads_nan


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


def refusals(name: str) -> list[str]:
    messages = []
    for module, optimizer in ((Tiny(), OPTIMIZERS["sgd"]), (build("plain"), torch.optim.Adafactor)):
        with pytest.raises(ValueError) as caught:
            make(name, module, optimizer)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("name", STAGES)
def test_what_cannot_be_sharded_is_refused_on_every_rank(ranks: RankPool, name: str) -> None:
    for too_few, not_elementwise in ranks.run(3, refusals, name):
        assert too_few.startswith("2 trainable elements cannot be sharded over 3 ranks")
        assert "Adafactor does not work on each element by itself" in not_elementwise

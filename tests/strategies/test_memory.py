"""What a strategy holds, to the byte or as its formula says: at rest, in a step, on the device and on the host."""

from functools import partial
from typing import Any

import pytest
import torch

from ddp_lab.strategy.account import ModelSize, storage_bytes
from tests.models import LORA, Lookup, batch, build, make_batch
from tests.parity import Case, built, one_step, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row

STAGES = ["zero1", "zero2", "zero3"]
BF16 = {"param_dtype": "bf16"}


def at_rest(case: Case) -> dict[str, Any]:
    """Bytes by component after two steps, what formulas expect, and the sizes of parameters in each flat tensor."""
    with strategy_of(case) as strategy:
        size = ModelSize.of(build(case.model))
        for step in range(2):
            one_step(strategy, [make_batch(case.model, 2, 10 * step + i) for i in range(2)])
        strategy.finish_parameter_synchronization()
        return {
            "held": strategy.memory_breakdown(),
            "expected": strategy.expected_memory(size),
            "host": (strategy.expected_host_bytes(size), strategy.host_bytes()),
            "flats": [[p.numel() for p in flat.parameters] for flat in getattr(strategy, "flats", [])],
        }


HSDP = "replicate=2,shard=2"
of_adam = partial(Case, model="llama", optimizer="adam")
COMPILED = of_adam("zero3", options={"compile_backend": "aot_eager"})
CASES = [
    *(of_adam(name, mesh=mesh) for name, mesh in (("zero2", HSDP), ("zero3", HSDP), ("zero1", "dp=3"))),
    *(of_adam(name, options=BF16) for name in ("zero1", "zero3", "pytorch_zero3")),
    of_adam("pytorch_zero2", options={"reduce_dtype": "bf16"}),
    of_adam("zero1", options={"offload": "optimizer"}),
    of_adam("zero2", options={"offload": "optimizer:FOLDER"}),
    of_adam("zero3", options=BF16 | {"offload": "parameters"}),
    of_adam("pytorch_zero2", options={"offload": "parameters"}),
    *(of_adam(name, model=LORA) for name in ("baseline", "zero3", "pytorch_zero3")),
]


@pytest.mark.parametrize("cases", [CASES, pytest.param([COMPILED], marks=pytest.mark.slow)], ids=["usual", "compiled"])
def test_memory_is_as_the_formulas_say(ranks: RankPool, cases, tmp_path):
    """Padding and Adam's counters aside."""
    for case in cases:
        for memory in ranks.run(case.dims.size, at_rest, case.within(str(tmp_path))):
            for component, expected in memory["expected"].items():
                assert 0.98 * expected <= memory["held"][component] <= 1.1 * expected + 400, (case, component)
            expected, actual = memory["host"]
            assert expected <= actual <= 1.05 * expected, case


@each_row("name", ["simple_ddp", "flat_ddp", "bucket_ddp_async", "pytorch_ddp", "pytorch_ddp_plain"])
def test_replicated(ranks: RankPool, name):
    """4 bytes an element each for parameters and gradients, 8 for Adam, and Adam's 4-byte step counter a tensor."""
    elements, tensors = ModelSize.of(build("plain")).elements, 6
    for memory in ranks.run(2, at_rest, Case(name, optimizer="adam")):
        assert memory["held"] == {
            "parameters": 4 * elements,
            "gradients": 4 * elements * (2 if name == "pytorch_ddp_plain" else 1),  # DDP's buckets are copies
            "optimizer_state": 8 * elements + 4 * tensors,
            "buffers": 0,
        }


@pytest.mark.parametrize("name", STAGES)
@each_row("mesh, precision", [("dp=2", "fp32"), ("replicate=2,shard=2", "bf16")])
def test_sharded(ranks: RankPool, name, mesh, precision):
    """Fp32 states in either precision: 4 bytes an element each for parameters and gradients, whole or a shard; 8 for
    Adam on the shard's elements without padding, and its 4-byte step counter for each piece of a parameter."""
    case = Case(name, "plain", mesh, {"precision": precision, "bucket_cap_mb": 0.0005}, optimizer="adam")
    parts = case.dims.degrees.get("shard", case.dims.size)
    for rank, memory in enumerate(ranks.run(case.dims.size, at_rest, case)):
        shards = [4 * -(-sum(sizes) // (4 * parts)) for sizes in memory["flats"]]  # of multiples of 16 bytes
        padded, states = sum(shards) * parts, 0
        for sizes, shard in zip(memory["flats"], shards, strict=True):
            start = 0
            for size in sizes:
                elements = min(start + size, (rank % parts + 1) * shard) - max(start, rank % parts * shard)
                states += 8 * elements + 4 if elements > 0 else 0
                start += size
        assert sum(map(sum, memory["flats"])) == ModelSize.of(build("plain")).elements
        assert memory["held"] == {
            "parameters": 4 * (sum(shards) if name == "zero3" else padded),
            "gradients": 4 * (padded if name == "zero1" else sum(shards)),
            "optimizer_state": states,
            "buffers": 0,
        }


def embedding_in_backward(reads: str) -> set[int]:
    """Bytes of the embedding's storage each time that a block's gradient is ready, in two steps."""
    module = Lookup(reads)
    strategy: Any = built("zero3", module)
    sizes: set[int] = set()
    for parameter in module.blocks.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: sizes.add(strategy.embeddings.flats[0].full.untyped_storage().nbytes())
        )
    for step in range(2):
        one_step(strategy, [batch(2, 10 * step + index) for index in range(2)])
    assert all(flat.full.untyped_storage().nbytes() == 0 for flat in strategy.flats)
    return sizes


def test_zero3_frees_an_embedding_before_backward_that_does_not_read_it(ranks: RankPool):
    assert ranks.run(2, embedding_in_backward, "") == [{0}, {0}]
    assert ranks.run(2, embedding_in_backward, "head") == [{4 * 30 * 8}] * 2


def test_storage_is_counted_once():
    base = torch.zeros(10)
    assert storage_bytes([base, base[:5], base.view(2, 5), torch.zeros(3)]) == 52

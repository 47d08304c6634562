"""Rows of parity on meshes: states sharded over a part of the ranks, layers, stages, tokens and experts over ranks."""

from dataclasses import replace
from typing import Any

import pytest

from tests.covering import cover
from tests.parity import Case, Split, check, in_stages
from tests.ranks import RankPool

FOUR, WIDE, TALL = "replicate=2,shard=2", "replicate=2,shard=3", "replicate=3,shard=2"
SMALL = {"bucket_cap_mb": 0.0005}
TOKENS, AGAIN, BF16 = {"sequence_parallel": True}, {"activation_checkpointing": "block"}, {"precision": "bf16"}


def shards(choice: str, mesh: str, model: str, options: Any = SMALL, optimizer: str = "adam", **settings: Any) -> Case:
    return Case(choice, model, mesh, options, "uneven", optimizer, **settings)


def layers(choice: str, mesh: str, model: str, options: Any = TOKENS, **settings: Any) -> Case:
    """With SGD, since the true gradient of a key bias is 0, and Adam would magnify its rounding."""
    return Case(choice, model, mesh, options, **{"split": "uneven", "clip": 0.5} | settings)


def stages(choice: str, mesh: str, model: str, schedule: str, split: Any = "pipelined", **options: Any) -> Case:
    return replace(in_stages(choice, mesh, model, schedule, **options), split=split, clip=0.5)


def tokens(choice: str, mesh: str, model: str, way: str = "zigzag", again: str = "none", **options: Any) -> Case:
    flags = {"context_parallel": way, "activation_checkpointing": again, **options}
    return Case(choice, model, mesh, flags, "uneven", clip=0.5)


def experts(choice: str, mesh: str, model: str, split: str = "some have none", **options: Any) -> Case:
    return Case(choice, model, mesh, options, split, clip=0.5)


SHARDS = [
    shards("zero1", FOUR, "plain", clip=0.5),
    shards("zero2", FOUR, "adapted", clip=0.5),
    shards("zero3", FOUR, "odd", optimizer="sgd", clip=0.5),
    shards("pytorch_zero2", FOUR, "plain", {}, clip=0.5),
    shards("pytorch_zero3", FOUR, "adapted", {}, clip=0.5),
    shards("zero3", WIDE, "tied"),
    shards("zero2", TALL, "plain", groups=True),
    shards("zero1", TALL, "llama", optimizer="sgd"),
    shards("zero3", "replicate=1,shard=4", "plain", {}),
    shards("zero2", "replicate=4,shard=1", "plain", {}),
    shards("zero1", FOUR, "plain", {"param_dtype": "bf16"}),
    shards("zero2", FOUR, "frozen", {"param_dtype": "bf16", "reduce_dtype": "bf16"}),
    shards("zero3", FOUR, "deep", {"offload": "parameters", **AGAIN}, same_as={"options": {}}),
    shards("zero3", FOUR, "spiked", {"precision": "fp16", "loss_scale": 2.0**12}, huge=[(1, 3)]),
    shards("pytorch_zero3", FOUR, "llama", {"offload": "parameters"}, "sgd", same_as={"options": {}}),
]
LAYERS = [
    layers("tp", "dp=2,tp=2", "lm, gpt2"),
    layers("simple_ddp", "tp=4", "lm, gqa", {}),
    layers("zero1", "dp=2,tp=2", "lm, gqa"),
    layers("zero1", "tp=4", "lm, llama"),
    layers("zero2", "dp=2,tp=2", "lm, llama", {}),
    layers("zero3", "tp=4", "lm, gqa"),
    layers("zero3", "replicate=2,shard=2,tp=2", "lm, gqa"),
    layers("zero3", "dp=2,tp=2", "lm, gqa", split="some have none"),
    layers("tp", "dp=2,tp=2", "plain", {}),
    layers("simple_ddp", "dp=2,tp=2", "frozen", {}),
    layers("zero1", "dp=2,tp=2", "adapted", {}),
    layers("zero2", "dp=2,tp=2", "plain", {}, optimizer="adam", groups=True),
    layers("zero2", "tp=2", "odd", {}),
    layers("zero3", "dp=2,tp=2", "branching", {}, counted=False),
    layers("tp", "tp=2", "deep", {}),
    layers("tp", "dp=2,tp=2", "llama", optimizer="adam"),  # all ranks have the head, so tokens are gathered before it
    layers("pytorch_tp", "tp=2", "lm, even", {}),  # it cuts only layers that divide evenly
    layers("pytorch_tp", "tp=2", "lm, even, six", split="one each"),  # and only sequences that do
    layers("pytorch_fsdp_tp", "dp=2,tp=2", "lm, even, tied", {}),
    layers("zero3", "tp=2", "lm, llama", AGAIN),
    layers("tp", "tp=2", "lm, gpt2", {"activation_checkpointing": "selective", **TOKENS}),
    layers("zero1", "tp=2", "lm, llama", {"activation_checkpointing": "selective", **TOKENS}),
    layers("zero2", "tp=2", "lm, llama", {"param_dtype": "bf16", **TOKENS}),
    layers("tp", "tp=4", "lm, llama", {**AGAIN, **BF16, **TOKENS}),
    layers("zero3", "shard=2,tp=2", "lm, llama", {**AGAIN, **BF16, **TOKENS}),
]
NO_MULTIPLE: list[Split] = [[[2]], [[1, 2, 1]], [[2, 2, 2]]]
FEWER: list[Split] = [[[2]], [[1, 2]], [[2, 2]]]
STAGES = [
    stages("tp", "pp=2", "lm, long", "gpipe"),
    stages("tp", "pp=3", "lm, long, gpt2", "1f1b"),
    stages("tp", "pp=4", "lm, long, tied", "zb-h1"),
    stages("tp", "pp=2", "lm, long", "interleaved"),
    stages("tp", "pp=4", "lm, long, tied", "interleaved"),
    stages("tp", "dp=2,pp=2", "lm, long, tied", "1f1b"),
    stages("simple_ddp", "dp=2,pp=2", "deep", "gpipe"),
    stages("zero1", "dp=2,pp=2", "lm, long, gpt2", "interleaved"),
    stages("zero2", "dp=2,pp=2", "lm, long", "zb-h1"),
    stages("zero3", "dp=2,pp=2", "lm, long, tied", "zb-h1"),
    stages("zero3", "dp=2,pp=2", "deep", "interleaved"),
    stages("tp", "pp=4", "lm, long, tied", "1f1b", FEWER),  # fewer micro-batches than stages
    stages("zero1", "pp=3", "lm, long, tied", "zb-h1", FEWER),
    stages(
        "tp", "pp=2", "lm, long, tied", "interleaved", [[[2]], [[1, 2, 1]], [[2, 2, 2]]]
    ),  # no multiple of the ranks
    stages("zero3", "dp=2,pp=2", "lm, long, tied", "1f1b", "some have none"),
    stages("tp", "dp=2,pp=2", "lm, long", "gpipe", **AGAIN),
    *(
        stages(choice, "dp=2,pp=2", "lm, long, masked", schedule, "uneven")
        for choice, schedule in (("tp", "1f1b"), ("zero3", "gpipe"), ("zero1", "zb-h1"))
    ),
    stages("zero3", "dp=2,pp=2", "lm, long", "interleaved", **AGAIN),
    stages("zero1", "pp=2", "lm, long", "1f1b", activation_checkpointing="selective"),
    stages("zero1", "pp=2", "lm, long, tied", "zb-h1", loss_chunks=2),
    *(
        stages("pytorch_pp", mesh, model, schedule, [[[2, 2, 2, 2]], [[1] * 8], [[1] * 8]])
        for mesh, model, schedule in (
            *(("pp=2", "deep", "gpipe"), ("pp=4", "lm, long", "1f1b")),
            *(("pp=2", "lm, long", "interleaved"), ("pp=4", "deep", "zb-h1")),
        )
    ),
    stages("zero1", "dp=2,pp=2,tp=2", "lm, llama", "zb-h1", **TOKENS),
    stages("zero2", "dp=2,pp=2,tp=2", "lm, gpt2", "1f1b", **TOKENS, **AGAIN),
    stages("tp", "dp=2,pp=2,tp=2", "lm, gqa", "gpipe"),
    stages("zero3", "replicate=2,shard=2,pp=2", "lm, long, gpt2", "interleaved"),
]
PARTS = [
    tokens("tp", "cp=2", "lm, llama"),
    tokens("simple_ddp", "cp=3", "lm, gqa", "ring"),
    tokens("zero1", "cp=4", "lm, gqa, documents"),
    tokens("zero2", "dp=2,cp=2", "lm, gpt2, padded"),
    tokens("zero3", "dp=2,cp=2", "lm, gqa, documents", "ulysses"),
    tokens("zero1", "cp=2,tp=2", "lm, gqa, documents", "ring"),
    tokens("zero3", "cp=2,tp=2", "lm, llama", "ulysses"),
    tokens("tp", "pp=2,cp=2", "lm, llama"),
    tokens("zero3", "replicate=2,shard=1,cp=2", "lm, llama"),
    tokens("zero1", "cp=2", "lm, gqa, documents", again="selective"),
    tokens("zero2", "cp=2", "lm, llama", "ulysses", "selective"),
    tokens("tp", "cp=2", "lm, qwen2", again="selective"),
    tokens("tp", "cp=2", "lm, gqa", again="block", precision="bf16"),
    tokens("zero1", "cp=2", "lm, gqa, documents", "pytorch_cp", "block"),
    tokens("zero3", "cp=3", "lm, llama", "pytorch_cp"),
    tokens("tp", "dp=2,cp=2", "lm, gpt2, padded", "pytorch_cp"),
]
MIXTURES = [
    experts("simple_ddp", "ep=2", "lm, qwen", "one each"),
    experts("tp", "dp=2,ep=2", "lm, mixtral", bucket_cap_mb=0.01),
    experts("zero1", "ep=4", "lm, mixtral, masked"),
    experts("zero3", "dp=2,ep=2", "lm, mixtral, no term", **AGAIN),
    experts("zero2", "ep=2,tp=2", "lm, mixtral", activation_checkpointing="selective"),
    experts("zero3", "ep=2,tp=2", "lm, qwen3", "one each"),
    experts("simple_ddp", "ep=2,tp=2", "lm, mixtral", **BF16),
    experts("transformers_ep", "dp=2,ep=2", "lm, mixtral, no term"),
    experts("transformers_ep", "ep=2", "lm, mixtral, no term", activation_checkpointing="selective"),
]
MORE = [
    *(shards(choice, mesh, model, {} if mesh == TALL else SMALL, "sgd" if mesh == WIDE else "adam", clip=0.5)
      for choice in ("zero1", "zero2", "zero3", "pytorch_zero2", "pytorch_zero3")
      for mesh in (FOUR, WIDE, TALL) for model in ("plain", "tied", "frozen", "adapted", "odd", "llama")),
    *(layers(choice, mesh, model, TOKENS if "q" in model else {})
      for choice in ("tp", "simple_ddp", "zero1", "zero2", "zero3")
      for mesh in ("tp=2", "dp=3,tp=2", "dp=2,tp=3", "tp=6") for model in ("lm, llama", "lm, gqa", "lm, gpt2")
      if model != "lm, gqa" or "tp=3" not in mesh),
    *(stages(choice, "dp=2,pp=2", model, schedule)
      for choice in ("tp", "simple_ddp", "zero1", "zero2", "zero3")
      for model in ("lm, long", "lm, long, gpt2", "deep") for schedule in ("gpipe", "1f1b", "interleaved", "zb-h1")),
    *(experts(choice, mesh, model, split)
      for choice in ("tp", "simple_ddp", "zero1", "zero2", "zero3")
      for mesh in ("dp=2,ep=2", "ep=2,tp=2", "dp=2,ep=1,tp=2") for model in ("lm, mixtral", "lm, qwen3")
      for split in ("one each", "some have none")),
]  # fmt: skip


ROWS = [*SHARDS, *LAYERS, *STAGES, *PARTS, *MIXTURES]
COST = {2: 2, 3: 3, 4: 4, 6: 6, 8: 8}
"""Of a row on so many ranks."""


def kinds_of(case: Case) -> set[Any]:
    """Of each kind, one row is enough: the choice on all its dimensions; model, split and settings on the first one."""
    dimension, *dimensions = (name for name in ("pp", "cp", "ep", "tp", "replicate") if name in case.dims.degrees)
    settings = {"model": case.model, "split": str(case.split), **case.options} | {"bucket_cap_mb": 0}
    return {(case.choice, dimension, *dimensions), *((dimension, *setting) for setting in settings.items())}


DEFAULT = cover(ROWS, kinds_of, lambda case: COST[case.dims.size])


@pytest.mark.parametrize("case", DEFAULT, ids=str)
def test_parity(ranks: RankPool, case: Case):
    check(ranks, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*(case for case in ROWS if case not in DEFAULT), *MORE], ids=str)
def test_more(ranks: RankPool, case: Case):
    check(ranks, case)

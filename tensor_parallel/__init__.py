"""Hand-written tensor parallelism, under the data-parallel and sharded strategies, with PyTorch's own beside it.

Reading order: operators, layers, cross_entropy, sequence, plan, parallelize.
"""

from ddp_lab.strategy.registry import Registry

REGISTRY = Registry(
    {
        "tp": ("ddp.bucket_ddp_async:BucketDDP", "layers cut over tp; gradients all-reduced over dp in buckets"),
        "simple_ddp": ("ddp.simple_ddp:SimpleDDP", "the same, but each gradient all-reduced after backward"),
        "zero1": ("sharding.zero1:Zero1", "layers cut over tp; optimizer states sharded over dp"),
        "zero2": ("sharding.zero2:Zero2", "gradients too"),
        "zero3": ("sharding.options.any_order:Zero3InAnyOrder", "parameters too"),
        "pytorch_tp": ("reference.pytorch_tp:PyTorchTP", "parallelize_module, without dp"),
        "pytorch_fsdp_tp": ("reference.pytorch_tp:PyTorchFSDPTP", "parallelize_module, with fully_shard over dp"),
        "transformers_ep": ("reference.transformers_ep:TransformersEP", "transformers' AllToAllEP, with fully_shard"),
        "pytorch_pp": ("reference.pytorch_pp:PyTorchPP", "torch.distributed.pipelining, without dp and tp"),
    },
    parallelize={
        "": "expert_parallel.parallelize:parallelize_for",
        "pytorch_tp": "reference.pytorch_tp:parallelize_by_torch",
        "pytorch_fsdp_tp": "reference.pytorch_tp:parallelize_by_torch",
        "pytorch_pp": "reference.pytorch_pp:cut_by_torch",
        "transformers_ep": "reference.transformers_ep:parallelize_by_transformers",
    },
)
CHOICES = REGISTRY.names
load = REGISTRY.load

"""Hand-written sharding (ZeRO), one stage a file, with PyTorch's own beside it.

Reading order: zero1, zero2, zero3 (docs/how-it-works/README.md names the files that each one needs). What they are made
of is in `parts`. What serves options, or models that are not plain, is in `options`: a first reader may skip it.
"""

from ddp_lab.strategy.registry import Registry

REGISTRY = Registry(
    {
        "baseline": ("ddp.bucket_ddp_async:BucketDDP", "replicated with overlap, nothing sharded: the yardstick"),
        "zero1": ("sharding.zero1:Zero1", "optimizer states sharded; gradients reduce-scattered, parameters gathered"),
        "zero2": ("sharding.zero2:Zero2", "gradients too: each full gradient is freed when its bucket is reduced"),
        "zero3": (
            "sharding.options.any_order:Zero3InAnyOrder",
            "parameters too: each block is gathered just before it runs, then freed",
        ),
        "pytorch_zero1": ("reference.pytorch_zero1:PyTorchZero1", "DDP with ZeroRedundancyOptimizer"),
        "pytorch_zero2": ("reference.fsdp2:PyTorchZero2", "fully_shard, which keeps blocks whole until backward"),
        "pytorch_zero3": ("reference.fsdp2:PyTorchZero3", "fully_shard, which frees each block after forward"),
        "deepspeed_zero1": ("reference.deepspeed_zero:DeepSpeedZero1", "DeepSpeed, stage 1: optimizer states"),
        "deepspeed_zero2": ("reference.deepspeed_zero:DeepSpeedZero2", "DeepSpeed, stage 2: gradients too"),
        "deepspeed_zero3": ("reference.deepspeed_zero:DeepSpeedZero3", "DeepSpeed, stage 3: parameters too"),
    },
    extras={f"deepspeed_zero{stage}": "deepspeed" for stage in (1, 2, 3)},
    on_legacy_nccl=("baseline", "zero1", "pytorch_zero1"),
)
CHOICES = REGISTRY.names
load = REGISTRY.load

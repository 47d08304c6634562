"""Hand-written sharding (ZeRO), one stage a file, with PyTorch's own beside it."""

from training.registry import Registry

REGISTRY = Registry(
    {
        "baseline": ("ddp.bucket_ddp_async:BucketDDP", "replicated with overlap, nothing sharded: the yardstick"),
        "zero1": ("sharding.zero1:Zero1", "optimizer states sharded; gradients reduce-scattered, parameters gathered"),
        "zero2": ("sharding.zero2:Zero2", "gradients too: each full gradient is freed when its bucket is reduced"),
        "zero3": ("sharding.zero3:Zero3", "parameters too: each block is gathered just before it runs, then freed"),
    }
)
CHOICES = REGISTRY.names
load = REGISTRY.load

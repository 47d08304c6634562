"""Hand-written sharding (ZeRO), with PyTorch's own beside it."""

from training.registry import Registry

REGISTRY = Registry(
    {
        "baseline": ("ddp.bucket_ddp_async:BucketDDP", "replicated with overlap, nothing sharded: the yardstick"),
    }
)
CHOICES = REGISTRY.names
load = REGISTRY.load

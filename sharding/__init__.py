"""Hand-written sharding (ZeRO), with PyTorch's own beside it, and replicated training as the yardstick."""

from training.registry import Registry

REGISTRY = Registry(
    {
        "baseline": ("ddp.bucket_ddp_async:BucketDDP", "replicated, with overlap: what sharding is measured against"),
        "pytorch_zero1": ("reference.pytorch_zero1:PyTorchZero1", "DDP with ZeroRedundancyOptimizer"),
        "pytorch_zero2": ("reference.fsdp2:PyTorchZero2", "fully_shard, which keeps blocks whole until backward"),
        "pytorch_zero3": ("reference.fsdp2:PyTorchZero3", "fully_shard, which frees each block after forward"),
    }
)
CHOICES = REGISTRY.names
load = REGISTRY.load

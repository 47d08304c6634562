"""Hand-written data parallelism, one variant a file, with PyTorch's own beside them.

Reading order: simple_ddp, simple_ddp_ga, flat_ddp, simple_ddp_hook, simple_ddp_async, bucket_ddp_async
(docs/how-it-works/README.md names the files that each one needs).
"""

from ddp_lab.strategy.registry import Registry

REGISTRY = Registry(
    {
        "simple_ddp": ("ddp.simple_ddp:SimpleDDP", "all-reduce each gradient after backward, at every micro-batch"),
        "simple_ddp_ga": ("ddp.simple_ddp_ga:SimpleDDPAccumulated", "the same, on the last micro-batch only"),
        "flat_ddp": ("ddp.flat_ddp:FlatDDP", "one all-reduce of all gradients, flattened into one tensor"),
        "simple_ddp_hook": ("ddp.simple_ddp_hook:HookDDP", "a blocking all-reduce as each gradient becomes ready"),
        "simple_ddp_async": ("ddp.simple_ddp_async:AsyncDDP", "a non-blocking all-reduce as each gradient is ready"),
        "bucket_ddp_async": ("ddp.bucket_ddp_async:BucketDDP", "non-blocking all-reduces of buckets of gradients"),
        "pytorch_ddp": ("reference.pytorch_ddp:PyTorchDDP", "torch.nn.parallel.DistributedDataParallel, tuned"),
        "pytorch_ddp_plain": ("reference.pytorch_ddp:PlainPyTorchDDP", "the same with torch's default settings"),
    },
    not_swept=("pytorch_ddp_plain",),
    on_legacy_nccl=("bucket_ddp_async", "pytorch_ddp"),
)
CHOICES = REGISTRY.names
load = REGISTRY.load

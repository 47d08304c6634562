"""PyTorch's own data parallelism, `torch.nn.parallel.DistributedDataParallel`: `pytorch_ddp` and `pytorch_ddp_plain`.

It does in C++ what `bucket_ddp_async` does. Buckets have 25 MiB, the first one 1 MiB. After the first step they are
rebuilt in the order in which gradients became ready. They are all-reduced while backward continues; over torch's
`nccl` backward waits for every bucket, by its source (docs/status.md). It averages over ranks, so losses are weighted
accordingly. `pytorch_ddp_plain` has the default settings: gradients are copied into buckets and back, and held twice.
`pytorch_ddp` has those that torch's docstring gives for memory; what else was tried is in
docs/how-it-works/README.md#settings-of-the-originals.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.account import ModelSize
from ddp_lab.strategy.batches import MicroBatch
from ddp_lab.strategy.communication.bf16 import Bf16
from ddp_lab.strategy.communication.int8 import Int8
from ddp_lab.strategy.modules import TensorsBeside
from ddp_lab.strategy.replicated import ReplicatedStrategy


class PyTorchDDP(ReplicatedStrategy):
    """DistributedDataParallel with the interface of all strategies."""

    always_averages = reduces_in_backward = True
    reduces_given_gradients = False
    deciding_steps = 2  # after the first, DDP rebuilds its buckets
    settings: ClassVar[dict[str, Any]] = {"gradient_as_bucket_view": True, "lazy_bucket_allocation": True}

    def prepare(self) -> None:  # DistributedDataParallel broadcasts rank 0's parameters and buffers itself
        self.make_compression()
        cap_bytes = self.options.fixed_bucket_bytes
        self.ddp = DistributedDataParallel(
            TensorsBeside(self.module),
            process_group=self.process_group,
            bucket_cap_mb=None if cap_bytes is None else cap_bytes / 2**20,
            find_unused_parameters=self.options.find_unused_parameters,
            **self.settings,
        )
        if self.options.find_unused_parameters:  # then DDP runs hooks of parameters that get no gradient
            self.watch.look_at_each()
        if isinstance(self.compression, Bf16):
            self.ddp.register_comm_hook(self.process_group, bf16_compress_hook)
        elif self.compression is not None:
            self.ddp.register_comm_hook(self.compression, reduce_bucket)

    def relearn(self, first_step: Callable[[], Sequence[MicroBatch]]) -> None:
        """Repeat the first step, so that DDP builds its buckets from the same order of gradients."""
        self.forward_backward(first_step())
        self.zero_grad()
        self.deciding_steps = 0

    def before_step(self) -> None:
        """Does nothing: DDP broadcasts the buffers in the first forward pass of a step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.steps.in_micro_batch:
            _, answer = self.ddp(*args, **kwargs)
            return answer
        return self.module(*args, **kwargs)

    def before_micro_batch(self) -> None:
        super().before_micro_batch()
        self.ddp.require_backward_grad_sync = self.steps.reduces_now  # what its own `no_sync` sets

    def finish_gradient_synchronization(self) -> None:
        """Only checks for unused parameters: DDP's backward returns when its buckets are reduced."""
        if self.options.find_unused_parameters:
            return
        received = self.watch.received_in_last_round()
        unused = [name for name, used in zip(self.trainable, received, strict=True) if not used]
        if unused:
            raise UnsupportedError(
                f"no gradient for {', '.join(unused)} in this step, so DDP's buckets never fill; "
                "pass --find-unused-parameters"
            )


class PlainPyTorchDDP(PyTorchDDP):
    """DistributedDataParallel as it is without a setting."""

    settings: ClassVar[dict[str, Any]] = {}

    def memory_breakdown(self) -> dict[str, int]:
        """Like the base class, plus DDP's buckets, whose sizes come from DDP's own record: Python cannot see them."""
        memory = super().memory_breakdown()
        memory["gradients"] += self.communication_bytes()
        return memory

    def communication_bytes(self) -> int:
        return sum(bucket_bytes(self.ddp))

    def expected_memory(self, size: ModelSize) -> dict[str, int]:
        """Gradients count twice: in the parameters' own tensors, and in DDP's buckets."""
        expected = super().expected_memory(size)
        return expected | {"gradients": 2 * expected["gradients"]}


def reduce_bucket(compression: Int8, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP, which calls it in the order of its buckets on all ranks."""
    compression.all_reduce(bucket.buffer()).wait()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def bucket_bytes(ddp: DistributedDataParallel) -> list[int]:
    """Bytes of each of DDP's buckets: those built at first, or those rebuilt after the first step."""
    record = ddp._get_ddp_logging_data()
    sizes = record["rebuilt_bucket_sizes" if record.get("has_rebuilt_buckets") else "bucket_sizes"]
    return [int(size) for size in sizes.split(",")]

"""Offload: a rank's shard, its optimizer states and the update itself leave the device for the host.

A device holds little, and a host much. The optimizer touches every state once a step, and multiplies nothing large. So
ZeRO-Offload (Ren et al., 2021, USENIX ATC) keeps the shard and its optimizer states in host memory, and the CPU updates
them. Of one rank, in fp32 with AdamW, 16 P / N bytes are then on the host: shard, gradient and two states.

- `optimizer`: the device keeps what it computes with: zero1 and zero2 the whole parameters, zero3 a copy of its shard.
- `parameters` (zero3): the device keeps nothing. A unit's shard is copied to it when the unit is gathered.

What an update does, bucket by bucket: the gradient's shard is copied to pinned memory, on a stream of its own; the CPU
updates the shard, while the next bucket's gradient arrives; the result is copied back.

With a folder, all this lies in memory-mapped files (Rajbhandari et al., 2021, "ZeRO-Infinity"). The system then keeps
in memory what it has room for. The files have no name, so their space is free when the process ends, however it ends.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ddp_lab.runtime.errors import UnsupportedError
from sharding.options.placement import Offload
from sharding.parts.flat import FlatParameters
from sharding.parts.gradient_buckets import GradientBucket


class HostUpdate:
    """Runs an optimizer whose parameters are in host memory.

    Args:
        buckets: The gradients, on the device, in the order in which they are updated.

    Attributes:
        gradients: Copies in host memory, one for each bucket.
    """

    def __init__(self, offload: Offload, optimizer: torch.optim.Optimizer, buckets: Sequence[GradientBucket]) -> None:
        self._offload, self._optimizer, self._buckets = offload, optimizer, buckets
        device = buckets[0].flat.full.device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.gradients = [offload.empty(b.flat.shard.shape, b.flat.dtype, is_copied=True) for b in buckets]

    def run(self, publish: Callable[[FlatParameters], None]) -> None:
        """Update the shards of all buckets, and `publish` each at once."""
        arrivals = [
            self._copy(bucket, gradient) for bucket, gradient in zip(self._buckets, self.gradients, strict=True)
        ]
        for bucket, gradient, arrived in zip(self._buckets, self.gradients, arrivals, strict=True):
            if arrived is not None:
                arrived.synchronize()
            flat = bucket.flat
            for place, (parameter, piece) in zip(flat.places, flat.updated.items(), strict=True):
                is_used = flat.pieces[parameter].grad is not None
                piece.grad = gradient[place.start : place.end] if is_used else None
            with only(self._optimizer, flat.updated.values()):
                self._optimizer.step()
            for piece in flat.updated.values():
                piece.grad = None
            if self._offload.folder is not None:
                self._move_states(flat)
            publish(flat)

    def _copy(self, bucket: GradientBucket, gradient: Tensor) -> torch.cuda.Event | None:
        """Start to copy the bucket's shard into `gradient`. Returns the event to wait for on a GPU."""
        if self._stream is None:
            if bucket.shard is not None:
                gradient.copy_(bucket.shard)
            return None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if bucket.shard is not None:
                gradient.copy_(bucket.shard, non_blocking=True)
                bucket.shard.record_stream(self._stream)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived

    def _move_states(self, flat: FlatParameters) -> None:
        """Move new states into files, before those of the next bucket are made."""
        for piece in flat.updated.values():
            state = self._optimizer.state.get(piece, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == piece.shape and not value.untyped_storage().filename:
                    state[name] = self._offload.empty(value.shape, value.dtype).copy_(value)


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Within this context, `optimizer` holds `parameters` alone, with their settings and states.

    Raises:
        UnsupportedError: A step has changed a setting of a whole group, such as a count of steps. Such an optimizer
            must update all parameters together.
    """
    groups, chosen = optimizer.param_groups, set(parameters)
    parts = [{**group, "params": [p for p in group["params"] if p in chosen]} for group in groups]
    optimizer.param_groups = parts
    try:
        yield
    finally:
        optimizer.param_groups = groups
    for group, part in zip(groups, parts, strict=True):
        changed = [name for name in part if name != "params" and part[name] is not group.get(name)]
        if changed:
            raise UnsupportedError(
                f"--offload updates bucket by bucket, but {type(optimizer).__name__} keeps {', '.join(changed)} for a "
                "whole parameter group"
            )

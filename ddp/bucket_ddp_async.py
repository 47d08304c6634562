"""Buckets: group gradients, and all-reduce a whole bucket as soon as its last gradient is ready, without waiting.

`simple_ddp_async` pays the latency of a collective once a parameter; `flat_ddp` pays it once, but hides nothing.
Buckets lie in between: each is a flat buffer that holds the gradients of neighbouring parameters, up to a size cap. The
traffic is that of all the others, 2(N-1)/N * P elements, in ceil(bytes / cap) or a few more all-reduces. A small cap
starts communication earlier and leaves less of it after backward; a large one has fewer latencies.

Three things make it correct and cheap:
- Buckets are assigned once, in reversed parameter order (about the order in which backward makes gradients), and
  all-reduced in that order on every rank. Ranks that use different parameters then still reduce the same things.
- A gradient lives in its bucket: `parameter.grad` is a view into it. The first micro-batch's gradient is moved there
  while it is still in cache, later ones are added in place, and the optimizer reads it there. So nothing is
  flattened, copied back or set to zero.
- Losses are weighted by their share of the global batch before backward, so the all-reduced sum is already the mean,
  and no pass divides it.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.replicated import ReplicatedStrategy, bytes_of
from training.traffic import Collective

DEFAULT_CAP_MB = 25.0


class Bucket:
    """A flat buffer of gradients that are all-reduced together.

    Args:
        parameters: Of one dtype and device; their gradients lie in the buffer in this order.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self.flat = torch.zeros(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        pieces = self.flat.split([p.numel() for p in parameters])
        self.views = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
        self.missing = len(parameters)
        self.work: dist.Work | None = None

    def place_gradient(self, slot: int) -> None:
        """Make `.grad` of the parameter in `slot` the view into this bucket, with the same values."""
        parameter, view = self.parameters[slot], self.views[slot]
        if parameter.grad is None:
            view.zero_()
        elif parameter.grad is not view:
            view.copy_(parameter.grad)
        parameter.grad = view

    def all_reduce(self, group: dist.ProcessGroup) -> None:
        """Start the sum over ranks."""
        for slot in range(len(self.parameters)):
            if self.parameters[slot].grad is not self.views[slot]:  # not used on this rank in this step
                self.place_gradient(slot)
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def reset(self) -> None:
        """Await the gradients of the next step."""
        self.missing = len(self.parameters)
        self.work = None


def fill_buckets(parameters: Iterable[nn.Parameter], cap_bytes: float) -> list[list[nn.Parameter]]:
    """Fill buckets with `parameters` in reversed order, a new one where dtype changes or `cap_bytes` would be passed.

    A parameter larger than `cap_bytes` gets a bucket of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    for parameter in reversed(list(parameters)):
        fits = buckets and buckets[-1][0].dtype == parameter.dtype and buckets[-1][0].device == parameter.device
        if fits and bytes_of(buckets[-1]) + bytes_of([parameter]) <= cap_bytes:
            buckets[-1].append(parameter)
        else:
            buckets.append([parameter])
    return buckets


class BucketDDP(ReplicatedStrategy):
    """Non-blocking all-reduces, one a bucket, started during the last backward pass of a step."""

    def prepare(self) -> None:
        super().prepare()
        cap_bytes = (self.options.bucket_cap_mb or DEFAULT_CAP_MB) * 2**20
        self.buckets = [Bucket(parameters) for parameters in fill_buckets(self.trainable.values(), cap_bytes)]
        self._started = 0
        for bucket in self.buckets:
            for slot, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._on_gradient_ready(bucket, slot))

    def before_step(self) -> None:
        super().before_step()
        self._started = 0
        for bucket in self.buckets:
            bucket.reset()

    def _on_gradient_ready(self, bucket: Bucket, slot: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if bucket.work is not None:
                raise RuntimeError("a parameter received a second gradient while its bucket was being reduced")
            bucket.place_gradient(slot)
            if not self.synchronizes_gradients:
                return
            bucket.missing -= 1
            while self._started < len(self.buckets) and self.buckets[self._started].missing == 0:
                self._start_next()

        return hook

    def _start_next(self) -> None:
        self.buckets[self._started].all_reduce(self.process_group)
        self._started += 1

    def finish_gradient_synchronization(self) -> None:
        while self._started < len(self.buckets):  # those that wait for a gradient that backward did not make
            self._start_next()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()

    def gradient_tensors(self) -> Iterable[Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        return self.gradient_all_reduces([bytes_of([bucket.flat]) for bucket in self.buckets])

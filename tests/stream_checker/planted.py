"""Races, each planted by replacing one function. By luck, all pass every test over Gloo that looks at results."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ddp.buckets import Bucket
from ddp.flat_ddp import FlatDDP
from ddp.simple_ddp_async import AsyncDDP
from ddp.simple_ddp_hook import HookDDP
from ddp_lab.strategy import replicated
from ddp_lab.strategy.communication.collectives import free
from pipeline_parallel.channels import Channel, Receipt
from sharding.options.arrivals import Arrivals
from sharding.options.units import Embeddings
from sharding.parts.gradient_buckets import GradientBucket, ShardedGradientBucket
from sharding.parts.unit import Unit


@dataclass(frozen=True)
class Planted:
    """A race.

    Attributes:
        holder, name, function: `function` replaces the attribute `name` of `holder`.
        more: Further arguments of `checked`.
        says: Must be in the text of a race.
    """

    fault: str
    choice: str
    holder: Any
    name: str
    function: Callable[..., Any]
    says: str
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def there(self):
        with mock.patch.object(self.holder, self.name, self.function):
            yield


def async_without_wait(self):
    HookDDP.finish_gradient_synchronization(self)
    self._in_flight.clear()


plain_reduce = AsyncDDP._reduce


def zeroed_in_flight(self, gradient):
    plain_reduce(self, gradient)
    gradient.add_(0)


def dropped_while_in_flight(self):
    received = torch.empty(40)
    dist.all_gather_into_tensor(received, torch.ones(10), group=self.process_group, async_op=True)


def never_arrives(self, flats):
    for flat in flats:
        self._pending.pop(flat, None)


def shard_without_wait(self):
    self.in_flight = None
    for parameter in self.flat.parameters:
        parameter.grad = None


plain_reduction = ShardedGradientBucket.start_reduction


def freed_before_wait(self):
    plain_reduction(self)
    free(self.full)


plain_wait_for_unshard = Unit.wait_for_unshard


def used_before_it_arrived(self):
    if isinstance(self, Embeddings):  # it counts the references to its tensors
        plain_wait_for_unshard(self)
    elif self._gathers is not None:
        for flat in self.flats:
            flat.use_full()
        self._gathers = None


plain_broadcast = replicated.broadcast_from_rank0


def buffers_without_wait(tensors, group):
    if any(tensor.requires_grad for tensor in tensors):
        plain_broadcast(tensors, group)
        return
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=0, async_op=True)


def used_on_its_way(self):
    self._channel.post_until(self)
    return self.into


plain_send = Channel.send


def changed_on_its_way(self, key, tensor, name=None):
    plain_send(self, key, tensor, name)
    tensor.mul_(1)


STAGES = {"model": "lm, long", "more": {"schedule": "interleaved"}}
BUCKETS = {"bucket_cap_mb": 0.0005}
PLANTED = [
    Planted("gradients are not waited for", "simple_ddp_async", AsyncDDP, "finish_gradient_synchronization",
            async_without_wait, "what all_reduce issued at"),
    Planted("a gradient is changed while it is reduced", "simple_ddp_async", AsyncDDP, "_reduce", zeroed_in_flight,
            "add_ at tests/stream_checker/planted.py"),
    Planted("a tensor is dropped while it is gathered", "flat_ddp", FlatDDP, "finish_gradient_synchronization",
            dropped_while_in_flight, "the end of its last tensor"),
    Planted("a bucket is read before it is reduced", "bucket_ddp_async", Bucket, "wait", lambda bucket: None,
            "what all_reduce issued at", options=BUCKETS),
    Planted("forward does not wait for parameters", "zero1", Arrivals, "_wait_for", never_arrives,
            "what all_gather issued at", options=BUCKETS),
    Planted("a shard is read before it is reduced", "zero1", GradientBucket, "finish_reduction", shard_without_wait,
            "what reduce_scatter issued at", options=BUCKETS),
    Planted("a bucket is freed while it is reduced", "zero2", ShardedGradientBucket, "start_reduction",
            freed_before_wait, "resize_(0) at ddp_lab/strategy/communication/collectives.py", options=BUCKETS),
    Planted("a unit is used before it is whole", "zero3", Unit, "wait_for_unshard", used_before_it_arrived,
            "what all_gather issued at"),
    Planted("buffers are not waited for", "simple_ddp", replicated, "broadcast_from_rank0",
            buffers_without_wait, "what broadcast issued at", model="normed"),
    Planted("a stage does not wait for what it receives", "tp", Receipt, "tensor", used_on_its_way,
            "what receive issued at pipeline_parallel/channels.py", **STAGES),
    Planted("what a stage has sent is changed on its way", "tp", Channel, "send", changed_on_its_way,
            "mul_ at tests/stream_checker/planted.py", **STAGES),
]  # fmt: skip

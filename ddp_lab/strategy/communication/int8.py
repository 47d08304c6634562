"""An all-reduce whose messages are int8 (`--compress int8`): about a quarter of the bytes of fp32 gradients.

Each block of 256 elements is sent as integers from -127 to 127 and one fp32 scale, the block's largest element / 127.
Integers of different scales cannot be added up on their way, so this is no all-reduce of the backend. It has two phases
(quantized gradients in ZeRO++: Wang et al., 2023, arXiv 2306.10209):
1. All-to-all: each rank cuts its gradient into a shard for each rank, and gets its own shard of all others. It averages
   them in fp32.
2. All-gather: each rank rounds its averaged shard again and sends it to all. A rank reads its own as the others do, so
   that all ranks have the same bits.

Rounding loses up to half a scale of an element, in both phases. What is lost is added to the next gradient before that
is rounded (error feedback: Seide et al., 2014, "1-bit stochastic gradient descent"; Karimireddy et al., 2019, arXiv
1901.09847). So it arrives a step later and does not add up: without this, an element that is always below half a scale
would never arrive. It takes 4 (1 + 1/N) bytes of memory an element.

An all-to-all begins at once, so that backward goes on meanwhile. All-gathers must begin in the same order on all ranks,
which have their all-to-alls at different times. So the first `wait` of a step begins them all, one after the other.
"""

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK = 256
"""The most elements that share a scale."""
LARGEST = 127
SCALE_BYTES = 4
FORGETTING_ROUNDS = 1
"""What is lost in the first round is forgotten, because DDP rebuilds its buckets after it."""


class Int8:
    """Rounded averages with error feedback. Calls are collective and in the same order on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._owed: dict[int, Owed] = {}
        self._rounds: dict[int, int] = {}
        self._started: list[Int8AllReduce] = []
        self._next_number = 0

    def begin_round(self) -> None:
        """The all-reduces of a backward pass follow: in every round of the same gradients, in the same order."""
        self._next_number = 0
        self._started.clear()  # a step may have been abandoned

    def all_reduce(self, gradient: Tensor) -> "Int8AllReduce":
        """Start to average `gradient` in place; the handle's `wait` ends it."""
        number = self._next_number
        self._next_number += 1
        self._rounds[number] = self._rounds.get(number, 0) + 1
        if self._rounds[number] <= FORGETTING_ROUNDS + 1:
            self._owed[number] = Owed(gradient, self._group.size())
        return Int8AllReduce(gradient, self._owed[number], self._group, self._started)


class Owed:
    """What messages have not yet told the other ranks of one gradient, in fp32.

    Attributes:
        whole: Of this rank's gradient, (ranks, blocks, elements of a block): dimension 0 is the shard of each rank.
        shard: Of the average of this rank's shard, (blocks, elements of a block).
    """

    def __init__(self, gradient: Tensor, ranks: int) -> None:
        # A small gradient has small blocks, that little is sent for padding.
        elements = min(BLOCK, max(1, ceil_divide(gradient.numel(), ranks)))
        blocks = max(1, ceil_divide(gradient.numel(), ranks * elements))
        self.whole = torch.zeros(ranks, blocks, elements, dtype=torch.float32, device=gradient.device)
        self.shard = torch.zeros(blocks, elements, dtype=torch.float32, device=gradient.device)


class Int8AllReduce:
    """An average that has been started: its all-to-all is under way.

    Args:
        started: All that are, in their order. This one is appended.
    """

    def __init__(self, gradient: Tensor, owed: Owed, group: dist.ProcessGroup, started: "list[Int8AllReduce]") -> None:
        self._gradient, self._owed, self._group, self._started = gradient, owed, group, started
        owed.whole.view(-1)[: gradient.numel()] += gradient.reshape(-1)
        self._sent = next_message(owed.whole)
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)
        started.append(self)

    def _begin_gather(self) -> None:
        self._wait_for_work()
        self._owed.shard += dequantize(self._received).mean(0)
        self._sent = next_message(self._owed.shard)
        self._received = torch.empty_like(self._received)
        self._work = dist.all_gather_into_tensor(
            self._received.view(-1), self._sent.view(-1), group=self._group, async_op=True
        )

    def wait(self) -> None:
        """Put the average into the gradient. Once, and in the same order on all ranks."""
        for started in self._started:
            started._begin_gather()
        self._started.clear()
        self._wait_for_work()
        averages = dequantize(self._received).view(-1)[: self._gradient.numel()]
        self._gradient.copy_(averages.view_as(self._gradient))
        del self._work, self._sent, self._received  # a kept handle keeps no memory

    def _wait_for_work(self) -> None:
        assert self._work is not None, "an asynchronous collective gives a handle"
        self._work.wait()


def next_message(owed: Tensor) -> Tensor:
    """Quantize what is owed, and leave in it what the message loses."""
    message = quantize(owed)
    owed -= dequantize(message)
    owed.nan_to_num_(0, 0, 0)  # NaN and infinity arrive in this step, and are not owed to the next one
    return message


def quantize(blocks: Tensor) -> Tensor:
    """Blocks as they are sent: int8 values followed by the bytes of their scale.

    A block with a NaN or an infinity gets a scale like it, so that none of it is finite when it arrives.

    Args:
        blocks: fp32, (..., elements of a block).

    Returns:
        uint8, (..., elements of a block + 4).
    """
    smallest = torch.finfo(blocks.dtype).tiny  # so that nothing is divided by 0
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST).clamp_min(smallest)
    values = (blocks / scales).round_().to(torch.int8)
    return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], -1)


def dequantize(message: Tensor) -> Tensor:
    """The fp32 values of what `quantize` gave, within half a scale of what they were."""
    values, scales = message.split([message.shape[-1] - SCALE_BYTES, SCALE_BYTES], -1)
    aligned = scales.clone(memory_format=torch.contiguous_format)  # as fp32 must be
    return values.view(torch.int8) * aligned.view(torch.float32)


def ceil_divide(number: int, divisor: int) -> int:
    return -(-number // divisor)

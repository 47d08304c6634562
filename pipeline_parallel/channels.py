"""How neighbours of a pipeline send tensors to each other.

Each pair of neighbours has two channels, one for each direction of travel, in a process group of its own. So
activations never queue behind gradients, and a pair of two ranks knows next from previous. Within a channel, messages
arrive in the order in which they were sent.

Sends and receives are posted and go on by themselves. The host waits for nothing that a device does.
"""

from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.groups import exchange_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Of hidden states."""
TOLD = 12
"""Numbers that tell the form of a tensor: its dtype, and its lengths along up to 11 dimensions."""


class Form(NamedTuple):
    """Of a tensor that a rank will receive."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def form_of(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.dtype)


class Channel:
    """From one rank to another.

    Args:
        group: These two ranks alone.
        source: The sender's number in `group`.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self.group, self.device, self._source = group, device, source
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        """Post a send. What has arrived by now is let go."""
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
        self._post(tensor.detach().contiguous())

    def _post(self, tensor: Tensor) -> None:
        work = dist.isend(tensor, group=self.group, group_dst=1 - self._source)
        assert work is not None, "both ranks are in the group"
        self._in_flight.append((work, tensor))

    def receive(self, form: Form) -> "Receipt":
        """Post a receive."""
        tensor = torch.empty(form.shape, dtype=form.dtype, device=self.device)
        work = dist.irecv(tensor, group=self.group, group_src=self._source)
        assert work is not None, "both ranks are in the group"
        return Receipt(tensor, work)

    def tell(self, form: Form) -> None:
        """Let the receiver know what tensors will look like. It waits for this in `ask`."""
        numbers = [DTYPES.index(form.dtype), *form.shape]
        self._post(torch.tensor(numbers + [-1] * (TOLD - len(numbers)), device=self._exchange_device))

    def ask(self) -> Form:
        told = torch.empty(TOLD, dtype=torch.int64, device=self._exchange_device)
        dist.recv(told, group=self.group, group_src=self._source)
        dtype, *shape = told.tolist()
        return Form(tuple(length for length in shape if length >= 0), DTYPES[dtype])

    @property
    def _exchange_device(self) -> torch.device:
        return exchange_device(self.group, self.device)

    def finish(self) -> None:
        """Return when all that was sent is on its way for good: on a GPU, when its stream waits for it."""
        while self._in_flight:
            self._in_flight.popleft()[0].wait()


class Receipt:
    """A tensor that is on its way."""

    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self._tensor, self._work = tensor, work

    def tensor(self) -> Tensor:
        """Wait until it is here; on a GPU, let the current stream wait."""
        self._work.wait()
        return self._tensor


Channels = Mapping[tuple[str, str], Channel]
"""Of a rank, by what travels (`activation`, `gradient`; `tied value`, `tied gradient`) and whether it goes `in` or
`out`."""


def open_channels(
    pipelines: list[list[int]], device: torch.device, is_ring: bool, ties: bool, timeout: timedelta
) -> Channels:
    """The channels of this rank. Collective over all ranks.

    Each is used once, one after the other, in the same order on all ranks. Otherwise two neighbours could set up
    connections over NCCL in crossing order, each waiting for the other.

    Args:
        pipelines: The ranks of each pipeline of the job, in the order of their stages.
        is_ring: The last rank is followed by the first.
        ties: The first and the last stage share a weight.
        timeout: How long a message may wait for its other end.
    """
    rank = dist.get_rank()
    found: dict[tuple[str, str], Channel] = {}
    for ranks in pipelines:
        pairs = list(pairwise(ranks)) + [(ranks[-1], ranks[0])] * is_ring
        ways = [("activation", pair) for pair in pairs] + [("gradient", pair[::-1]) for pair in pairs]
        ways += [("tied value", (ranks[0], ranks[-1])), ("tied gradient", (ranks[-1], ranks[0]))] * ties
        for what, ends in ways:
            group = dist.new_group(sorted(ends), timeout)
            if rank not in ends:
                continue
            assert isinstance(group, dist.ProcessGroup), "this rank is in it"
            channel = Channel(group, sorted(ends).index(ends[0]), device)
            found[what, "out" if rank == ends[0] else "in"] = channel
            if rank == ends[0]:
                channel.send(torch.zeros(1, dtype=torch.float32, device=device))
                channel.finish()
            else:
                channel.receive(Form((1,), torch.float32)).tensor()
    return found

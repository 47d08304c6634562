"""How neighbours of a pipeline send tensors to each other.

Each pair of neighbours has two channels, one for each direction of travel, in a process group of its own. So
activations never queue behind gradients, and a receive that is posted ahead holds back no send. Within a channel,
messages arrive in the order in which they were sent.

The host never waits for a device, except at the first message of a kind: its shape and dtype are sent first.
"""

from collections import deque
from collections.abc import Hashable, Mapping
from datetime import timedelta
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.errors import OneRankError
from ddp_lab.runtime.groups import exchange_device

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NOTHING = (0,)  # the shape of a stand-in for hidden states whose form is not known
FORM_NUMBERS = 12  # numbers of a tensor's form: its dtype, and its lengths along up to 11 dimensions


class Channel:
    """From one rank to another. Messages of one `key` have one shape and dtype.

    Args:
        group: These two ranks alone.
        source: The sender's number in `group`.
    """

    def __init__(self, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        self._group, self._source, self.device = group, source, device
        self._exchange_device = exchange_device(group, device)
        self._forms: dict[Hashable, tuple[torch.dtype, list[int]]] = {}
        self._in_flight: deque[tuple[Hashable, dist.Work, Tensor]] = deque()
        self._expected: deque[Receipt] = deque()  # not posted yet, in order

    def send(self, key: Hashable, tensor: Tensor, name: Hashable = None) -> None:
        """Post a send, and free the messages that have arrived."""
        while self._in_flight and self._in_flight[0][1].is_completed():
            self._in_flight.popleft()
        self.check(key, tensor)
        if key not in self._forms:
            self._forms[key] = tensor.dtype, list(tensor.shape)
            numbers = [DTYPES.index(tensor.dtype), *tensor.shape, *[-1] * (FORM_NUMBERS - 1 - tensor.ndim)]
            self._post(torch.tensor(numbers, dtype=torch.int64, device=self._exchange_device))
        self._post(tensor.detach().contiguous(), name)

    def check(self, key: Hashable, tensor: Tensor) -> None:
        """Refuse what cannot be sent."""
        form = tensor.dtype, list(tensor.shape)
        known_form = self._forms.get(key, form if tensor.dtype in DTYPES else "floating point")
        if known_form != form:
            raise OneRankError(f"a pipeline sends {form} where batches of this form lead to {known_form}")

    def stand_in(self, key: Hashable) -> Tensor:
        """NaN in the form of the message `key`, to send where a stage made no tensor."""
        dtype, shape = self._forms.get(key, (torch.float32, NOTHING))
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)

    def nbytes(self, key: Hashable) -> int:
        """Bytes of a message whose form is known."""
        dtype, shape = self._forms[key]
        return dtype.itemsize * prod(shape)

    def _post(self, tensor: Tensor, name: Hashable = None) -> None:
        work = dist.isend(tensor, group=self._group, group_dst=1 - self._source)
        assert work is not None, "both ranks are in the group"
        self._in_flight.append((name, work, tensor))

    def let_go(self, name: Hashable) -> None:
        """Free message `name`, which has arrived, and those before it. Gloo notices an arrival only in a wait."""
        while any(name == sent_name for sent_name, _, _ in self._in_flight):
            self._in_flight.popleft()[1].wait()

    def finish(self) -> None:
        """Wait for all that was sent; on a GPU, let the current stream wait."""
        while self._in_flight:
            self._in_flight.popleft()[1].wait()

    def receive(self, key: Hashable) -> "Receipt":
        """Post a receive, as soon as the form of the message is known."""
        receipt = Receipt(self, key)
        self._expected.append(receipt)
        while self._expected and self._expected[0].key in self._forms:
            self._post_receive()
        return receipt

    def post_until(self, receipt: "Receipt") -> None:
        """Receive unknown forms from the sender, up to that of `receipt`. The host waits for them."""
        while receipt.work is None:
            if self._expected[0].key not in self._forms:
                numbers = torch.empty(FORM_NUMBERS, dtype=torch.int64, device=self._exchange_device)
                dist.recv(numbers, group=self._group, group_src=self._source)
                dtype, *shape = numbers.tolist()
                self._forms[self._expected[0].key] = DTYPES[dtype], [length for length in shape if length >= 0]
            self._post_receive()

    def _post_receive(self) -> None:
        receipt = self._expected.popleft()
        dtype, shape = self._forms[receipt.key]
        receipt.into = torch.empty(shape, dtype=dtype, device=self.device)
        receipt.work = dist.irecv(receipt.into, group=self._group, group_src=self._source)


class Receipt:
    """A tensor in flight."""

    def __init__(self, channel: Channel, key: Hashable) -> None:
        self._channel, self.key = channel, key
        self.into: Tensor | None = None
        self.work: dist.Work | None = None

    def tensor(self) -> Tensor:
        """Wait until it has arrived; on a GPU, let the current stream wait."""
        self._channel.post_until(self)
        assert self.work is not None and self.into is not None, "it is posted"
        self.work.wait()
        return self.into


Channels = Mapping[tuple[str, str], Channel]
"""Of a rank, by what travels (`activation`, `gradient`, `tied value`, `tied gradient`), and `in` or `out`."""


def open_channels(
    pipelines: list[list[int]], device: torch.device, is_ring: bool, ties: bool, timeout: timedelta
) -> Channels:
    """The channels of this rank. Collective over all ranks.

    Each is used once, one after the other, in the same order on all ranks. Otherwise two neighbours could set up
    connections over NCCL in crossing order, each waiting for the other. `ties`: the first and the last stage share a
    weight.
    """
    rank = dist.get_rank()
    channels: dict[tuple[str, str], Channel] = {}
    for ranks in pipelines:
        stage = {member: number for number, member in enumerate(ranks)}
        pairs = list(pairwise(ranks)) + [(ranks[-1], ranks[0])] * is_ring
        ways = [("activation", pair) for pair in pairs] + [("gradient", pair[::-1]) for pair in pairs]
        ways += [("tied value", (ranks[0], ranks[-1])), ("tied gradient", (ranks[-1], ranks[0]))] * ties
        for content, ends in ways:
            name = f"stage {stage[ends[0]]}-{stage[ends[1]]} {content}s"
            group = dist.new_group(sorted(ends), timeout, group_desc=name)
            if rank not in ends or not isinstance(group, dist.ProcessGroup):
                continue
            channel = Channel(group, sorted(ends).index(ends[0]), device)
            channels[content, "out" if rank == ends[0] else "in"] = channel
            if rank == ends[0]:
                channel.send("opening", torch.zeros(1, dtype=torch.float32, device=device))
                channel.finish()
            else:
                channel.receive("opening").tensor()
    return channels

"""The one exchange of an optimizer step: a row of numbers from each rank, after the last backward pass.

| columns | what a rank says |
|---|---|
| counts | what it holds of the next step, if its loop knows, and whether it wants to stop |
| digests | of the collectives that it has issued, and of which parameters received a gradient |
| shares | its part of the mean loss, and the square of its part of the gradients' norm |

It is an all-gather: a maximum may lose a NaN, and a sum does not say whose it is. Only where digests differ does a
second exchange ask for details.

On a GPU the shares are on the device, and a host that reads them would wait until the device has done all that is
queued. So the shares are added up there, by an all-reduce, and the rest is exchanged between the hosts. `found_inf`
stays on the device: a fused optimizer reads it there, and then changes nothing, as `torch.amp.GradScaler` has it. The
host reads the sums a step later, from pinned memory. In fp64 the square of any fp32 norm is finite.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.runtime.groups import exchange_device
from ddp_lab.strategy.account import EVERYONE, Collective
from ddp_lab.strategy.gradient_watch import agree_on_sequence, digest

LACKS_ANY, WANTS_TO_STOP, IS_UNKNOWN = 1, 2, 4
"""Flags of counts: no micro-batch to repeat if others hold more; asked to stop after this step; nothing known yet."""
OF_GROUP, OF_MODEL, OF_RECEIVED, LOSS, SQUARE = range(4, 9)
"""Columns after the counts."""
FP64 = 8
"""Bytes of an element of a row."""

Rows = list[list[float]]
"""The rows of all ranks, in the order of their numbers. NaN and infinity come as they are."""


class Counts(NamedTuple):
    """What a rank holds of a step: the first columns of its row.

    Attributes:
        weight: Of its micro-batches: their samples, or whatever else their losses are means over.
        micro_batches: How many.
        tokens: In them; 0 if nobody counts.
        flags: A sum of the flags above.
    """

    weight: float
    micro_batches: int
    tokens: int
    flags: int


UNKNOWN = Counts(0, 0, 0, IS_UNKNOWN)


@dataclass(frozen=True)
class GlobalBatch:
    """What all ranks together hold of a step. `rounds`: the most micro-batches that any rank has."""

    weight: float
    rounds: int
    tokens: int


class Exchange:
    """All-gathers of a few numbers a rank.

    Args:
        group: Ranks that see different samples, or different tokens of them.
        everyone: These, and ranks that see the same tokens and hold other parts of the model. They agree on how many
            micro-batches there are.
        model: Ranks that hold parts of the same layers, with consecutive numbers in `everyone`; None if there is only
            this one.
        module_device: Where loss and norm are.
        context_size: How many ranks of `group` are told the same tokens, of which each sees a part. As each then makes
            as many times its part of a loss, weights count them as ranks with samples of their own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        everyone: dist.ProcessGroup,
        model: dist.ProcessGroup | None,
        module_device: torch.device,
        context_size: int = 1,
    ) -> None:
        self._group, self._everyone, self._model, self._module_device = group, everyone, model, module_device
        members = dist.get_process_group_ranks(group)
        self._members = [dist.get_group_rank(everyone, rank) for rank in members]
        self._copies = dist.get_world_size(everyone) // len(members)  # ranks with the same tokens
        self._context_size = context_size
        self._details = 0  # columns of the second exchange of the latest step, if there was one
        self.announced: tuple[Counts, Rows] | None = None  # counts of the next step: this rank's, and all ranks'
        self.device = exchange_device(group, module_device)

    @property
    def shares_stay_on_device(self) -> bool:
        """Whether loss and norm are where a host that reads them would wait."""
        return self._module_device.type != self.device.type

    def expected_traffic(self) -> list[Collective]:
        """What a step like the latest sends beside what the strategy does, if the loop knows each next step."""
        everyone, group, on_device = dist.get_world_size(self._everyone), len(self._members), self.shares_stay_on_device
        columns = LOSS if on_device else SQUARE + 1
        traffic = [Collective("all_gather", 1, FP64 * columns * everyone, everyone, "bookkeeping", EVERYONE)]
        if on_device:
            traffic.append(Collective("all_reduce", 1, 2 * FP64, everyone, "bookkeeping", EVERYONE))
        if self._details:
            traffic.append(Collective("all_gather", 1, FP64 * self._details * group, group, "bookkeeping"))
        return traffic

    def run(
        self, following: Counts, received: Sequence[bool], make_shares: Callable[[], Tensor]
    ) -> tuple[Rows, Tensor]:
        """The exchange of a step. Collective.

        Args:
            following: What this rank holds of the next step.
            received: Whether each trainable parameter received a gradient on this rank.
            make_shares: Computes this rank's part of the loss, and of the squared norm: (2,) in fp64 on the module's
                device.

        Returns:
            The rows of all ranks, and the sums of the shares, (2,) on the module's device.
        """
        in_model = digest(self._model) if self._model is not None else 0
        row = [*following, digest(self._group), in_model, digest_of(received)]
        if self.shares_stay_on_device:
            exchange = self._begin(row, self._everyone)  # while the device makes the shares
            shares = make_shares()
            dist.all_reduce(shares, group=self._everyone)
            self.announced = following, self._finish(exchange)
            return self.announced[1], shares
        self.announced = following, self._all_gather([*row, *make_shares().tolist()])
        rows = self.announced[1]
        sums = [sum(row[LOSS] for row in rows), sum(row[SQUARE] for row in rows)]
        return rows, torch.tensor(sums, dtype=torch.float64, device=self._module_device)

    def require_same_sequence(self, rows: Rows) -> None:
        """Check that ranks have issued the same collectives. Collective if they have not.

        Raises:
            SequenceError: on every rank of a group in which they differ, or come in another order.
        """
        in_group = (rows[rank][OF_GROUP] for rank in self._members)
        if differ(in_group) and (problem := agree_on_sequence(self._group)):
            raise problem
        if self._model is None:
            return
        size, digests = dist.get_world_size(self._model), [row[OF_MODEL] for row in rows]
        is_same = not any(differ(digests[first : first + size]) for first in range(0, len(rows), size))
        if not is_same and (problem := agree_on_sequence(self._model, self._everyone)):
            raise problem

    def used(self, rows: Rows, received: Sequence[bool]) -> Sequence[bool]:
        """Whether each trainable parameter received a gradient on any rank. Collective if ranks differ."""
        self._details = len(received) if differ(rows[rank][OF_RECEIVED] for rank in self._members) else 0
        if not self._details:
            return received
        return [any(column) for column in zip(*self._all_gather(received, self._group), strict=True)]

    def tell(self, counts: Counts) -> None:
        """Announce this rank's counts of the next step. Collective."""
        self.announced = counts, self._all_gather(counts)

    def global_batch(self, counts: Counts, step: int) -> GlobalBatch:
        """The global batch of `step`, which begins: as announced in the previous step, or gathered now. `counts`: this
        rank's.
        """
        (announced, rows), self.announced = self.announced or (UNKNOWN, []), None
        if not announced.flags & IS_UNKNOWN and announced[:2] != counts[:2]:
            raise OneRankError(
                f"forward_backward() got {counts.micro_batches} micro-batches that weigh {counts.weight:g}, and the "
                f"other ranks were told that it would get {announced.micro_batches} that weigh {announced.weight:g}; "
                "pass as following= what the next call is given"
            )
        if not rows or has_flag(rows, IS_UNKNOWN):
            rows = self._all_gather(counts)
        weight, tokens = sum(row[0] for row in rows), sum(row[2] for row in rows)
        if not weight or has_flag(rows, LACKS_ANY):
            ranks = [rank for rank, row in enumerate(rows) if not row[1]]
            raise UnsupportedError(
                f"step {step}: no samples on ranks {ranks}; give each rank at least one in the first step, "
                "and at least one rank in every later step"
            )
        all_tokens = int(tokens) // (self._copies * self._context_size)
        return GlobalBatch(weight / self._copies, max(int(row[1]) for row in rows), all_tokens)

    def total(self, value: float) -> float:
        """The sum over ranks that see different samples. Collective."""
        return sum(self.all_gather(value)) / self._copies

    def all_gather(self, value: float) -> list[float]:
        """The values of all ranks that train this model. Collective."""
        return [value for (value,) in self._all_gather([value])]

    def _all_gather(self, row: Sequence[float], group: dist.ProcessGroup | None = None) -> Rows:
        return self._finish(self._begin(row, group or self._everyone))

    def _begin(self, row: Sequence[float], group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
        own_row = torch.tensor(row, dtype=torch.float64, device=self.device)
        table = own_row.new_empty(dist.get_world_size(group) * len(row))
        work = dist.all_gather_into_tensor(table, own_row, group=group, async_op=True)
        assert work is not None, "an asynchronous collective gives a handle"
        return table.view(-1, len(row)), work

    def _finish(self, exchange: tuple[Tensor, dist.Work]) -> Rows:
        table, work = exchange
        work.wait()
        return table.tolist()


def differ(values: Iterable[float]) -> bool:
    return len(set(values)) > 1


def has_flag(rows: Rows, flag: int) -> bool:
    """Whether any rank's counts have the flag."""
    return any(int(row[3]) & flag for row in rows)


def digest_of(received: Sequence[bool]) -> int:
    return int.from_bytes(hashlib.blake2b(bytes(received), digest_size=6).digest())

"""The two small exchanges of every optimizer step, the same for every strategy: what ranks hold, and how it went."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.errors import UnsupportedError

COUNTS_ROW_BYTES = 3 * 8
RESULTS_ROW_BYTES = 2 * 8
RECEIVED_BYTES = 8
"""What a rank sends, in fp64: three counts; two results, and a flag for each trainable parameter."""


class NonFiniteError(RuntimeError):
    """The loss or a gradient is NaN or infinite; raised on every rank, before the optimizer step."""


@dataclass(frozen=True)
class GlobalBatch:
    """What all ranks together hold in a step: samples, and the most micro-batches that any of them has."""

    samples: int
    rounds: int


class StepAgreement:
    """All-gathers of a few numbers a rank. Not reductions: MAX can lose a NaN, and SUM does not say whose it is.

    Args:
        module_device: Where the exchanges run if the group cannot carry CPU tensors. It should, since an exchange on a
            GPU makes the host wait for all that is queued there.
    """

    def __init__(self, group: dist.ProcessGroup, module_device: torch.device) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self.device = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else module_device

    def begin_counts(self, samples: int, micro_batches: int, lacks_any: bool) -> tuple[Tensor, dist.Work]:
        """Tell the others what this rank holds. `lacks_any`: it has nothing to run if others hold more."""
        return self._begin([samples, micro_batches, lacks_any])

    def counts(self, exchange: tuple[Tensor, dist.Work], step: int) -> GlobalBatch:
        """What all ranks together hold.

        Raises:
            UnsupportedError: on every rank, if that is nothing, or a rank has nothing to run.
        """
        table, work = exchange
        work.wait()
        samples, micro_batches, lacks_any = table.cpu().unbind(1)
        if lacks_any.any() or not samples.any():
            ranks = micro_batches.eq(0).nonzero().flatten().tolist()
            raise UnsupportedError(
                f"step {step}: no samples on ranks {ranks}; give each rank at least one in the first step, "
                "and at least one rank in every later step"
            )
        return GlobalBatch(samples=int(samples.sum()), rounds=int(micro_batches.max()))

    def results(self, loss: float, bad_round: int, received: Sequence[bool], step: int) -> tuple[float, list[bool]]:
        """The global mean loss, and for each trainable parameter whether any rank made a gradient for it.

        Args:
            loss: This rank's share of the mean.
            bad_round: The first micro-batch that left a gradient of this rank not finite, or -1.
            received: Whether each trainable parameter got a gradient on this rank.

        Raises:
            NonFiniteError: on every rank, if any rank's loss or gradient is not finite; names the ranks.
        """
        table, work = self._begin([loss, bad_round, *received])
        work.wait()
        table = table.cpu()
        losses, bad_rounds = table[:, 0], table[:, 1]
        culprits, what = losses.isfinite().logical_not(), "the loss"
        if not culprits.any() and (bad_rounds >= 0).any():
            # A strategy may reduce every micro-batch, which spreads a NaN: the ranks that had it first are to blame.
            culprits, what = bad_rounds.eq(bad_rounds[bad_rounds >= 0].min()), "a gradient"
        if culprits.any():
            ranks = ", ".join(map(str, culprits.nonzero().flatten().tolist()))
            raise NonFiniteError(
                f"step {step}: {what} is not finite on rank {ranks}; no rank has updated its parameters; "
                "a lower --lr or --clip-grad-norm may help"
            )
        return losses.sum().item(), (table[:, 2:].sum(0) > 0).tolist()

    def _begin(self, row: Sequence[float]) -> tuple[Tensor, dist.Work]:
        mine = torch.tensor(row, dtype=torch.float64, device=self.device)
        table = mine.new_empty(self._size * len(row))
        work = dist.all_gather_into_tensor(table, mine, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective gives a handle"
        return table.view(self._size, len(row)), work

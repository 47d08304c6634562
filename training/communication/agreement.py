"""The two small exchanges of every optimizer step: what each rank holds, and how forward and backward went."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed import has_cpu_backend
from training.errors import NonFiniteError, UnsupportedError
from training.watch import sequence

COUNTS_ROW_BYTES = 3 * 8
RESULTS_ROW_BYTES = 4 * 8
RECEIVED_BYTES = 8
"""Bytes that a rank sends, in fp64: three counts; three results, a digest, and a flag for each trainable parameter."""

PendingCounts = tuple[Tensor, dist.Work]
"""The exchange of what ranks hold, in flight."""


@dataclass(frozen=True)
class GlobalBatch:
    """A step's samples on all ranks together, and its rounds: the most micro-batches that any rank has."""

    samples: int
    rounds: int


@dataclass(frozen=True)
class StepResult:
    """How forward and backward of a step went on all ranks.

    Attributes:
        loss: The mean over the global batch.
        used: For each trainable parameter, whether any rank made a gradient for it.
        nonfinite: `the loss` or `a gradient`, if it is NaN or infinite on a rank.
        culprits: The ranks on which it was so first, if they are known.
    """

    loss: float
    used: list[bool]
    nonfinite: str | None = None
    culprits: Sequence[int] = ()

    def require_finite(self, step: int, updates_early: bool = False) -> None:
        """Raise NonFiniteError on every rank if the loss or a gradient is not finite on any.

        Args:
            updates_early: Whether parameters may have been updated before all gradients were reduced.
        """
        if self.nonfinite is None:
            return
        where = f"on rank {', '.join(map(str, self.culprits))}"
        if not self.culprits:
            where = "after the sum over ranks (each rank's own was finite when the step was run again)"
        updated = (
            "parameters of earlier buckets are updated already" if updates_early else "no parameter is updated yet"
        )
        error = NonFiniteError(
            f"step {step}: {self.nonfinite} is not finite {where}; {updated}; a lower --lr or --clip-grad-norm may help"
        )
        error.rank = self.culprits[0] if self.culprits else None
        raise error


class StepAgreement:
    """All-gathers of a few numbers a rank. Not reductions: MAX can lose a NaN, and SUM does not say whose it is.

    Args:
        module_device: Where the exchanges run if the group cannot carry CPU tensors. The CPU is better: an exchange on
            a GPU makes the host wait for all that is queued there.
    """

    def __init__(self, group: dist.ProcessGroup, module_device: torch.device) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self.device = torch.device("cpu") if has_cpu_backend(group) else module_device

    def begin_counts(self, samples: int, micro_batches: int, lacks_any: bool) -> PendingCounts:
        """Tell the others what this rank holds. `lacks_any`: it has no micro-batch to repeat if others hold more."""
        return self._begin([samples, micro_batches, lacks_any])

    def counts(self, exchange: PendingCounts, step: int) -> GlobalBatch:
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

    def results(self, loss: float, share_is_finite: bool, bad_round: int, received: Sequence[bool]) -> "StepResult":
        """Tell the others how the step went here, and learn how it went everywhere.

        Args:
            loss: This rank's share of the mean.
            share_is_finite: Whether the part of the reduced gradients that this rank looked at is finite.
            bad_round: The first micro-batch that left a gradient of this rank not finite, or -1 (or nobody looked).
            received: Whether each trainable parameter got a gradient on this rank.

        Raises:
            SequenceError: on every rank, if ranks have issued different collectives, or the same in different order.
        """
        table, work = self._begin([loss, share_is_finite, bad_round, sequence.digest(self._group), *received])
        work.wait()
        table = table.cpu()
        losses, finite_shares, bad_rounds, flags = table[:, 0], table[:, 1], table[:, 2], table[:, 4:]
        if (table[:, 3] != table[0, 3]).any() and (problem := sequence.agree_on_sequence(self._group)):
            raise problem
        used = (flags.sum(0) > 0).tolist()
        if not losses.isfinite().all():
            return StepResult(losses.sum().item(), used, "the loss", _ranks_where(~losses.isfinite()))
        if not finite_shares.all():
            # A strategy may reduce every micro-batch, which spreads a NaN: the ranks that had it first are to blame.
            bad = bad_rounds[bad_rounds >= 0]
            culprits = _ranks_where(bad_rounds == bad.min()) if len(bad) else []
            return StepResult(losses.sum().item(), used, "a gradient", culprits)
        return StepResult(losses.sum().item(), used)

    def all_gather(self, value: float) -> Tensor:
        """All ranks' values, (world_size,) in fp64 on CPU."""
        table, work = self._begin([value])
        work.wait()
        return table.cpu().view(-1)

    def _begin(self, row: Sequence[float]) -> tuple[Tensor, dist.Work]:
        mine = torch.tensor(row, dtype=torch.float64, device=self.device)
        table = mine.new_empty(self._size * len(row))
        work = dist.all_gather_into_tensor(table, mine, group=self._group, async_op=True)
        assert work is not None, "an asynchronous collective gives a handle"
        return table.view(self._size, len(row)), work


def _ranks_where(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()

"""The two small exchanges between hosts in every optimizer step: what each rank holds, and which gradients it made."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lab.runtime.errors import NonFiniteError, UnsupportedError
from ddp_lab.runtime.groups import exchange_device
from ddp_lab.strategy.accounting import EVERYONE, Collective
from ddp_lab.strategy.communication import observer
from ddp_lab.strategy.communication.verdict import VERDICT_BYTES

COUNTS_ROW_BYTES = 4 * 8
DIGEST_BYTES = RECEIVED_BYTES = 8
"""Bytes that a rank sends, in fp64: four counts; a digest, and a flag for each trainable parameter."""
UPDATED = "parameters are updated with what came of the step before: resume from a checkpoint of an earlier one"

LACKS_ANY, WANTS_TO_STOP = 1, 2
"""What the third count adds up from."""

Pending = tuple[Tensor, dist.Work]
"""An exchange in flight: the rows of all ranks, and a handle to wait for."""


@dataclass(frozen=True)
class GlobalBatch:
    """What all ranks together hold of a step.

    Attributes:
        weight: Of all micro-batches: their samples, or whatever else their losses are means over.
        rounds: The most micro-batches that any rank has.
        tokens: As the ranks have counted them.
        is_last: A rank wants to stop after this step.
    """

    weight: float
    rounds: int
    tokens: int = 0
    is_last: bool = False


def nonfinite_error(
    what: str, step: int, culprits: Sequence[int] | None, updates_early: bool, advice: str
) -> NonFiniteError:
    """The error that every rank raises.

    Args:
        what: `the loss` or `a gradient`.
        culprits: The ranks on which it was not finite first; None if nobody looked.
        updates_early: Whether parameters may have been updated before all gradients were reduced.
        advice: What may help.
    """
    if culprits is None:
        where = "on some rank"
    elif culprits:
        where = f"on rank {', '.join(map(str, culprits))}"
    else:
        where = "after the sum over ranks (each rank's own was finite when the step was run again)"
    updated = "parameters of earlier buckets are updated already" if updates_early else "no parameter is updated yet"
    error = NonFiniteError(f"step {step}: {what} is not finite {where}; {updated}; {advice}")
    error.rank = culprits[0] if culprits else None
    return error


class StepAgreement:
    """All-gathers of a few numbers a rank. Not reductions: MAX can lose a NaN, and SUM does not say whose it is.

    Args:
        group: Ranks that see different samples, or different tokens of them.
        everyone: These, and ranks that see the same tokens and hold other parts of the model. They agree on how many
            micro-batches there are.
        model: Ranks that hold parts of the same layers, with consecutive numbers in `everyone`; None if there is only
            this one.
        module_device: Where the exchanges run if the group cannot carry CPU tensors.
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
        self._group, self._everyone, self._model = group, everyone, model
        self._copies = dist.get_world_size(everyone) // dist.get_world_size(group)  # ranks with the same tokens
        self._context_size = context_size
        self.device = exchange_device(group, module_device)

    def expected_traffic(self, parameters: int) -> list[Collective]:
        """What a step sends beside what the strategy does: the two exchanges, and the verdict.

        Args:
            parameters: How many are trainable.
        """
        size, everyone = dist.get_world_size(self._group), dist.get_world_size(self._everyone)
        counts_bytes = (COUNTS_ROW_BYTES + (DIGEST_BYTES if self._model is not None else 0)) * everyone
        results_bytes = (DIGEST_BYTES + RECEIVED_BYTES * parameters) * size
        return [
            Collective("all_gather", 1, counts_bytes, everyone, "bookkeeping", EVERYONE),
            Collective("all_gather", 1, results_bytes, size, "bookkeeping"),
            Collective("all_reduce", 1, VERDICT_BYTES, everyone, "bookkeeping", EVERYONE),
        ]

    def begin_counts(
        self, weight: float, micro_batches: int, lacks_any: bool, wants_to_stop: bool, tokens: int = 0
    ) -> Pending:
        """Tell the others what this rank holds, and what it has issued to ranks that see the same samples.

        Args:
            lacks_any: It has no micro-batch to repeat if others hold more.
            wants_to_stop: It has been asked to stop after a step.
        """
        flags = LACKS_ANY * lacks_any + WANTS_TO_STOP * wants_to_stop
        digests = [observer.digest(self._model)] if self._model is not None else []
        return self._begin([weight, micro_batches, flags, tokens, *digests], self._everyone)

    def counts(self, exchange: Pending, step: int) -> GlobalBatch:
        """What all ranks together hold.

        Raises:
            UnsupportedError: on every rank, if that is nothing, or a rank has nothing to run.
            SequenceError: on every rank, if ranks that see the same samples issued different collectives until now.
        """
        table, work = exchange
        work.wait()
        weights, micro_batches, flags, tokens, *digests = table.cpu().unbind(1)
        if self._model is not None:
            self._require_same_in_model(digests[0].view(-1, dist.get_world_size(self._model)))
        if (flags % WANTS_TO_STOP).any() or not weights.any():
            ranks = micro_batches.eq(0).nonzero().flatten().tolist()
            raise UnsupportedError(
                f"step {step}: no samples on ranks {ranks}; give each rank at least one in the first step, "
                "and at least one rank in every later step"
            )
        is_last = bool((flags >= WANTS_TO_STOP).any())
        weight, all_tokens = weights.sum().item() / self._copies, tokens.sum() // (self._copies * self._context_size)
        return GlobalBatch(weight, int(micro_batches.max()), int(all_tokens), is_last)

    def _require_same_in_model(self, digests: Tensor) -> None:
        """`digests`: a row for each set of ranks that see the same samples."""
        assert self._model is not None
        if (digests == digests[:, :1]).all():
            return
        if problem := observer.agree_on_sequence(self._model, self._everyone, UPDATED):
            raise problem

    def begin_results(self, received: Sequence[bool]) -> Pending:
        """Tell the others how the step went here.

        Args:
            received: Whether each trainable parameter got a gradient on this rank.
        """
        return self._begin([observer.digest(self._group), *received], self._group)

    def results(self, exchange: Pending) -> list[bool]:
        """For each trainable parameter, whether any rank made a gradient for it.

        Raises:
            SequenceError: on every rank, if ranks have issued different collectives, or the same in different order.
        """
        table, work = exchange
        work.wait()
        table = table.cpu()
        if (table[:, 0] != table[0, 0]).any() and (problem := observer.agree_on_sequence(self._group)):
            raise problem
        return (table[:, 1:].sum(0) > 0).tolist()

    def total(self, value: float) -> float:
        """The sum over ranks that see different samples."""
        return self.all_gather(value).sum().item() / self._copies

    def all_gather(self, value: float) -> Tensor:
        """The values of all ranks that train this model, (ranks,) in fp64 on CPU."""
        table, work = self._begin([value], self._everyone)
        work.wait()
        return table.cpu().view(-1)

    def _begin(self, row: Sequence[float], group: dist.ProcessGroup) -> Pending:
        mine = torch.tensor(row, dtype=torch.float64, device=self.device)
        table = mine.new_empty(dist.get_world_size(group) * len(row))
        work = dist.all_gather_into_tensor(table, mine, group=group, async_op=True)
        assert work is not None, "an asynchronous collective gives a handle"
        return table.view(-1, len(row)), work

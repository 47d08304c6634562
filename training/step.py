"""The optimizer step that all strategies share.

A step has three parts:
1. The ranks tell each other how many samples and micro-batches each of them holds. So every loss can be weighted by its
   share of the global batch.
2. Forward and backward of each micro-batch, with the communication that the strategy adds to them.
3. The ranks tell each other which parameters received a gradient. They add up their shares of the loss, which also
   shows whether all is finite.

Part 1 and the first half of part 3 are all-gathers of a few bytes between the hosts
(`training.communication.agreement`). The second half is an all-reduce of two numbers between the devices
(`training.communication.verdict`). The first exchange is hidden: behind the optimizer of the step before if the step is
announced, or behind the first forward pass if there are several micro-batches.

No part waits for the device. What the host must know of it, it reads a step later: so an error that names step k may be
raised in step k + 1. On a CPU all is known at once.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from training.communication.agreement import GlobalBatch, Pending, StepAgreement, StepResult, nonfinite_error
from training.communication.verdict import Verdict
from training.watch.phases import phase

if TYPE_CHECKING:
    from training.strategy import Strategy

MicroBatch = Mapping[str, Tensor]


class StepRunner:
    """Runs forward and backward of the steps of one strategy.

    Attributes:
        verdict: How the latest step went.
    """

    verdict: Verdict

    def __init__(self, strategy: "Strategy", agreement: StepAgreement) -> None:
        self._strategy, self._agreement = strategy, agreement
        self._latest: MicroBatch | None = None
        self._announced: Pending | None = None
        self._unread: tuple[Verdict, Sequence[MicroBatch]] | None = None

    def announce(self, micro_batches: Sequence[MicroBatch]) -> None:
        """See `Strategy.announce`."""
        self._announced = self._begin_counts(with_samples(micro_batches))

    def finish_announcement(self) -> None:
        """Wait until the other ranks have been told."""
        if self._announced is not None:
            _, work = self._announced
            work.wait()

    def run(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """See `Strategy.forward_backward`."""
        strategy = self._strategy
        micro_batches = with_samples(micro_batches)
        try:
            verdict, _ = self._attempt(micro_batches)
            if self._unread is not None:
                self.require_finite()
            self._unread = verdict, micro_batches
            if verdict.is_here:
                self.require_finite()
        except BaseException:
            strategy.abandon_step()
            raise
        return verdict.loss

    def require_finite(self) -> None:
        """See `Strategy.require_finite`."""
        strategy = self._strategy
        if self._unread is None:
            return
        (verdict, micro_batches), self._unread = self._unread, None
        what = verdict.nonfinite
        if what is None:
            return
        if what == "the loss":
            culprits = (~self._agreement.all_gather(verdict.own_loss).isfinite()).nonzero().flatten().tolist()
        else:
            culprits = self._find_culprits(micro_batches)
        strategy.zero_grad()
        raise nonfinite_error(what, verdict.step, culprits, strategy.options.overlap_optimizer)

    def _find_culprits(self, micro_batches: Sequence[MicroBatch]) -> list[int]:
        """The ranks that make a gradient that is not finite from these micro-batches. The sum over ranks does not say.

        So the step is run again, and each gradient inspected. A strategy may reduce every micro-batch, which spreads a
        NaN: the ranks that have it first are to blame.
        """
        strategy = self._strategy
        strategy.zero_grad()
        strategy.watch.inspects = True
        try:
            _, result = self._attempt(micro_batches)
        finally:
            strategy.watch.inspects = False
        bad = result.bad_rounds[result.bad_rounds >= 0]
        return (result.bad_rounds == bad.min()).nonzero().flatten().tolist() if len(bad) else []

    def _begin_counts(self, micro_batches: Sequence[MicroBatch]) -> Pending:
        lacks_any = self._latest is None and not micro_batches
        samples = sum(map(sample_count, micro_batches))
        return self._agreement.begin_counts(samples, len(micro_batches), lacks_any, self._strategy.wants_to_stop())

    def _attempt(self, micro_batches: Sequence[MicroBatch]) -> tuple[Verdict, StepResult]:
        """Forward and backward of a whole step on micro-batches that hold samples, and how it went on all ranks."""
        strategy = self._strategy
        counts, self._announced = self._announced or self._begin_counts(micro_batches), None
        self._latest = micro_batches[-1] if micro_batches else self._latest
        strategy.watch.begin_step()
        strategy.before_step()
        global_batch: GlobalBatch | None = None
        losses: list[Tensor] = []
        for index in itertools.count():
            if index + 1 >= len(micro_batches) or strategy.communicates_in_forward:
                # This may be the last micro-batch of all ranks: from here on the number of rounds must be known.
                global_batch = global_batch or self._agreement.counts(counts, strategy.optimizer_steps)
            is_last = global_batch is not None and index + 1 == global_batch.rounds
            batch = micro_batches[index] if index < len(micro_batches) else self._latest
            assert batch is not None
            with nullcontext() if is_last else strategy.no_sync():
                with phase("forward"), strategy.autocast():
                    loss = strategy.forward(batch).loss
                global_batch = global_batch or self._agreement.counts(counts, strategy.optimizer_steps)
                weight = sample_count(batch) / global_batch.samples if index < len(micro_batches) else 0.0
                with phase("backward"):
                    strategy.watch.begin_round()
                    strategy.before_backward()
                    scale = strategy.data_parallel_size if strategy.averages_over_ranks else 1
                    (loss * (weight * scale)).backward()
                strategy.after_backward()
            if weight:
                losses.append(loss.detach().double() * weight)
            if is_last:
                break
        assert global_batch is not None, "the last round knows it"
        if global_batch.is_last:
            strategy.stops_after = strategy.optimizer_steps + 1
        with phase("gradient_sync"):
            strategy.finish_gradient_synchronization()
        loss = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=strategy.device)
        results = self._agreement.begin_results(strategy.watch.first_nonfinite_round, strategy.watch.received())
        norm = strategy.norm_of_share()
        self.verdict = Verdict(loss, norm, strategy.optimizer_steps, strategy.process_group)
        result = self._agreement.results(results)
        unused = [p for p, used in zip(strategy.trainable.values(), result.used, strict=True) if not used]
        strategy.drop_gradients(unused)
        return self.verdict, result


def with_samples(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Those micro-batches that are not empty."""
    return [batch for batch in micro_batches if sample_count(batch)]


def sample_count(micro_batch: MicroBatch) -> int:
    """Samples in a micro-batch: dimension 0 of its first tensor."""
    return next(iter(micro_batch.values())).shape[0]

"""The optimizer step that all strategies share.

A step is one or more micro-batches (`Strategy.micro_batch`), each a forward and a backward pass. What follows the last
one of them, on all ranks:
- what is in flight is waited for;
- the ranks tell each other which parameters received a gradient (`communication.agreement`: an all-gather of
  a few bytes between the hosts);
- they add up their shares of the loss and of the gradients' norm, which shows whether all is finite
  (`communication.verdict`: an all-reduce of two numbers between the devices).

`Strategy.forward_backward` runs all micro-batches of a step this way. Before, the ranks tell each other how much each
of them holds, so that every loss can be weighted by its share of the global batch. This exchange is hidden: behind the
optimizer of the step before if the step is announced, or behind the first forward pass if there are several
micro-batches.

No part waits for the device. What the host must know of it, it reads a step later: so an error that names step k may be
raised in step k + 1. On a CPU all is known at once.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.strategy.communication.agreement import GlobalBatch, Pending, StepAgreement, nonfinite_error
from ddp_lab.strategy.communication.verdict import Verdict

if TYPE_CHECKING:
    from ddp_lab.strategy.interface import Strategy

MicroBatch = Mapping[str, Tensor]


class StepData(NamedTuple):
    """What the training loop needs of one optimizer step.

    Attributes:
        samples: In the global batch.
        micro_batches: Of this rank.
        weights: For each micro-batch, what its loss is a mean over, such as its number of tokens. Default: its samples.
        tokens: In this rank's micro-batches; 0 if they hold no tokens.
    """

    samples: int
    micro_batches: Sequence[MicroBatch]
    weights: Sequence[float] | None = None
    tokens: int = 0


class Weighted(NamedTuple):
    """A micro-batch, and how many terms its loss is a mean over."""

    batch: MicroBatch
    weight: float


class StepRunner:
    """Runs the steps of one strategy.

    Attributes:
        verdict: How the latest step went.
    """

    verdict: Verdict

    def __init__(self, strategy: "Strategy", agreement: StepAgreement) -> None:
        self._strategy, self._agreement = strategy, agreement
        self._is_open = False  # some micro-batches of a step are done, and others follow
        self._is_done = False  # its last micro-batch is done, and the optimizer has not run
        self._held: set[nn.Parameter] = set()  # parameters that had a gradient before this step, perhaps of zeros
        self._losses: list[Tensor] = []
        self._latest: MicroBatch | None = None
        self._announced: Pending | None = None
        self._unread: tuple[Verdict, Sequence[Weighted] | None] | None = None
        self._is_scaled = False  # scale_loss was called in this micro-batch

    # A step of the caller's own ------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """See `Strategy.micro_batch`."""
        if self._strategy.in_micro_batch:
            raise RuntimeError("micro_batch() within micro_batch(): the one before has not ended")
        with self._abandoning():
            if not self._is_open:
                self._begin(averages=True)
            self._is_scaled = False
            with self._round(last):
                yield
                self._require_scaled()
            if last:
                self._finish()
                self._keep(self.verdict, None)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """See `Strategy.scale_loss`."""
        scaler, self._is_scaled = self._strategy.scaler, True
        return loss if scaler is None else loss * scaler.scale

    def _require_scaled(self) -> None:
        strategy = self._strategy
        if strategy.scaler and not self._is_scaled and any(strategy.watch.received_in_last_round()):
            raise RuntimeError(
                "micro_batch() in fp16 without scale_loss(): gradients will be divided by the loss scale, so a loss "
                "must have it; write strategy.scale_loss(loss).backward()"
            )

    def take(self) -> Verdict:
        """How the step went that the optimizer is about to do, once.

        Raises:
            RuntimeError: no step has had its last micro-batch, so gradients are not those of all ranks.
        """
        if not self._is_done:
            raise RuntimeError(
                "step() before the last micro_batch(): gradients have not been sent to the other ranks; run backward "
                "within strategy.micro_batch(last=True)"
            )
        self._is_done = False
        return self.verdict

    def weights(self, counts: Sequence[float]) -> list[float]:
        """See `Strategy.loss_weights`."""
        total = self._agreement.total(sum(counts))
        if not total:
            raise UnsupportedError("loss_weights: all counts of all ranks are 0, so the step has no mean; skip it")
        return [count * self._strategy.data_parallel_size / total for count in counts]

    # A step on micro-batches that are all here ---------------------------------------------------------------------

    def announce(self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None, tokens: int) -> None:
        """See `Strategy.announce`."""
        self._announced = self._begin_counts(weighted(micro_batches, weights), tokens)

    def finish_announcement(self) -> None:
        """Wait until the other ranks have been told."""
        if self._announced is not None:
            _, work = self._announced
            work.wait()

    def run(self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None, tokens: int) -> Tensor:
        """See `Strategy.forward_backward`."""
        mine = weighted(micro_batches, weights)
        with self._abandoning():
            self._attempt(mine, tokens)
            self._keep(self.verdict, mine)
        return self.verdict.loss

    def require_finite(self) -> None:
        """See `Strategy.require_finite`."""
        strategy = self._strategy
        if self._unread is None:
            return
        (verdict, micro_batches), self._unread = self._unread, None
        what = verdict.nonfinite
        if what is None:
            return
        scale = verdict.loss_scale
        if scale is not None and scale >= 1:
            return
        culprits: list[int] | None
        if what == "the loss":
            culprits = (~self._agreement.all_gather(verdict.own_loss).isfinite()).nonzero().flatten().tolist()
        else:
            culprits = None if micro_batches is None else self._find_culprits(micro_batches)
        strategy.zero_grad()
        updates_early, advice = strategy.options.overlap_optimizer, strategy.nonfinite_advice
        if scale is not None:
            advice = f"so it stays at every loss scale, which has fallen to {scale:g}; {advice}"
        raise nonfinite_error(what, verdict.step, culprits, updates_early, advice)

    def _find_culprits(self, micro_batches: Sequence[Weighted]) -> list[int]:
        """The ranks that make a gradient that is not finite from these micro-batches. The sum over ranks does not say.

        So the step is run again, and each gradient inspected. A strategy may reduce every micro-batch, which spreads a
        NaN: the ranks that have it first are to blame.
        """
        strategy = self._strategy
        strategy.zero_grad()
        strategy.watch.inspects = True
        try:
            self._attempt(micro_batches)
            rounds = self._agreement.all_gather(strategy.watch.first_nonfinite_round)
        finally:
            strategy.watch.inspects = False
        bad = rounds[rounds >= 0]
        return (rounds == bad.min()).nonzero().flatten().tolist() if len(bad) else []

    def _begin_counts(self, micro_batches: Sequence[Weighted], tokens: int) -> Pending:
        lacks_any = self._latest is None and not micro_batches
        weight = sum(micro_batch.weight for micro_batch in micro_batches)
        wants_to_stop = self._strategy.wants_to_stop()
        return self._agreement.begin_counts(weight, len(micro_batches), lacks_any, wants_to_stop, tokens)

    def _attempt(self, micro_batches: Sequence[Weighted], tokens: int = 0) -> None:
        """Forward and backward of a whole step on micro-batches that hold samples."""
        strategy = self._strategy
        counts, self._announced = self._announced or self._begin_counts(micro_batches, tokens), None
        self._latest = micro_batches[-1].batch if micro_batches else self._latest
        self._begin(averages=strategy.always_averages)
        scale: float | Tensor = strategy.data_parallel_size if strategy.averages_over_ranks else 1
        if strategy.scaler is not None:
            strategy.scaler.times, scale = int(scale), strategy.scaler.scale
        global_batch: GlobalBatch | None = None
        for index in itertools.count():
            if index + 1 >= len(micro_batches) or strategy.communicates_in_forward:
                # This may be the last micro-batch of all ranks: from here on the number of rounds must be known.
                global_batch = global_batch or self._agreement.counts(counts, strategy.optimizer_steps)
            is_last = global_batch is not None and index + 1 == global_batch.rounds
            batch = micro_batches[index].batch if index < len(micro_batches) else self._latest
            assert batch is not None
            with self._round(is_last):
                loss = strategy(**batch).loss
                global_batch = global_batch or self._agreement.counts(counts, strategy.optimizer_steps)
                weight = micro_batches[index].weight / global_batch.weight if index < len(micro_batches) else 0.0
                with phase("backward"):
                    (loss * (weight * scale)).backward()
            if weight:
                self._losses.append(loss.detach().double() * weight)
            if is_last:
                break
        assert global_batch is not None, "the last round knows it"
        if global_batch.is_last:
            strategy.stops_after = strategy.optimizer_steps + 1
        self._finish()
        self.verdict.tokens = global_batch.tokens

    # What both share -------------------------------------------------------------------------------------------------

    def _begin(self, averages: bool) -> None:
        strategy = self._strategy
        strategy.require_none_unfrozen()
        strategy.averages_over_ranks = averages
        if strategy.scaler is not None:
            strategy.scaler.times = 1
        strategy.watch.begin_step()
        self._held = strategy.held_gradients()
        strategy.before_step()
        self._losses, self._is_open, self._is_done = [], True, False

    @contextmanager
    def _round(self, is_last: bool) -> Iterator[None]:
        """One micro-batch: gradients are synchronized by the last one, or as the strategy needs it."""
        strategy = self._strategy
        strategy.watch.begin_round()
        strategy.before_micro_batch()
        strategy.in_micro_batch = strategy.synchronizes_gradients = True
        try:
            with nullcontext() if is_last else strategy.no_sync():
                strategy.watch.takes_one = strategy.reduces_in_backward and strategy.synchronizes_gradients
                yield
                strategy.after_backward()
        finally:
            strategy.in_micro_batch = strategy.synchronizes_gradients = strategy.watch.takes_one = False

    def _finish(self) -> None:
        """What follows the last micro-batch."""
        strategy = self._strategy
        with phase("gradient_sync"):
            strategy.finish_gradient_synchronization()
        if self._losses:
            loss = torch.stack(self._losses).sum()
        else:
            loss = torch.zeros((), dtype=torch.float64, device=strategy.device)
        results = self._agreement.begin_results(strategy.watch.received())
        norm, scaler = strategy.norm_of_share(), strategy.scaler
        if scaler is not None:
            norm = norm * scaler.inverse()
        scale = scaler.scale if scaler is not None else None
        if strategy.model_parallel is not None and strategy.model_parallel.rank != 0:
            loss = loss * 0  # rank 0 speaks for those that see the same samples; what is not finite stays so
        self.verdict = Verdict(loss, norm, strategy.optimizer_steps, strategy.everyone, scale)
        result = self._agreement.results(results)
        parameters = strategy.trainable.values()
        unused = [p for p, used in zip(parameters, result.used, strict=True) if not (used or p in self._held)]
        strategy.drop_gradients(unused)
        if scaler is not None:
            scaler.unscale_(strategy.reduced_gradients())
        self._is_open, self._is_done = False, True

    def _keep(self, verdict: Verdict, micro_batches: Sequence[Weighted] | None) -> None:
        """Read the verdict of the step before, and this one if it is here. `micro_batches`: what it was made of."""
        if self._unread is not None:
            self.require_finite()
        self._unread = verdict, micro_batches
        if verdict.is_here:
            self.require_finite()

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Abandon the step if an error comes."""
        try:
            yield
        except BaseException:
            self._is_open = self._is_done = False
            self._strategy.abandon_step()
            raise


def weighted(micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None) -> list[Weighted]:
    """Those micro-batches that are not empty, with their weights, by default their numbers of samples."""
    if weights is None:
        weights = [sample_count(batch) for batch in micro_batches]
    return [Weighted(batch, weight) for batch, weight in zip(micro_batches, weights, strict=True) if weight]


def sample_count(micro_batch: MicroBatch) -> int:
    """Samples in a micro-batch: dimension 0 of its first tensor."""
    return next(iter(micro_batch.values())).shape[0]

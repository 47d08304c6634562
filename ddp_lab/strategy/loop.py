"""The optimizer step that all strategies share: in which order their hooks run.

A step is one or more micro-batches, each a forward and a backward pass. What follows the last one of them, on all
ranks:
- what is in flight is waited for;
- the ranks exchange a row of numbers each (`ddp_lab.strategy.exchange`): who received gradients, whether all is finite,
  the loss and the norm, and what each holds of the next step, so that every loss can be weighted by its share of the
  global batch before backward.

No part waits for a device. What the host must know of it, it reads a step later: so an error that names step k may be
raised in step k + 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.strategy.batches import Progress, TrainingPlace, Weighted
from ddp_lab.strategy.building import autocast, require_none_unfrozen
from ddp_lab.strategy.exchange import (
    UNKNOWN,
    WANTS_TO_STOP,
    Counts,
    Exchange,
    has_flag,
)
from ddp_lab.strategy.gradient_watch import given_gradient
from ddp_lab.strategy.hooks import Hooks
from ddp_lab.strategy.verdict import Verdict, nonfinite_error, update_unless

PIPELINE_HINT = (
    "; a stage has NaN for hidden states and parameters of others, so x + block(x) belongs into a block, and for "
    "gradients where the next stage runs under no_grad or ignores its input"
)


class Loop(Progress, ABC):
    """The steps of one strategy. `Strategy` says what the methods of the same names do.

    Attributes:
        verdict: How the latest step went.
    """

    verdict: Verdict

    def __init__(self, strategy: Hooks) -> None:
        self._strategy = strategy
        model_parallel = strategy.model_parallel
        model = model_parallel.tensor_group if model_parallel else None
        groups = strategy.groups
        self.exchange = Exchange(groups.work, groups.everyone, model, strategy.device, groups.context_size)
        self._is_open = False  # some micro-batches of a step are done, and others follow
        self._is_done = False  # its last micro-batch is done, and the optimizer has not run
        self._holds_back = False  # within `no_sync`
        self._is_scaled = False  # scale_loss was called in this micro-batch
        self._with_gradient: set[nn.Parameter] = set()  # before this step, perhaps of zeros
        self._unexplained: set[int] = set()  # gradients that were there before this micro-batch, by their numbers
        self._loss: Tensor | None = None  # this rank's part of the mean over the global batch
        self._unread: tuple[Verdict, Sequence[Weighted] | None] | None = None
        self._place: TrainingPlace | None = None  # in a loop of the caller's own
        self._pipeline = model_parallel.pipeline if model_parallel else None
        self._balance = model_parallel.balance if model_parallel else None
        if self._pipeline is not None:
            self._pipeline.begin(strategy.module)

    def answer(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model answers."""
        if self._pipeline is None:
            return self.forward(*args, **kwargs)
        self._strategy.finish_parameter_synchronization()
        with self._strategy.whole():
            return self._pipeline.answer(self.forward, args, kwargs)

    # A step of the caller's own --------------------------------------------------------------------------------------

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if self._pipeline is not None:
            raise UnsupportedError(
                "a pipeline decides when each micro-batch runs: use forward_backward, not micro_batch"
            )
        if self.in_micro_batch:
            raise RuntimeError("micro_batch() within micro_batch(): the one before has not ended")
        last = last and not self._holds_back
        self._place = self._place or TrainingPlace(self._strategy.groups.everyone)
        with self._abandoning():
            if not self._is_open:
                self._begin(averages=True)
            self._place.move(self._strategy.optimizer_steps)
            self._is_scaled = False
            with self._round(last):
                yield
                self._require_scaled()
            if last:
                self._finish(UNKNOWN)
                self._keep(self.verdict, None)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._holds_back = self._holds_back, True
        try:
            yield
        finally:
            self._holds_back = before

    def scale_loss(self, loss: Tensor) -> Tensor:
        scaler, self._is_scaled = self._strategy.scaler, True
        return loss if scaler is None else loss * scaler.scale

    def _require_scaled(self) -> None:
        strategy = self._strategy
        if strategy.scaler and not self._is_scaled and any(strategy.watch.received_in_last_round()):
            raise RuntimeError(
                "micro_batch() in fp16 without scale_loss(): gradients will be divided by the loss scale, so a loss "
                "must have it; write strategy.scale_loss(loss).backward()"
            )

    def weights(self, counts: Sequence[float]) -> list[float]:
        total = self.exchange.total(sum(counts))
        if not total:
            raise UnsupportedError("loss_weights: all counts of all ranks are 0, so the step has no mean; skip it")
        return [count * self._strategy.group_size / total for count in counts]

    # The parts of a step ---------------------------------------------------------------------------------------------

    def autocast(self) -> torch.autocast:
        """The precision in which forward runs, for training and evaluation alike."""
        return autocast(self._strategy.device.type, self._strategy.options.precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with phase("forward"), self.autocast():
            return self._strategy.forward(*args, **kwargs)

    def _begin(self, averages: bool) -> None:
        strategy = self._strategy
        require_none_unfrozen(strategy.frozen)
        self.averages = averages
        if strategy.scaler is not None:
            strategy.scaler.times = 1
        strategy.watch.begin_step()
        self._with_gradient = strategy.holding()
        strategy.before_step()
        self._unexplained = strategy.watch.unexplained(strategy.trainable.values())
        self._loss, self._is_open, self._is_done = None, True, False

    @contextmanager
    def _round(self, is_last: bool) -> Iterator[None]:
        """One micro-batch."""
        strategy, watch = self._strategy, self._strategy.watch
        watch.begin_round(continues=strategy.is_in_pipeline)
        self.in_micro_batch, self.another_follows = True, not is_last
        self.reduces_now = is_last or strategy.reduces_every_micro_batch
        self.counts_gradients = self.reduces_now or not strategy.is_in_pipeline
        watch.takes_one = strategy.reduces_in_backward and self.reduces_now
        try:
            strategy.before_micro_batch()
            yield
            watch.look()
            if given_gradients := watch.unexplained(strategy.trainable.values()) - self._unexplained:
                if strategy.reduces_given_gradients:
                    watch.explain(given_gradients)
                elif not any(watch.received_in_last_round()):  # else the original has put sums of other ranks there
                    raise given_gradient()
            strategy.after_backward()
            # Zeros of a strategy that has reduced this micro-batch are nobody's gradients.
            self._unexplained = watch.unexplained(strategy.trainable.values())
        finally:
            self.in_micro_batch = self.another_follows = self.reduces_now = watch.takes_one = False

    def _finish(self, following: Counts) -> None:
        """What follows the last micro-batch. `following`: what this rank holds of the next step."""
        strategy, scaler = self._strategy, self._strategy.scaler
        with phase("gradient_sync"):
            strategy.finish_gradient_synchronization()
        # This rank's part of the loss, and of the gradients' norm
        loss, self._loss = self._loss, None
        if loss is None:
            loss = torch.zeros((), dtype=torch.float64, device=strategy.device)
        if strategy.model_parallel is not None and strategy.model_parallel.tensor_rank != 0:
            loss = loss * 0  # rank 0 speaks for those that have the same loss; what is not finite stays so

        def shares() -> Tensor:
            norm = strategy.norm_of_share() if scaler is None else strategy.norm_of_share() * scaler.inverse()
            return torch.stack([loss, norm.square()])

        # What all ranks say
        counts = following._replace(flags=following.flags | WANTS_TO_STOP * bool(strategy.wants_to_stop()))
        received = strategy.watch.received()
        rows, sums = self.exchange.run(counts, received, shares)
        self.exchange.require_same_sequence(rows)
        if has_flag(rows, WANTS_TO_STOP):
            self.stops_after = strategy.optimizer_steps + 1
        self.verdict = Verdict(sums, loss, strategy.optimizer_steps, scaler.scale if scaler else None)
        # Gradients that no rank has made
        used = self.exchange.used(rows, received)
        uses = zip(strategy.trainable.values(), used, strict=True) if not all(used) else ()
        strategy.drop_gradients([p for p, is_used in uses if not (is_used or p in self._with_gradient)])
        if scaler is not None:
            scaler.unscale_(strategy.gradients())
        self._is_open, self._is_done = False, True

    def update(self) -> None:
        """Run the optimizer."""
        strategy = self._strategy
        if not self._is_done:
            raise RuntimeError(
                "step() before the last micro_batch(): gradients have not been sent to the other ranks; run backward "
                "within strategy.micro_batch(last=True)"
            )
        self._is_done = False
        if not self.verdict.is_here:
            update_unless(self.verdict.found_inf, strategy.updating_optimizer, strategy.update)
        elif self.verdict.nonfinite is None:
            strategy.update()
        if strategy.scaler is not None:
            strategy.scaler.update(self.verdict.found_inf)
        strategy.optimizer_steps += 1
        if self._place is not None:
            self._place.at = strategy.optimizer_steps, 0

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Abandon the step if an error comes."""
        try:
            yield
        except BaseException:
            self._is_open = self._is_done = False
            self._strategy.abandon_step()
            raise

    # What is not finite ----------------------------------------------------------------------------------------------

    def _keep(self, verdict: Verdict, micro_batches: Sequence[Weighted] | None) -> None:
        """Read the verdict of the step before, and this one if it is here. `micro_batches`: what it was made of."""
        if self._unread is not None:
            self.require_finite()
        self._unread = verdict, micro_batches
        if verdict.is_here:
            self.require_finite()

    @abstractmethod
    def first_nonfinite_round(self, micro_batches: Sequence[Weighted]) -> int:
        """The first micro-batch in which this rank makes a gradient that is not finite, from 0; -1 if none does."""

    def require_finite(self) -> None:
        if self._unread is None:
            return
        (verdict, micro_batches), self._unread = self._unread, None
        if verdict.nonfinite is None:
            return
        hint = self._strategy.nonfinite_advice
        if self._pipeline is not None:
            self._pipeline.agree(self._strategy.groups.everyone)
            hint += PIPELINE_HINT
        if verdict.loss_scale is None or verdict.loss_scale < 1:
            gather = self.exchange.all_gather
            error = nonfinite_error(verdict, micro_batches, gather, self.first_nonfinite_round, hint)
            self._strategy.zero_grad()
            raise error

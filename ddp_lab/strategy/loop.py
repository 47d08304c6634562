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

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.strategy.batches import MicroBatch, StepData, Weighted, first_bad_sample, weighted
from ddp_lab.strategy.communication.consistency import require_none_unfrozen
from ddp_lab.strategy.communication.place import Place
from ddp_lab.strategy.exchange import (
    IS_UNKNOWN,
    LACKS_ANY,
    UNKNOWN,
    WANTS_TO_STOP,
    Counts,
    Exchange,
    GlobalBatch,
    Rows,
    has_flag,
)
from ddp_lab.strategy.gradient_watch import given_gradient
from ddp_lab.strategy.hooks import Hooks, Progress
from ddp_lab.strategy.precision import autocast
from ddp_lab.strategy.verdict import ReadLater, Verdict, nonfinite_error, update_unless

if TYPE_CHECKING:
    from ddp_lab.strategy.model_parallel import Balance, Pipeline


class Loop(Progress):
    """The steps of one strategy. `Strategy` says what the methods of the same names do.

    Attributes:
        verdict: How the latest step went.
    """

    verdict: Verdict

    def __init__(self, strategy: Hooks) -> None:
        self._strategy = strategy
        model_parallel = strategy.model_parallel
        model = model_parallel.tensor_group if model_parallel else None
        groups = strategy.process_group, strategy.everyone, model
        self.exchange = Exchange(*groups, strategy.device, strategy.context_size)
        self._is_open = False  # some micro-batches of a step are done, and others follow
        self._is_done = False  # its last micro-batch is done, and the optimizer has not run
        self._holds_back = False  # within `no_sync`
        self._is_scaled = False  # scale_loss was called in this micro-batch
        self._with_gradient: set[nn.Parameter] = set()  # before this step, perhaps of zeros
        self._unexplained: set[int] = set()  # gradients that were there before this micro-batch, by their numbers
        self._loss: Tensor | None = None  # this rank's part of the mean over the global batch
        self._told: tuple[Counts, Rows] | None = None  # of this step, in the one before: by this rank, and by all
        self._latest: MicroBatch | None = None
        self._unread: tuple[Verdict, Sequence[Weighted] | None] | None = None
        self._place: Place | None = None  # in a loop of the caller's own
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
        self._place = self._place or Place(self._strategy.everyone)
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

    # A step on micro-batches that are all here -----------------------------------------------------------------------

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        weights: Sequence[float] | None,
        tokens: int,
        following: StepData | None,
    ) -> Tensor:
        """`Strategy.forward_backward`."""
        own = weighted(micro_batches, weights)
        with self._abandoning():
            self._attempt(own, tokens, following)
            self._keep(self.verdict, own)
        return self.verdict.loss

    def _attempt(self, micro_batches: Sequence[Weighted], tokens: int = 0, following: StepData | None = None) -> None:
        """Forward, backward and exchange of a whole step on micro-batches that hold samples."""
        strategy = self._strategy
        global_batch = self._global_batch(self._counts(micro_batches, tokens))
        self._latest = micro_batches[-1].batch if micro_batches else self._latest
        self._begin(averages=strategy.always_averages)
        scale: float | Tensor = strategy.group_size if self.averages else 1
        if strategy.scaler is not None:
            strategy.scaler.times, scale = int(scale), strategy.scaler.scale
        load: ReadLater | None = None
        if self._pipeline is not None:
            self._walk(self._pipeline, micro_batches, global_batch, scale)
        elif self._balance is None:
            self._one_by_one(micro_batches, global_batch, scale)
        else:
            try:
                self._look_ahead(self._balance, micro_batches, global_batch.rounds)
                self._one_by_one(micro_batches, global_batch, scale)
                load = ReadLater(self._balance.load())
            finally:
                self.is_ahead = False
                self._balance.end_step()
        self._finish(self._counts_of(following) if following else UNKNOWN)
        self.verdict.tokens, self.verdict.load = global_batch.tokens, load

    def tell(self, following: StepData) -> None:
        """Tell the other ranks ahead what the next step holds, as the exchange of a step before it does. Collective."""
        counts = self._counts_of(following)
        self._told = counts, self.exchange.ask(counts)

    def _counts_of(self, step: StepData) -> Counts:
        return self._counts(weighted(step.micro_batches, step.weights), step.tokens)

    def _counts(self, micro_batches: Sequence[Weighted], tokens: int) -> Counts:
        lacks_any = self._latest is None and not micro_batches
        weight = sum(micro_batch.weight for micro_batch in micro_batches)
        return Counts(weight, len(micro_batches), tokens, LACKS_ANY * lacks_any)

    def _global_batch(self, counts: Counts) -> GlobalBatch:
        """What all ranks hold of the step that begins: as they have told each other in the one before, or do now."""
        told, self._told = self._told, None
        if told is not None and not told[0].flags & IS_UNKNOWN and told[0][:2] != counts[:2]:
            raise OneRankError(
                f"forward_backward() got {counts.micro_batches} micro-batches that weigh {counts.weight:g}, and the "
                f"other ranks were told that it would get {told[0].micro_batches} that weigh {told[0].weight:g}; pass "
                "as following= what the next call is given"
            )
        if told is None or has_flag(told[1], IS_UNKNOWN):
            return self.exchange.global_batch(self.exchange.ask(counts), self._strategy.optimizer_steps)
        return self.exchange.global_batch(told[1], self._strategy.optimizer_steps)

    def _one_by_one(self, micro_batches: Sequence[Weighted], global_batch: GlobalBatch, scale: float | Tensor) -> None:
        """Forward and backward of each micro-batch before the next."""
        for index, (batch, terms) in enumerate(self._filled(micro_batches, global_batch.rounds)):
            weight = terms / global_batch.weight
            if self._balance is not None:
                self._balance.counts = index < len(micro_batches)
            with self._round(is_last=index + 1 == global_batch.rounds):
                loss = self.forward(**batch).loss
                with phase("backward"):
                    (loss * (weight * scale)).backward()
            self._count(loss, weight)

    def _count(self, loss: Tensor, weight: float) -> None:
        if weight:
            part = loss.detach().double() * weight
            self._loss = part if self._loss is None else self._loss + part

    def _filled(self, micro_batches: Sequence[Weighted], rounds: int) -> list[Weighted]:
        """With the latest one again, at weight 0, for ranks that hold fewer than others."""
        assert self._latest is not None, "a rank that has never held any is refused"
        return [*micro_batches, *[Weighted(self._latest, 0)] * (rounds - len(micro_batches))]

    @torch.no_grad()
    def _look_ahead(self, balance: "Balance", micro_batches: Sequence[Weighted], rounds: int) -> None:
        """Let experts see all micro-batches of the step, if they must, and draw random numbers as they will then."""
        passes = balance.passes_ahead(rounds)
        if not passes:
            return
        devices = [self._strategy.device] if self._strategy.device.type == "cuda" else []
        self.is_ahead = True
        with torch.random.fork_rng(devices), balance.ahead():
            for index, (batch, _) in enumerate(self._filled(micro_batches, passes)[:passes]):
                balance.counts = index < len(micro_batches)
                self.forward(**batch)
        self.is_ahead = False

    def _walk(
        self, pipeline: "Pipeline", micro_batches: Sequence[Weighted], global_batch: GlobalBatch, scale: float | Tensor
    ) -> None:
        """Forward and backward in the order of a pipeline's schedule."""
        padded = self._filled(micro_batches, global_batch.rounds)
        self._strategy.finish_parameter_synchronization()

        def loss_of(index: int, output: Any) -> Tensor:
            weight = padded[index].weight / global_batch.weight
            self._count(output.loss, weight)
            return output.loss * (weight * scale)

        pipeline.step([batch for batch, _ in padded], self.forward, loss_of, self._backward)

    @contextmanager
    def _backward(self, is_last: bool) -> Iterator[None]:
        """A backward pass by itself."""
        with self._round(is_last), phase("backward"):
            yield

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
            if given := watch.unexplained(strategy.trainable.values()) - self._unexplained:
                if strategy.reduces_given_gradients:
                    watch.explain(given)
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
        self._told = counts, rows
        self.verdict = Verdict(sums, loss, strategy.optimizer_steps, scaler.scale if scaler else None)
        # Gradients that no rank has made
        used = self.exchange.used(rows, received)
        each = zip(strategy.trainable.values(), used, strict=True) if not all(used) else ()
        strategy.drop_gradients([p for p, is_used in each if not (is_used or p in self._with_gradient)])
        if scaler is not None:
            scaler.unscale_(strategy.gradients())
        self._is_open, self._is_done = False, True

    def update(self) -> None:
        """Run the optimizer.

        Raises:
            RuntimeError: no step has had its last micro-batch, so gradients are not those of all ranks.
        """
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

    def require_finite(self) -> None:
        if self._unread is None:
            return
        (verdict, micro_batches), self._unread = self._unread, None
        what, scale = verdict.nonfinite, verdict.loss_scale
        if what is not None and self._pipeline is not None:
            self._pipeline.agree(self._strategy.everyone)
        if what is None or (scale is not None and scale >= 1):
            return
        if what == "the loss":
            losses = self.exchange.all_gather(verdict.own_loss)
            culprits: Sequence[int] | None = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        else:
            culprits = None if micro_batches is None else self._find_culprits(micro_batches)
        self._strategy.zero_grad()
        advice = self._advice(verdict.step, micro_batches)
        if scale is not None:
            advice = f"so it stays at every loss scale, which has fallen to {scale:g}; {advice}"
        raise nonfinite_error(what, verdict.step, culprits, advice)

    def _find_culprits(self, micro_batches: Sequence[Weighted]) -> Sequence[int]:
        """The ranks that make a gradient that is not finite. The sum over ranks does not say, so the step is run again,
        and each gradient inspected. A strategy may reduce every micro-batch, which spreads a NaN: the ranks that have
        it first are to blame."""
        strategy, told, self._told = self._strategy, self._told, None
        strategy.zero_grad()
        strategy.watch.inspects = True
        strategy.watch.look_at_each()
        try:
            self._attempt(micro_batches)
            rounds = self.exchange.all_gather(strategy.watch.first_nonfinite_round)
        finally:
            strategy.watch.inspects, self._told = False, told
        first = min((number for number in rounds if number >= 0), default=None)
        return [rank for rank, number in enumerate(rounds) if number == first]

    def _advice(self, step: int, micro_batches: Sequence[Weighted] | None) -> str:
        """What may help against a loss or a gradient that is not finite. Collective."""
        strategy, advice = self._strategy, "a lower --lr or --clip-grad-norm may help"
        samples = self.exchange.all_gather(first_bad_sample(micro_batches or ()))
        if holders := [rank for rank, sample in enumerate(samples) if sample >= 0]:
            rank = holders[0]
            advice = f"sample {samples[rank]:.0f} of rank {rank} in this step, from 0, holds NaN or infinity"
        elif step == 0:
            advice = "no update came before it, so it is of the data, the first weights or the loss, and not of --lr"
        advice += strategy.nonfinite_advice
        if self._pipeline is not None:
            advice += (
                "; a stage has NaN for hidden states and parameters of others, so x + block(x) belongs into a block, "
                "and for gradients where the next stage runs under no_grad or ignores its input"
            )
        return advice

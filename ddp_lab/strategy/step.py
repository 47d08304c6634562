"""The optimizer step that all strategies share.

A step is one or more micro-batches (`micro_batch`), each a forward and a backward pass. What follows the last one of
them, on all ranks:
- what is in flight is waited for;
- the ranks tell each other which parameters received a gradient (`communication.agreement`: an all-gather of
  a few bytes between the hosts);
- they add up their shares of the loss and of the gradients' norm, which shows whether all is finite
  (`communication.verdict`: an all-reduce of two numbers between the devices).

`forward_backward` takes all micro-batches of a step this way (`ddp_lab.strategy.whole_step`).

No part waits for the device. What the host must know of it, it reads a step later: so an error that names step k may be
raised in step k + 1. On a CPU all is known at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.strategy.batches import Weighted, first_bad_sample
from ddp_lab.strategy.communication.agreement import StepAgreement, nonfinite_error
from ddp_lab.strategy.communication.consistency import require_none_unfrozen
from ddp_lab.strategy.communication.place import Place
from ddp_lab.strategy.communication.verdict import Verdict, update_unless
from ddp_lab.strategy.gradient_watch import given_gradient
from ddp_lab.strategy.hooks import Hooks, Progress
from ddp_lab.strategy.precision import autocast


class Step(Progress):
    """The steps of one strategy, and where the current one is. `Strategy` says what the methods of the same names do.

    Attributes:
        verdict: How the latest step went.
    """

    verdict: Verdict

    def __init__(self, strategy: Hooks) -> None:
        self._strategy = strategy
        model = strategy.model_parallel.tensor_group if strategy.model_parallel else None
        groups = strategy.process_group, strategy.everyone, model
        self.agreement = StepAgreement(*groups, strategy.device, strategy.context_size)
        self._is_open = False  # some micro-batches of a step are done, and others follow
        self._is_done = False  # its last micro-batch is done, and the optimizer has not run
        self._holds_back = False  # within `no_sync`
        self._held: set[nn.Parameter] = set()  # parameters that had a gradient before this step, perhaps of zeros
        self._unexplained: set[int] = set()  # gradients that were there before this micro-batch, by their numbers
        self._losses: list[Tensor] = []
        self._unread: tuple[Verdict, Sequence[Weighted] | None] | None = None
        self._is_scaled = False  # scale_loss was called in this micro-batch
        self._place: Place | None = None  # in a loop of the caller's own

    # A step of the caller's own ------------------------------------------------------------------------------------

    def autocast(self) -> torch.autocast:
        """The precision in which forward runs, for training and evaluation alike."""
        return autocast(self._strategy.device.type, self._strategy.options.precision)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with phase("forward"), self.autocast():
            return self._strategy.forward(*args, **kwargs)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if self.in_micro_batch:
            raise RuntimeError("micro_batch() within micro_batch(): the one before has not ended")
        last = last and not self._holds_back
        self._place = self._place or Place(self._strategy.everyone)
        with self._abandoning():
            if not self._is_open:
                self._begin(averages=True)
            steps = self._strategy.optimizer_steps
            self._place.at = steps, 1 + (self._place.at[1] if self._place.at[0] == steps else 0)
            self._is_scaled = False
            with self._round(last):
                yield
                self._require_scaled()
            if last:
                self._finish()
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
        update_unless(self.verdict.found_inf, strategy.updating_optimizer, strategy.update)
        if strategy.scaler is not None:
            strategy.scaler.update(self.verdict.found_inf)
        strategy.optimizer_steps += 1
        if self._place is not None:
            self._place.at = strategy.optimizer_steps, 0

    def weights(self, counts: Sequence[float]) -> list[float]:
        """See `Strategy.loss_weights`."""
        total = self.agreement.total(sum(counts))
        if not total:
            raise UnsupportedError("loss_weights: all counts of all ranks are 0, so the step has no mean; skip it")
        return [count * self._strategy.group_size / total for count in counts]

    # The parts of a step -------------------------------------------------------------------------------------------

    def _begin(self, averages: bool) -> None:
        strategy = self._strategy
        require_none_unfrozen(strategy.frozen)
        self.averages = averages
        if strategy.scaler is not None:
            strategy.scaler.times = 1
        strategy.watch.begin_step()
        self._held = strategy.holding()
        strategy.before_step()
        self._unexplained = strategy.watch.unexplained(strategy.trainable.values())
        self._losses, self._is_open, self._is_done = [], True, False

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

    def _finish(self) -> None:
        """What follows the last micro-batch."""
        strategy = self._strategy
        with phase("gradient_sync"):
            strategy.finish_gradient_synchronization()
        if self._losses:
            loss = torch.stack(self._losses).sum()
        else:
            loss = torch.zeros((), dtype=torch.float64, device=strategy.device)
        results = self.agreement.begin_results(strategy.watch.received())
        norm, scaler = strategy.norm_of_share(), strategy.scaler
        if scaler is not None:
            norm = norm * scaler.inverse()
        scale = scaler.scale if scaler is not None else None
        if strategy.model_parallel is not None and strategy.model_parallel.tensor_rank != 0:
            loss = loss * 0  # rank 0 speaks for those that have the same loss; what is not finite stays so
        self.verdict = Verdict(loss, norm, strategy.optimizer_steps, strategy.everyone, scale)
        parameters = zip(strategy.trainable.values(), self.agreement.results(results), strict=True)
        unused = [p for p, used in parameters if not (used or p in self._held)]
        strategy.drop_gradients(unused)
        if scaler is not None:
            scaler.unscale_(strategy.gradients())
        self._is_open, self._is_done = False, True

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
        strategy, what, scale = self._strategy, verdict.nonfinite, verdict.loss_scale
        if what is not None and strategy.model_parallel is not None and strategy.model_parallel.pipeline is not None:
            strategy.model_parallel.pipeline.agree(strategy.everyone)
        if what is None or (scale is not None and scale >= 1):
            return
        if what == "the loss":
            culprits: Sequence[int] | None = (
                (~self.agreement.all_gather(verdict.own_loss).isfinite()).nonzero().flatten().tolist()
            )
        else:
            culprits = None if micro_batches is None else self.find_culprits(micro_batches)
        strategy.zero_grad()
        bad = self.agreement.all_gather(first_bad_sample(micro_batches or ())).tolist()
        holders = [rank for rank, sample in enumerate(bad) if sample >= 0]
        updates_early, advice = strategy.options.overlap_optimizer, "a lower --lr or --clip-grad-norm may help"
        if holders:
            advice = f"sample {bad[holders[0]]:.0f} of rank {holders[0]} in this step, from 0, holds NaN or infinity"
        elif verdict.step == 0:
            advice = "no update came before it, so it is of the data, the first weights or the loss, and not of --lr"
        advice += strategy.nonfinite_advice
        if strategy.is_in_pipeline:
            advice += (
                "; a stage has NaN for hidden states and parameters of others, so x + block(x) belongs into a block, "
                "and for gradients where the next stage runs under no_grad or ignores its input"
            )
        if scale is not None:
            advice = f"so it stays at every loss scale, which has fallen to {scale:g}; {advice}"
        raise nonfinite_error(what, verdict.step, culprits, updates_early, advice)

    def find_culprits(self, micro_batches: Sequence[Weighted]) -> Sequence[int] | None:
        """The ranks that make a gradient that is not finite from these micro-batches. None: nobody looks."""
        return None

"""A step whose micro-batches are all here: what `forward_backward` does with the parts of a step in `loop`.

Each loss is weighted by its share of the global batch before backward, however unevenly ranks and micro-batches were
split. A rank that holds fewer micro-batches than others runs its latest one again with weight 0. In a pipeline the
schedule decides what runs when.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddp_lab.runtime.watch.phases import phase
from ddp_lab.strategy.batches import MicroBatch, StepData, Weighted, weighted
from ddp_lab.strategy.exchange import LACKS_ANY, UNKNOWN, Counts, GlobalBatch
from ddp_lab.strategy.loop import Loop
from ddp_lab.strategy.verdict import ReadLater

if TYPE_CHECKING:
    from ddp_lab.strategy.model_parallel import Balance, Pipeline


class ForwardBackward(Loop):
    """The steps of one strategy, those of `forward_backward` among them."""

    _latest: MicroBatch | None = None

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        weights: Sequence[float] | None,
        tokens: int,
        following: StepData | None,
    ) -> Tensor:
        """`Strategy.forward_backward`."""
        batches = weighted(micro_batches, weights)
        with self._abandoning():
            self._attempt(batches, tokens, following)
            self._keep(self.verdict, batches)
        return self.verdict.loss

    def _attempt(self, micro_batches: Sequence[Weighted], tokens: int = 0, following: StepData | None = None) -> None:
        """Forward, backward and exchange of a whole step on micro-batches that hold samples."""
        strategy = self._strategy
        global_batch = self.exchange.global_batch(self._counts(micro_batches, tokens), strategy.optimizer_steps)
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
        self.exchange.tell(self._counts_of(following))

    def _counts_of(self, step: StepData) -> Counts:
        return self._counts(weighted(step.micro_batches, step.weights), step.tokens)

    def _counts(self, micro_batches: Sequence[Weighted], tokens: int) -> Counts:
        lacks_any = self._latest is None and not micro_batches
        weight = sum(micro_batch.weight for micro_batch in micro_batches)
        return Counts(weight, len(micro_batches), tokens, LACKS_ANY * lacks_any)

    def _one_by_one(self, micro_batches: Sequence[Weighted], global_batch: GlobalBatch, scale: float | Tensor) -> None:
        """Forward and backward of each micro-batch before the next."""
        for index, (batch, terms) in enumerate(self._filled(micro_batches, global_batch.rounds)):
            weight = terms / global_batch.weight
            if self._balance:
                self._balance.weight = weight
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
            for batch, weight in self._filled(micro_batches, passes):
                balance.weight = weight
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

    def first_nonfinite_round(self, micro_batches: Sequence[Weighted]) -> int:
        """Run the step again, and inspect each gradient, since the sum over ranks does not tell. A strategy that
        reduces every micro-batch spreads a NaN: the ranks that have it first are to blame."""
        strategy, announced, self.exchange.announced = self._strategy, self.exchange.announced, None
        strategy.zero_grad()
        strategy.watch.inspects = True
        strategy.watch.look_at_each()
        try:
            self._attempt(micro_batches)
        finally:
            strategy.watch.inspects, self.exchange.announced = False, announced
        return strategy.watch.first_nonfinite_round

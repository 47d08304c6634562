"""A step on micro-batches that are all here: what `Strategy.forward_backward` runs.

Before it begins, the ranks tell each other how much each of them holds, so that every loss can be weighted by its share
of the global batch. This exchange is hidden: behind the optimizer of the step before if the step is announced, or
behind the first forward pass if there are several micro-batches.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.strategy.batches import MicroBatch, Weighted, weighted
from ddp_lab.strategy.communication.agreement import GlobalBatch, Pending
from ddp_lab.strategy.communication.verdict import ReadLater
from ddp_lab.strategy.hooks import Hooks
from ddp_lab.strategy.model_parallel import Balance, Pipeline
from ddp_lab.strategy.step import Step


class WholeStep(Step):
    """`Strategy` says what the methods of the same names do."""

    def __init__(self, strategy: Hooks) -> None:
        super().__init__(strategy)
        self._latest: MicroBatch | None = None
        self._announced: Pending | None = None
        self._pipeline = strategy.model_parallel.pipeline if strategy.model_parallel else None
        self._balance = strategy.model_parallel.balance if strategy.model_parallel else None
        if self._pipeline is not None:
            self._pipeline.begin(strategy.module)

    def answer(self, *args: Any, **kwargs: Any) -> Any:
        """What the whole model answers."""
        if self._pipeline is None:
            return self.forward(*args, **kwargs)
        self._strategy.finish_parameter_synchronization()
        with self._strategy.whole():
            return self._pipeline.answer(self.forward, args, kwargs)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        if self._pipeline is not None:
            raise UnsupportedError(
                "a pipeline decides when each micro-batch runs: use forward_backward, not micro_batch"
            )
        with super().micro_batch(last):
            yield

    def announce(self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None, tokens: int) -> None:
        self._announced = self._begin_counts(weighted(micro_batches, weights), tokens)

    def finish_announcement(self) -> None:
        """Wait until the other ranks have been told."""
        if self._announced is not None:
            _, work = self._announced
            work.wait()

    def run(self, micro_batches: Sequence[MicroBatch], weights: Sequence[float] | None, tokens: int) -> Tensor:
        """`Strategy.forward_backward`."""
        mine = weighted(micro_batches, weights)
        with self._abandoning():
            self._attempt(mine, tokens)
            self._keep(self.verdict, mine)
        return self.verdict.loss

    def _begin_counts(self, micro_batches: Sequence[Weighted], tokens: int) -> Pending:
        lacks_any = self._latest is None and not micro_batches
        weight = sum(micro_batch.weight for micro_batch in micro_batches)
        wants_to_stop = self._strategy.wants_to_stop()
        return self.agreement.begin_counts(weight, len(micro_batches), lacks_any, wants_to_stop, tokens)

    def _attempt(self, micro_batches: Sequence[Weighted], tokens: int = 0) -> None:
        """Forward and backward of a whole step on micro-batches that hold samples."""
        strategy = self._strategy
        counts, self._announced = self._announced or self._begin_counts(micro_batches, tokens), None
        self._latest = micro_batches[-1].batch if micro_batches else self._latest
        self._begin(averages=strategy.always_averages)
        load: ReadLater | None = None
        scale: float | Tensor = strategy.group_size if self.averages else 1
        if strategy.scaler is not None:
            strategy.scaler.times, scale = int(scale), strategy.scaler.scale
        if self._pipeline is not None:
            global_batch = self.agreement.counts(counts, strategy.optimizer_steps)
            self._walk(self._pipeline, micro_batches, global_batch, scale)
        elif self._balance is None:
            global_batch = self._one_by_one(micro_batches, counts, scale)
        else:
            try:
                global_batch = self._one_by_one(micro_batches, counts, scale)
                load = ReadLater(self._balance.load())
            finally:
                self.is_ahead = False
                self._balance.end_step()
        if global_batch.is_last:
            self.stops_after = strategy.optimizer_steps + 1
        self._finish()
        self.verdict.tokens, self.verdict.load = global_batch.tokens, load

    def _one_by_one(self, micro_batches: Sequence[Weighted], counts: Pending, scale: float | Tensor) -> GlobalBatch:
        """Forward and backward of each micro-batch before the next."""
        strategy, global_batch = self._strategy, None
        if self._balance is not None:
            global_batch = self.agreement.counts(counts, strategy.optimizer_steps)
            self._look_ahead(self._balance, micro_batches, global_batch.rounds)
        for index in itertools.count():
            if index + 1 >= len(micro_batches) or strategy.communicates_in_forward:
                # This may be the last micro-batch of all ranks: from here on the number of rounds must be known.
                global_batch = global_batch or self.agreement.counts(counts, strategy.optimizer_steps)
            is_last = global_batch is not None and index + 1 == global_batch.rounds
            batch = micro_batches[index].batch if index < len(micro_batches) else self._latest
            assert batch is not None
            if self._balance is not None:
                self._balance.counts = index < len(micro_batches)
            with self._round(is_last):
                loss = self.forward(**batch).loss
                global_batch = global_batch or self.agreement.counts(counts, strategy.optimizer_steps)
                weight = micro_batches[index].weight / global_batch.weight if index < len(micro_batches) else 0.0
                with phase("backward"):
                    (loss * (weight * scale)).backward()
            if weight:
                self._losses.append(loss.detach().double() * weight)
            if is_last:
                break
        assert global_batch is not None, "the last round knows it"
        return global_batch

    @torch.no_grad()
    def _look_ahead(self, balance: Balance, micro_batches: Sequence[Weighted], rounds: int) -> None:
        """Let experts see all micro-batches of the step, if they must, and draw random numbers as they will then."""
        passes = balance.passes_ahead(rounds)
        if not passes:
            return
        devices = [self._strategy.device] if self._strategy.device.type == "cuda" else []
        self.is_ahead = True
        with torch.random.fork_rng(devices), balance.ahead():
            for index in range(passes):
                balance.counts = index < len(micro_batches)
                batch = micro_batches[index].batch if balance.counts else self._latest
                assert batch is not None
                self.forward(**batch)
        self.is_ahead = False

    def _walk(
        self, pipeline: Pipeline, micro_batches: Sequence[Weighted], global_batch: GlobalBatch, scale: float | Tensor
    ) -> None:
        """Forward and backward in the order of a pipeline's schedule."""
        filling = [Weighted(self._latest, 0)] * (global_batch.rounds - len(micro_batches)) if self._latest else []
        padded = [*micro_batches, *filling]
        self._strategy.finish_parameter_synchronization()

        def loss_of(index: int, output: Any) -> Tensor:
            weight = padded[index].weight / global_batch.weight
            if weight:
                self._losses.append(output.loss.detach().double() * weight)
            return output.loss * (weight * scale)

        pipeline.step([batch for batch, _ in padded], self.forward, loss_of, self._backward)

    @contextmanager
    def _backward(self, is_last: bool) -> Iterator[None]:
        """A backward pass by itself."""
        with self._round(is_last), phase("backward"):
            yield

    def find_culprits(self, micro_batches: Sequence[Weighted]) -> Sequence[int]:
        """The sum over ranks does not say. So the step is run again, and each gradient inspected. A strategy may reduce
        every micro-batch, which spreads a NaN: the ranks that have it first are to blame."""
        strategy = self._strategy
        strategy.zero_grad()
        strategy.watch.inspects = True
        strategy.watch.look_at_each()
        try:
            self._attempt(micro_batches)
            rounds = self.agreement.all_gather(strategy.watch.first_nonfinite_round)
        finally:
            strategy.watch.inspects = False
        bad = rounds[rounds >= 0]
        return (rounds == bad.min()).nonzero().flatten().tolist() if len(bad) else []

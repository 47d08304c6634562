"""ZeRO-3: parameters are sharded too, and are whole only while the unit that they belong to runs.

What a rank holds. The model is cut into units: one for each transformer block, one for the embeddings, and the root for
the rest (last norm, head). At rest a rank holds its shard of each unit: 1/N of parameters, gradients and optimizer
states. In fp32 that is 4 P / N + 4 P / N + 8 P / N bytes, beside activations.

What happens in a step, with units 1 to n:
- Forward. Embeddings and root are all-gathered first. Unit i is all-gathered (unshard) while unit i-1 computes
  (prefetch), and freed (reshard) when unit i+1 begins. After forward the embeddings are freed. Unit n and the root stay
  whole: backward needs them first.
- Backward. While unit i computes, unit i-1 is all-gathered again. (Unit n-1 only when unit n is through: activations
  take the most memory at the start of backward.) When all gradients of unit i are made, its parameters are freed and
  its gradients are reduce-scattered. The reduce-scatter is in flight until backward comes to unit i-2: then it
  is waited for, and the full gradients of unit i are freed. To wait at unit i-1 already would save the full gradients
  of one unit, but backward would stop whenever the link is not done yet. The root is freed when its own gradients are
  made: at the start of backward, if it holds only a norm and a head.
- Optimizer. Each rank updates its shard. Nothing is sent: the next forward gathers the new parameters. What a forward
  pass before the update has left whole is freed.

What is whole at the peak. In forward: root, embeddings and two units. In backward: two units, and the full gradients of
two, of which 25 MiB may be there twice while they are copied together; at its start also the root. Under autocast,
copies of the linear layers' weights come and go with their unit (`sharding.options.low_precision`).

What is sent. A micro-batch sends a reduce-scatter of all P parameters and at most two all-gathers: 3(N-1)/N * P
elements. The embeddings and unit n are gathered once a micro-batch, and the root once a step. DDP sends 2(N-1)/N * P
elements once a step. Rajbhandari et al., 2020, "ZeRO", section 7.2.2.

`sharding.parts.unit` is how a unit is unsharded and resharded. `sharding.parts.schedule` is in which order, the same on
every rank, and `out_of_turn` what does not follow it. This file is when: what modules and autograd tell by hooks.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp.buckets import DEFAULT_CAP_MB
from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.runtime.tensors import tensors_in
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.blocks import find_blocks
from ddp_lab.strategy.gradient_watch import refuse_graph_of_backward
from ddp_lab.strategy.module_hooks import ModuleHook
from ddp_lab.strategy.strategy import Strategy
from sharding.options.embeddings import Embeddings, find_embeddings
from sharding.parts.calls import refuse_module_by_itself, require_latest, require_plain_call
from sharding.parts.gradient_buckets import ShardedGradientBucket
from sharding.parts.order import ExecutionOrder
from sharding.parts.out_of_turn import OutOfTurn
from sharding.parts.plan import around_units, plan_units
from sharding.parts.schedule import Schedule
from sharding.parts.sharded import ShardedStrategy
from sharding.parts.unit import ShardedParameters, Unit, storage_of, tensors_with_gradient


class Zero3(ShardedStrategy):
    """Optimizer states, gradients and parameters are sharded."""

    shards = frozenset({"optimizer_state", "gradients", "parameters"})
    supports = replace(ShardedStrategy.supports, offload=frozenset({"optimizer", "parameters"}))
    communicates_in_forward = reduces_in_backward = reduces_every_micro_batch = True
    nonfinite_advice = "; in zero3 so is a weight that is read outside of the module that holds it"
    flats: list[ShardedParameters]
    buckets: list[ShardedGradientBucket]

    @classmethod
    def in_stages(cls) -> type[Strategy]:
        from sharding.options.whole_steps import Zero3InStages

        return Zero3InStages

    def prepare(self) -> None:
        super().prepare()
        plans = plan_units(self.module, self.options.fixed_bucket_bytes or DEFAULT_CAP_MB * 2**20)
        if self.compiled and not find_blocks(self.module):
            raise UnsupportedError(
                "--compile: zero3 must gather layer by layer in a module that has no repeated blocks; take zero2"
            )
        embeddings = find_embeddings(self.module, plans)
        before, after = around_units(self.module, plans, embeddings.parameters)
        casts = self.options.precision != "fp32" and not self.compiled
        ranks_of, placement = self.ranks_of, self.placement
        units = [Unit(plan.modules, [plan.parameters], ranks_of, placement, casts) for plan in plans]
        self.root = Unit([self.module], [before, after], ranks_of, placement)
        self.embeddings = Embeddings(embeddings, ranks_of, placement)
        self.all_units: list[Unit] = [self.root, self.embeddings, *units]
        self.flats = [flat for unit in self.all_units for flat in unit.flats]
        self.buckets = [bucket for unit in self.all_units for bucket in unit.buckets]
        self._storages = {storage for flat in self.flats for storage in flat.storages()}
        self.broadcast_plain_tensors()
        self.order = ExecutionOrder(self.module, self.root, units)
        self.schedule = Schedule(self.root, self.embeddings, units)
        self.out_of_turn = OutOfTurn(self.order, self.schedule, self.process_group)
        self._in_backward = False
        self._forwards = 0  # of this micro-batch, with a graph
        self._add_hooks(units)

    def _add_hooks(self, units: list[Unit]) -> None:
        self.module.register_forward_pre_hook(ModuleHook(lambda *_: self._before_forward()))
        self.module.register_forward_hook(ModuleHook(lambda *args: self._after_forward(args[-1])))
        for unit in units:
            for module in unit.modules:
                before = ModuleHook(partial(self._before_unit, unit))
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)  # others may read weights
                module.register_forward_hook(ModuleHook(partial(self._after_unit, unit)))
        for embedding in self.embeddings.modules:  # no-op, unless an activation checkpoint looks up again in backward
            embedding.register_forward_pre_hook(ModuleHook(lambda *_: self._unshard_now(self.embeddings)))
        for unit in self.all_units:
            for bucket in unit.buckets:
                self.watch.then(bucket.flat.parameters, partial(self._on_gradients, unit, bucket), at=bucket.moves_at)

    def _unshard_now(self, unit: Unit) -> None:
        self.schedule.unshard(unit)
        if unit.is_sharded:
            self.out_of_turn.unshard(unit)
        unit.wait_for_unshard()

    # Forward -----------------------------------------------------------------------------------------------------

    def before_micro_batch(self) -> None:
        super().before_micro_batch()
        self.schedule.keeps_root = self.steps.another_follows
        self._forwards = 0

    def _before_forward(self) -> None:
        require_plain_call(self._in_backward)
        self.watch.look()
        # Of an earlier forward pass in this micro-batch, backward may have begun, perhaps for inputs alone.
        self._is_awaited = self._in_backward and not self.schedule.finish_backward()
        self._in_backward = False
        self.order.begin_forward()
        is_first = torch.is_grad_enabled() and self.steps.in_micro_batch and not self._forwards
        is_usual = is_first or self.steps.is_ahead
        self.out_of_turn.begin_forward(meets=not (is_usual and self.order.is_agreed))
        for bucket in self.buckets:
            bucket.missing = len(bucket.flat.parameters)
        for unit in self.schedule.units:
            if not self._forwards:  # else backward may still follow on what an earlier one has saved
                unit.begin_forward()
            unit.reshard()
        self.schedule.begin_forward()
        self._unshard_now(self.root)  # issues the embeddings' all-gather before its own
        self._unshard_now(self.embeddings)
        self.schedule.prefetch_in_forward(0)

    def _before_unit(self, unit: Unit, _: nn.Module, *inputs: Any) -> None:
        unit.await_inputs(inputs, self._in_backward, self.schedule.go_on)
        unit.given = [(leaf, leaf._version) for leaf in tensors_with_gradient(inputs)]
        if self._in_backward:  # an activation checkpoint computes its block again
            self._before_backward(unit)
            return
        unit.running += 1
        index = self.schedule.units.index(unit)
        for earlier in self.schedule.units[:index]:
            if not (earlier.is_sharded or earlier.running) and self.order.is_over(earlier):
                earlier.reshard()
        self._unshard_now(unit)
        self.order.begin(unit)
        self.schedule.prefetch_in_forward(index + 1)

    def _after_unit(self, unit: Unit, _: nn.Module, inputs: Any, output: Any) -> None:
        if not self._in_backward:
            unit.running -= 1
        is_called = self.out_of_turn.in_forward or torch._C._current_graph_task_id() != -1
        for leaf in unit.made_of(tensors_with_gradient(output)):
            leaf.register_hook(lambda _: self._before_backward(unit) if is_called else refuse_module_by_itself())

    def _after_forward(self, output: Any) -> None:
        if not self._storages.isdisjoint(map(storage_of, tensors_in(output))):
            raise OneRankError("forward answers with a parameter or a view of one, which zero3 frees; add 0 to it")
        self.schedule.issue_rest()
        self.out_of_turn.end_forward()
        self._forwards += torch.is_grad_enabled()
        if not (torch.is_grad_enabled() or self._is_awaited):
            self._reshard(self.all_units)
            return
        if not self.order.is_agreed:
            agreed = self.order.agree(self.embeddings.is_saved_for_backward(), self.process_group)
            self.embeddings.read_in_backward = agreed.embeddings_saved
            self.schedule.follow(agreed)
            self.notes += agreed.notes
        self.embeddings.reshard_after_forward()
        self._in_backward, drops = True, not self.steps.in_micro_batch
        self.schedule.begin_backward(drops or self._forwards > 1 or self.order.differs, drops)
        self._reshard([unit for unit in self.schedule.units if unit is not self.schedule.last_unit])
        for leaf in tensors_with_gradient(output):
            leaf.register_hook(lambda _: self._before_root_backward())

    # Backward ----------------------------------------------------------------------------------------------------

    def _before_root_backward(self) -> None:
        refuse_graph_of_backward()
        require_latest(self._in_backward)
        if self.schedule.is_new_backward():  # another output of the same pass may come when the root is reduced
            self.root.unshard()  # no-op, unless backward has run before
            self.root.wait_for_unshard()

    def _before_backward(self, unit: Unit) -> None:
        require_latest(self._in_backward)
        self.watch.look()  # at the gradients of the units before, which are reduced before this one is gathered
        self._unshard_now(unit)
        self.schedule.reduce_what_is_ready()
        if unit is not self.schedule.last_unit:
            self.schedule.prefetch()
        self.schedule.make_room()

    def _on_gradients(self, unit: Unit, bucket: ShardedGradientBucket, count: int, behind: Tensor | None) -> bool:
        reduction = self.schedule.reduction_of(bucket)
        bucket.missing -= count
        if self.schedule.drops_gradients:
            for parameter in bucket.flat.parameters:
                parameter.grad = None
        elif behind in bucket.moves_at:
            bucket.collect()
        if bucket.missing:
            return False
        if unit is self.schedule.last_unit and not any(other.missing for other in reduction.buckets):
            self.schedule.prefetch()  # not earlier: at the start of backward, activations take the most memory
        self.schedule.reduce_what_is_ready()
        return True

    def after_backward(self) -> None:
        self.schedule.issue_rest()  # what waits for gradients that backward did not make on this rank
        if self.steps.another_follows:
            self.finish_gradient_synchronization()

    def finish_gradient_synchronization(self) -> None:
        self.schedule.finish_reductions()
        self._reshard(self.all_units if not self.schedule.keeps_root else self.all_units[1:])
        self.take_gradients()

    def _reshard(self, units: list[Unit]) -> None:
        for unit in units:
            unit.reshard()

    def abandon_step(self) -> None:
        super().abandon_step()
        self._in_backward = self.schedule.keeps_root = False
        self.out_of_turn.stop()
        self.schedule.begin_forward()
        for unit in self.all_units:
            unit.forget()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        last = self.schedule.last_unit
        gathers = list(self.root.flats)  # once a step
        for unit in self.all_units[1:]:
            times = 1 if unit in (self.embeddings, last) else 2  # forward, and backward if it was resharded
            gathers += micro_batches * times * unit.flats
        gathers += self.passes_ahead(micro_batches) * self.flats
        return self.traffic_of(gathers, micro_batches * self.buckets)

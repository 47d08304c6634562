"""ZeRO-3: parameters are sharded too, and are whole only while the unit that they belong to runs.

What a rank holds. The model is cut into units: one for each block, and the root's two, stem (embeddings) and head (last
norm, output layer). At rest a rank holds its shard of each unit: 1/N of parameters, gradients and optimizer states. In
fp32 that is 4 P / N + 4 P / N + 8 P / N bytes, beside activations.

What happens in a step, with units 1 to n of blocks:
- Forward. The root is all-gathered first. Unit i is all-gathered (unshard) while unit i-1 computes (prefetch), and
  freed (reshard) when unit i+1 begins. Unit n and the root stay whole: backward needs them first.
- Backward. While unit i computes, unit i-1 is all-gathered again. (Unit n-1 only when unit n is through: activations
  take the most memory at the start of backward.) When all gradients of unit i are made, its parameters are freed and
  its gradients are reduce-scattered. That is in flight until backward comes to unit i-2, which waits for it.
- Optimizer. Each rank updates its shard. Nothing is sent: the next forward gathers the new parameters.

What is whole at the peak. In forward: the root and two units. In backward: two units, and the full gradients of two, of
which 25 MiB may be there twice while they are copied together; and the root, until its own gradients are made.

What is sent. A micro-batch sends a reduce-scatter of all P parameters and at most two all-gathers: 3(N-1)/N * P
elements. Unit n is gathered once a micro-batch, and the root once a step. DDP sends 2(N-1)/N * P elements once a step.
Rajbhandari et al., 2020, "ZeRO", section 7.2.2.

This is the plain case: each unit runs once in a forward pass, in the order of registration, and each micro-batch has
one forward pass. What `zero3` runs is `sharding.options.any_order`, which adds what other models need.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp.buckets import DEFAULT_CAP_MB
from ddp_lab.runtime.errors import OneRankError
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.modules import ModuleHook
from sharding.parts.gradient_buckets import ShardedGradientBucket
from sharding.parts.plan import around_units, plan_units
from sharding.parts.sharded import ShardedStrategy
from sharding.parts.unit import Schedule, Unit, UnitAction, tensors_with_gradient


class Zero3(ShardedStrategy):
    """Optimizer states, gradients and parameters are sharded."""

    shards = frozenset({"optimizer_state", "gradients", "parameters"})
    supports = replace(ShardedStrategy.supports, offload=frozenset({"optimizer", "parameters", ":"}))
    reduces_in_backward = reduces_every_micro_batch = True
    nonfinite_advice = "; in zero3 so is a weight that is read outside of the module that holds it"
    unit_type: type[Unit] = Unit
    buckets: list[ShardedGradientBucket]

    def prepare(self) -> None:
        super().prepare()
        self.plans = plan_units(self.module, self.options.fixed_bucket_bytes or DEFAULT_CAP_MB * 2**20)
        self.make_units()
        self.all_units = [*self.around, *self.units]
        self.flats = [flat for unit in self.all_units for flat in unit.flats]
        self.buckets = [bucket for unit in self.all_units for bucket in unit.buckets]
        self.broadcast_plain_tensors()
        self.schedule = Schedule()
        self.plan_passes()
        self.add_hooks()

    def make_units(self, apart: Collection[nn.Parameter] = ()) -> None:
        """Those `around` blocks are gathered before any of them runs. Parameters that are `apart` belong to none."""
        where = self.groups_of, self.placement
        stem, head = around_units(self.module, self.plans, apart)
        self.root = self.around = [Unit([self.module], stem, *where), Unit([self.module], head, *where)]
        self.units = [self.unit_type(plan.modules, plan.parameters, *where) for plan in self.plans]

    def plan_passes(self) -> None:
        """What all ranks send in a pass, in this order."""
        stem, head = self.root
        self.last_unit = self.units[-1] if self.units else None
        self.forward_pass = [UnitAction("unshard", unit) for unit in self.all_units]
        self.backward_pass = [UnitAction("reduce", head)] if head.buckets else []
        for index, unit in reversed([*enumerate(self.units)]):
            if index:
                self.backward_pass.append(UnitAction("unshard", self.units[index - 1]))
            self.backward_pass.append(UnitAction("reduce", unit))
        self.backward_pass += [UnitAction("reduce", stem)] if stem.buckets else []

    def add_hooks(self) -> None:
        self.module.register_forward_pre_hook(ModuleHook(lambda *_: self.before_forward()))
        self.module.register_forward_hook(ModuleHook(lambda *args: self.after_forward(args[-1])))
        for unit in self.units:
            for module in unit.modules:
                before = ModuleHook(partial(self.before_unit, unit))
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)  # others may read weights
                module.register_forward_hook(ModuleHook(partial(self.after_unit, unit)))
        for unit in self.all_units:
            for bucket in unit.buckets:
                self.watch.on_arrival(
                    bucket.flat.parameters, partial(self.on_gradients, unit, bucket), at=bucket.moves_at
                )

    def unshard(self, unit: Unit) -> None:
        """Have it whole, now."""
        self.schedule.unshard(unit)
        if unit.is_sharded:
            self.unshard_out_of_turn(unit)
        unit.wait_for_unshard()

    def reshard(self, units: Iterable[Unit]) -> None:
        for unit in units:
            unit.reshard()

    # Forward: unit i+1 is unsharded while unit i computes ------------------------------------------------------------

    def before_micro_batch(self) -> None:
        super().before_micro_batch()
        for unit in self.root:
            unit.stays = self.steps.another_follows

    def before_forward(self) -> None:
        self.reshard(self.units)  # what a forward pass without backward has left
        self.schedule.begin(self.forward_pass)
        self.schedule.unshard(*self.around)
        for unit in self.around:
            self.unshard(unit)
        self.schedule.unshard(*self.units[:1])  # prefetch

    def before_unit(self, unit: Unit, *_: Any) -> None:
        index = self.units.index(unit)
        self.reshard(self.units[:index])
        self.unshard(unit)
        self.schedule.unshard(*self.units[index + 1 : index + 2])  # prefetch

    def after_unit(self, unit: Unit, _: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in tensors_with_gradient(output):
            tensor.register_hook(lambda _: self.before_backward(unit))

    def after_forward(self, output: Any) -> None:
        self.schedule.issue_rest()
        if torch.is_grad_enabled():
            self.schedule.begin(self.backward_pass)
        self.reshard(self.units[:-1] if torch.is_grad_enabled() else self.all_units)

    # Backward: unit i-1 is unsharded while unit i computes, and i+1 is reduced ----------------------------------------

    def before_backward(self, unit: Unit) -> None:
        self.watch.look()  # reduce later units' gradients before this unit is gathered
        self.unshard(unit)
        self.schedule.reduce_what_is_ready()
        if unit is not self.last_unit:
            self.schedule.prefetch()
        self.schedule.make_room()

    def on_gradients(self, unit: Unit, bucket: ShardedGradientBucket, count: int, trigger: Tensor | None) -> bool:
        if not self.schedule.expects(unit):
            raise self.late_gradient(bucket)
        bucket.missing -= count
        if trigger in bucket.moves_at:
            bucket.collect()
        if bucket.missing:
            return False
        if unit is self.last_unit and unit.has_all_gradients:
            self.schedule.prefetch()  # not earlier: at the start of backward, activations take the most memory
        self.schedule.reduce_what_is_ready()
        return True

    def after_backward(self) -> None:
        self.schedule.issue_rest()  # reductions that wait for gradients that backward did not make on this rank
        if self.steps.another_follows:
            self.finish_gradient_synchronization()

    def finish_gradient_synchronization(self) -> None:
        self.schedule.finish_reductions()
        self.reshard(unit for unit in self.all_units if not unit.stays)
        self.take_gradients()

    def abandon_step(self) -> None:
        super().abandon_step()
        self.schedule.begin([])
        for unit in self.all_units:
            unit.forget()

    def unshard_out_of_turn(self, unit: Unit) -> None:
        raise OneRankError("units run again, or in another order than that of registration")

    def late_gradient(self, bucket: ShardedGradientBucket) -> OneRankError:
        return OneRankError("a gradient came after its unit was reduced: units ran in another order than registered")

    def expected_gradient_traffic(self, micro_batches: int, more_units: Sequence[Unit] = ()) -> list[Collective]:
        """With all-gathers of `more_units`."""
        backward_units = [unit for unit in self.units if unit is not self.last_unit]  # in backward
        gathered = [*self.root, *more_units, *micro_batches * [*self.units, *backward_units]]
        return self.traffic_of([flat for unit in gathered for flat in unit.flats], micro_batches * self.buckets)

"""ZeRO-3 for all models: `zero3`, as users choose it. `sharding.zero3` is the plain case, which this one extends.

- Units in any order. Ranks learn in the first forward pass in which order units run, and agree on it
  (`sharding.options.order`). From then on it is the order of `plan_passes`. A unit that runs twice is freed after its
  last run.
- Units out of turn. One that has run as often as agreed is needed again, or a rank has an order of its own. No rank can
  gather it alone. So ranks meet: at each such unit and at the end of the forward pass, they tell each other which unit
  they need, and all gather it. They do so until they have agreed on an order; later, in passes without a graph, outside
  of micro-batches, or after another one in the same micro-batch. In the usual step a meeting would cost time. There
  such a unit is refused.
- Several forward passes before backward. A parameter has its gradient when all of them are through with it, so
  everything is unsharded before the first reduction.
- Activation checkpoints, which run units again in backward, and frozen parameters (`sharding.options.units`).
- Embeddings, which are freed after forward: backward does not read their weights.
- Under autocast, copies of the linear layers' weights come and go with their unit (`sharding.options.units`).
- Backward outside of a micro-batch, whose gradients nobody wants: they are dropped, and nothing is reduced.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.strategy.account import Collective
from ddp_lab.strategy.gradient_watch import refuse_graph_of_backward, second_gradient
from ddp_lab.strategy.modules import ModuleHook, find_blocks, tensors_in
from ddp_lab.strategy.strategy import Strategy
from sharding.options.order import DIFFERS, ExecutionOrder, in_backward
from sharding.options.units import BlockUnit, Embeddings
from sharding.parts.gradient_buckets import ShardedGradientBucket
from sharding.parts.plan import find_embeddings
from sharding.parts.unit import Unit, UnitAction, tensors_with_gradient
from sharding.zero3 import Zero3


class Zero3InAnyOrder(Zero3):
    """Attributes:
    in_forward: A forward pass of the whole module is under way.
    meets: In this pass ranks meet where they need a unit out of turn.
    in_backward: A backward pass may follow, or has begun.
    drops_gradients: It is outside of a micro-batch.
    forwards: Forward passes of this micro-batch, with a graph.
    """

    unit_type = BlockUnit
    units: list[BlockUnit]  # type: ignore[assignment]
    in_forward = meets = in_backward = drops_gradients = False
    forwards = 0

    @classmethod
    def in_stages(cls) -> type[Strategy]:
        from sharding.options.whole_steps import Zero3InStages

        return Zero3InStages

    def prepare(self) -> None:
        if self.compiled and not find_blocks(self.module):
            raise UnsupportedError(
                "--compile: zero3 must gather layer by layer in a module that has no repeated blocks; take zero2"
            )
        super().prepare()
        tensors = (tensor for flat in self.flats for tensor in (flat.full, flat.parameters[0]))  # whole, and not
        self.storages = {tensor.untyped_storage()._cdata for tensor in tensors}

    def make_units(self, apart: Collection[nn.Parameter] = ()) -> None:
        plan = find_embeddings(self.module, self.plans)
        self.embeddings = Embeddings(plan.modules, plan.parameters, self.groups_of, self.placement)
        super().make_units(plan.parameters)
        self.around = [*self.root, self.embeddings]
        if self.options.precision != "fp32" and not self.compiled:
            for unit in self.units:
                unit.cast_weights()
        self.order = ExecutionOrder(self.module, self.root, self.units)

    def plan_passes(self) -> None:
        runs, heads = self.order.runs, self.order.heads
        self.last_unit = runs[-1][-1] if runs else None
        self.forward_pass = [UnitAction("unshard", unit) for unit in (self.embeddings, *self.root, *self.units)]
        other_units = [self.embeddings, *(unit for unit in self.root if unit not in heads)]
        head_reductions, other_reductions = (
            [UnitAction("reduce", unit) for unit in units if unit.buckets] for units in (heads, other_units)
        )
        self.backward_pass = [*head_reductions, *in_backward(runs), *other_reductions]

    def add_hooks(self) -> None:
        super().add_hooks()
        for embedding in self.embeddings.modules:  # no-op, unless an activation checkpoint looks up again in backward
            embedding.register_forward_pre_hook(ModuleHook(lambda *_: self.unshard(self.embeddings)))

    # Forward ---------------------------------------------------------------------------------------------------------

    def before_micro_batch(self) -> None:
        super().before_micro_batch()
        self.forwards = 0

    def before_forward(self) -> None:
        self.require_plain_call()
        self.watch.look()
        # Of an earlier forward pass in this micro-batch, backward may have begun, perhaps for inputs alone.
        self.is_awaited = self.in_backward and not self.finish_backward()
        self.in_backward = False
        self.order.begin_forward()
        is_first = torch.is_grad_enabled() and self.steps.in_micro_batch and not self.forwards
        self.in_forward, self.meets = True, not (self.order.is_agreed and (is_first or self.steps.is_ahead))
        for bucket in self.buckets:
            bucket.missing = len(bucket.flat.parameters)
        for unit in self.units if not self.forwards else ():  # else backward may still read what an earlier one saved
            unit.begin_forward()
        super().before_forward()  # issues the embeddings' all-gather before that of the root

    def before_unit(self, unit: BlockUnit, *inputs: Any) -> None:  # type: ignore[override]
        unit.before_module(inputs[1:], self.in_backward, self.go_on)
        if self.in_backward:  # an activation checkpoint computes its block again
            self.before_backward(unit)
            return
        unit.running += 1
        index = self.units.index(unit)
        self.reshard(before for before in self.units[:index] if not before.running and self.order.is_over(before))
        self.unshard(unit)
        self.order.begin(unit)
        self.schedule.unshard(*self.units[index + 1 : index + 2])  # prefetch

    def after_unit(self, unit: BlockUnit, _: nn.Module, inputs: Any, output: Any) -> None:  # type: ignore[override]
        if not self.in_backward:
            unit.running -= 1
        is_called = self.in_forward or torch._C._current_graph_task_id() != -1
        for tensor in unit.new_outputs(tensors_with_gradient(output)):
            tensor.register_hook(lambda _: self.before_backward(unit) if is_called else refuse_module_by_itself())

    def after_forward(self, output: Any) -> None:
        if any(tensor.untyped_storage()._cdata in self.storages for tensor in tensors_in(output)):
            raise OneRankError("forward returns a parameter or a view of one, which zero3 frees; add 0 to it")
        self.schedule.issue_rest()
        while self.meets and self.meet(None):  # until the forward passes of other ranks are over, too
            pass
        self.in_forward = self.meets = False
        self.forwards += torch.is_grad_enabled()
        if not (torch.is_grad_enabled() or self.is_awaited):
            self.reshard(self.all_units)
            return
        if not self.order.is_agreed:
            self.follow_agreed_order()
        self.embeddings.reshard_after_forward()
        self.begin_backward()
        self.reshard(unit for unit in self.units if unit is not self.last_unit)
        for tensor in tensors_with_gradient(output):
            tensor.register_hook(lambda _: self.before_root_backward())

    def follow_agreed_order(self) -> None:
        is_saved, before = self.embeddings.is_saved_for_backward(), self.last_unit
        self.embeddings.read_in_backward = self.order.agree(is_saved, self.process_group)
        self.notes += [DIFFERS] * self.order.differs
        self.units = list(dict.fromkeys(unit for part in self.order.runs for unit in part))
        self.plan_passes()
        if self.last_unit and self.last_unit is not before:  # ranks may have freed it
            self.last_unit.reshard()
            self.last_unit.unshard()

    def unshard_out_of_turn(self, unit: BlockUnit) -> None:  # type: ignore[override]
        """Start to gather `unit`, which the schedule has issued before.

        Raises:
            OneRankError: The order of a training step is not the one that was agreed on.
        """
        if not self.in_forward:  # backward runs again, or a module is called by itself; it must be on all ranks
            self.require_not_reduced(unit)
            unit.unshard()
        elif self.meets:
            while self.schedule.to_come:  # keep nothing: from here on ranks ask each other for units
                passed_over = self.schedule.to_come[0].unit
                self.schedule.issue_next()
                passed_over.reshard()
            self.meet(unit)
        else:
            before = self.order.latest or unit
            raise OneRankError(
                f"rank {dist.get_rank()} runs {self.order.name(unit)}, which zero3 has freed, after "
                f"{self.order.name(before)}; the ranks have agreed to go on to "
                f"{self.order.following(before)}: in the first step, run modules in the order of later ones, "
                "and as often, or take zero2"
            )

    def meet(self, own_unit: BlockUnit | None) -> list[BlockUnit]:
        """Gather the units that any rank needs now. Returns them: none if all ranks are at the end."""
        numbers = [-1] * dist.get_world_size(self.process_group)
        number = -1 if own_unit is None else self.units.index(own_unit)
        dist.all_gather_object(numbers, number, self.process_group)
        needed_units = [self.units[number] for number in sorted(set(numbers) - {-1})]
        for unit in needed_units:
            if unit is own_unit:
                unit.unshard()
            else:
                unit.take_part()
        return needed_units

    # Backward --------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self.in_backward, self.drops_gradients = True, not self.steps.in_micro_batch
        actions = self.backward_pass
        if self.drops_gradients or self.forwards > 1 or self.order.differs:
            actions = sorted(actions, key=lambda action: action.kind != "unshard")
        if self.drops_gradients:
            actions = [UnitAction("reshard" if kind == "reduce" else kind, unit) for kind, unit in actions]
        self.schedule.begin(actions)
        self.begun_with, self.autograd_passes = len(actions), set[int]()

    def finish_backward(self) -> bool:
        """Issue the remaining actions of a backward pass. Returns whether one had begun."""
        if len(self.schedule.to_come) == self.begun_with:
            return False
        self.schedule.issue_rest()
        self.schedule.finish_reductions()
        return True

    def before_root_backward(self) -> None:
        refuse_graph_of_backward()
        self.require_latest_forward()
        passes_before = len(self.autograd_passes)
        self.autograd_passes.add(torch._C._current_graph_task_id())
        if len(self.autograd_passes) > passes_before:  # not again for another output: the root may be reduced by then
            for unit in self.root:
                unit.unshard()  # no-op, unless backward has run before
                unit.wait_for_unshard()

    def before_backward(self, unit: Unit) -> None:
        self.require_latest_forward()
        super().before_backward(unit)

    def go_on(self) -> None:
        """Continue after a gradient of a module's inputs, for which the unit stayed whole."""
        self.schedule.reduce_what_is_ready()
        self.schedule.prefetch()

    def on_gradients(self, unit: Unit, bucket: ShardedGradientBucket, count: int, trigger: Tensor | None) -> bool:
        if self.drops_gradients and self.schedule.expects(unit):
            for parameter in bucket.flat.parameters:
                parameter.grad = None
        return super().on_gradients(unit, bucket, count, trigger)

    def abandon_step(self) -> None:
        super().abandon_step()
        self.in_forward = self.meets = self.in_backward = False

    def expected_gradient_traffic(self, micro_batches: int, more_units: Sequence[Unit] = ()) -> list[Collective]:
        balance = self.model_parallel.balance if self.model_parallel else None
        passes_ahead = balance.passes_ahead(micro_batches) * self.all_units if balance else []
        return super().expected_gradient_traffic(
            micro_batches, [*micro_batches * [self.embeddings], *passes_ahead, *more_units]
        )

    # How the module may not be called --------------------------------------------------------------------------------

    def require_plain_call(self) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise OneRankError(
                "a transform of torch.func (vmap, grad, ...) calls the module, but zero3 gathers parameters in place "
                "in forward; take zero2, or call the transform within forward"
            )
        if self.in_backward and torch._C._current_graph_task_id() != -1:
            raise OneRankError(
                "backward calls the module again, as an activation checkpoint around the whole strategy does; put "
                "checkpoints around blocks, or take zero2"
            )

    def require_latest_forward(self) -> None:
        if not self.in_backward:
            raise OneRankError(
                "backward runs through a forward pass that was over when another one began; call forward and then "
                "backward in the same micro_batch"
            )

    def require_not_reduced(self, unit: Unit) -> None:
        is_too_late = not (self.drops_gradients or self.schedule.expects(unit))
        if is_too_late and unit.buckets and torch._C._current_graph_task_id() != -1:
            raise self.late_gradient(unit.buckets[0])

    def late_gradient(self, bucket: ShardedGradientBucket) -> OneRankError:
        parameters = bucket.flat.parameters
        description = f"a parameter of shape {tuple(parameters[0].shape)}"
        if not bucket.missing:
            return second_gradient(description)
        if any(p.grad is not None and p.grad.isnan().any() for p in parameters):
            cause = "its weight was read outside of the module that holds it, where it is NaN"
        elif len(self.autograd_passes) > 1:
            cause = "a backward pass for inputs alone came first"
        else:
            cause = (
                "modules, or activation checkpoints around several of them, run in another order than in the first step"
            )
        return OneRankError(f"a gradient of {description} came after its unit was reduced: {cause}; take zero2")


def refuse_module_by_itself() -> None:
    raise OneRankError(
        "a block was called by itself, and not by the strategy's forward pass, after which zero3 reduces its gradient; "
        "call it within forward, or under no_grad"
    )

"""ZeRO-3: as ZeRO-2, and parameters are whole only while the block that they belong to runs.

Each rank keeps a shard of everything. A model is a chain of units, one a transformer block, and a root unit for the
rest (embeddings, last norm, head). Just before a unit runs, in forward and again in backward, its parameters are
all-gathered (unsharded); afterwards they are freed (resharded). The next unit is fetched while one computes. The root
stays whole through a step, and so does the last block between forward and backward. So a rank never holds more full
parameters than the root and two blocks, with the gradients of one block beside them, and what is on the wire for each
micro-batch is two all-gathers and a reduce-scatter: 3(N-1)/N * P elements, half as much again as DDP.

Ranks must issue collectives in the same order, whatever their data makes them run. So they follow a script: in forward,
units are gathered in order; in backward, in reverse, each gather followed by the reduction of the unit before. A rank
that skips a unit gathers and reduces it all the same when it comes to a later one. The order is the one in which
modules ran in the first forward pass.

Fp32 bytes a rank at rest, beside activations: 4 P / N parameters, 4 P / N gradients, 8 P / N optimizer states.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp.bucket_ddp_async import DEFAULT_CAP_MB
from sharding.collectives import expected_all_gathers, expected_reduce_scatters
from sharding.flat import FlatParameters
from sharding.sharded import ShardedStrategy
from sharding.unit import ReleasedParameters, Unit
from sharding.units import around_units, plan_units
from sharding.zero2 import FreedGradientBucket
from training.replicated import broadcast_from_rank0, buffer_broadcasts
from training.traffic import Collective


class Act(NamedTuple):
    """An entry of the script: gather a unit's parameters, or reshard them and reduce these gradients of theirs."""

    unit: Unit
    is_gather: bool = True
    buckets: tuple[FreedGradientBucket, ...] = ()


class Zero3(ShardedStrategy):
    """Optimizer states, gradients and parameters are sharded."""

    shards = frozenset({"optimizer_state", "gradients", "parameters"})
    communicates_in_forward = True

    def prepare(self) -> None:
        super().prepare()
        plans = plan_units(self.module, (self.options.bucket_cap_mb or DEFAULT_CAP_MB) * 2**20)
        before, after = around_units(self.module, plans)
        self.units = [Unit(plan.modules, [plan.parameters], self.process_group) for plan in plans]
        self.root = Unit([self.module], [before, after], self.process_group)
        self.flats = [flat for unit in (self.root, *self.units) for flat in unit.flats]
        self.buckets: list[FreedGradientBucket] = [b for unit in (self.root, *self.units) for b in unit.buckets]
        broadcast_from_rank0(self.plain_tensors(), self.process_group)
        self._sequence = list(self.units)
        self._order_is_agreed = False
        self._early: tuple[FreedGradientBucket, ...] = ()
        self._more_follow = False
        self._reset()
        self._add_hooks()

    def _reset(self) -> None:
        self._in_backward = False
        self._in_flight: list[FreedGradientBucket] = []
        self._read(self._forward_script())

    def _add_hooks(self) -> None:
        self.module.register_forward_pre_hook(lambda *_: self._before_forward())
        self.module.register_forward_hook(lambda *_: self._after_forward())
        for unit in self.units:
            for module in unit.modules:
                module.register_forward_pre_hook(lambda *_, unit=unit: self._before_unit(unit))
                module.register_forward_hook(lambda _, args, out, unit=unit: self._after_unit(unit, out))
        inside = {m for unit in self.units for member in unit.modules for m in member.modules()}
        self._temporary = [
            module.register_forward_pre_hook(lambda m, _: self._ran.append(m))
            for module in self.module.modules()
            if module not in inside or any(module in unit.modules for unit in self.units)
        ]
        for unit in (self.root, *self.units):
            for bucket in unit.buckets:
                for slot, parameter in enumerate(bucket.flat.parameters):
                    parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, unit, bucket, slot))

    # The script --------------------------------------------------------------------------------------------------

    def _forward_script(self) -> list[Act]:
        return [Act(self.root), *map(Act, self.units)]

    def _backward_script(self) -> list[Act]:
        """Units in the reverse of the order in which they ran: each is gathered before the one that runs before it in
        backward is reduced, which is when all its uses are through backward."""
        uses = list(reversed(self._sequence))
        late = tuple(bucket for bucket in self.root.buckets if bucket not in self._early)
        script = [Act(self.root, False, self._early)] if self._early else []
        for index, unit in enumerate(uses):
            following = uses[index + 1] if index + 1 < len(uses) else unit
            if following not in uses[: index + 1]:
                script.append(Act(following))
            if unit not in uses[index + 1 :]:
                script.append(Act(unit, False, tuple(unit.buckets)))
        return [*script, Act(self.root, False, late)] if late else script

    def _read(self, script: list[Act]) -> None:
        self._script, self._next = script, 0

    def _follow_to(self, act: Act) -> None:
        """Do what the script says up to `act`; nothing if that is done already."""
        while act in self._script[self._next :]:
            self._do_next()

    def _do_next(self) -> None:
        act = self._script[self._next]
        self._next += 1
        if act.is_gather:
            act.unit.unshard()
            return
        self._finish_reductions()
        if act.unit is not self.root or (self._next == len(self._script) and not self._more_follow):
            act.unit.reshard()
        for bucket in act.buckets:
            bucket.start_reduction()
        self._in_flight = list(act.buckets)

    def _finish_reductions(self) -> None:
        for bucket in self._in_flight:
            bucket.finish_reduction()
        self._in_flight = []

    def _make_whole(self, unit: Unit) -> None:
        self._follow_to(Act(unit))
        unit.unshard()  # out of turn, if a module runs again
        unit.wait()

    # Forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self) -> None:
        self._in_backward = False
        self._ran: list[nn.Module] = []
        for unit in self.units:
            unit.running = 0
            unit.reshard()
        self._read(self._forward_script())
        self._make_whole(self.root)
        self._prefetch(0)

    def _before_unit(self, unit: Unit) -> None:
        if self._in_backward:  # a checkpoint computes its block again
            self._before_backward(unit)
            return
        unit.running += 1
        index = self.units.index(unit)
        for earlier in self.units[:index]:
            # Until the order is known, a unit that was passed over may still run: ranks that release it and ranks that
            # do not get so far would gather it again at different places.
            if not earlier.running and (self._order_is_agreed or any(m in self._ran for m in earlier.modules)):
                earlier.reshard()
        self._make_whole(unit)
        self._prefetch(index + 1)

    def _prefetch(self, index: int) -> None:
        if index < len(self.units):
            self._follow_to(Act(self.units[index]))

    def _after_unit(self, unit: Unit, output: Any) -> None:
        if not self._in_backward:
            unit.running -= 1
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._before_backward(unit))

    def _after_forward(self) -> None:
        while self._next < len(self._script):  # units that this rank has skipped
            self._do_next()
        if torch.is_grad_enabled():
            self._agree_on_order()
            self._in_backward = True
            self._read(self._backward_script())
        for unit in self.units if self._in_backward else (*self.units, self.root):
            if self._in_backward and unit is self._kept:
                unit.unshard()
            else:
                unit.reshard()

    @property
    def _kept(self) -> Unit | None:
        """The unit that ran last in forward: backward begins with it, so it is not resharded in between."""
        return self._sequence[-1] if self._sequence else None

    def _agree_on_order(self) -> None:
        """Once: learn in which order units run, and what of the root runs only after them."""
        if self._order_is_agreed:
            return
        for handle in self._temporary:
            handle.remove()
        index_of = {module: index for index, unit in enumerate(self.units) for module in unit.modules}
        runs = [index_of[module] for module in self._ran if module in index_of]
        end = max((time for time, module in enumerate(self._ran) if module in index_of), default=len(self._ran))
        owners = {p: m for m in self.module.modules() for p in m.parameters(recurse=False)}
        early = [
            index
            for index, bucket in enumerate(self.root.buckets)
            if all(owners[p] in self._ran and self._ran.index(owners[p]) > end for p in bucket.flat.parameters)
        ]
        seen: list[Any] = [None] * self.data_parallel_size
        dist.all_gather_object(seen, (runs, early), self.process_group)
        self._sequence = [self.units[index] for index in merge_orders([order for order, _ in seen], len(self.units))]
        self.units = list(dict.fromkeys(self._sequence))
        self._early = tuple(self.root.buckets[index] for index in seen[0][1])
        self._order_is_agreed = True

    # Backward ----------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit) -> None:
        self._make_whole(unit)
        self._do_what_is_ready()
        if not unit.buckets:
            self._prefetch_backward()

    def _prefetch_backward(self) -> None:
        if self._next < len(self._script) and self._script[self._next].is_gather:
            self._do_next()

    def _do_what_is_ready(self) -> None:
        while self._next < len(self._script):
            act = self._script[self._next]
            if act.is_gather or any(bucket.missing for bucket in act.buckets):
                break
            self._do_next()

    def _on_gradient(self, unit: Unit, bucket: FreedGradientBucket, slot: int, _: Tensor) -> None:
        act = next((act for act in self._script[self._next :] if bucket in act.buckets), None)
        if act is None:
            raise RuntimeError(
                f"a gradient of a parameter of shape {tuple(bucket.flat.parameters[slot].shape)} came after its unit "
                "was reduced: modules run in another order than in the first step; use zero2 for such a model"
            )
        if all(other.full is None for other in act.buckets):
            self._finish_reductions()
            if unit not in (self.root, self._kept):
                self._prefetch_backward()
        bucket.place(slot)
        bucket.missing -= 1
        if unit is self._kept and not any(other.missing for other in act.buckets):
            self._prefetch_backward()  # not earlier: at the start of backward, activations take the most memory
        self._do_what_is_ready()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Every micro-batch is reduced; but the root stays whole for the next one."""
        self._more_follow = True
        try:
            yield
        finally:
            self._more_follow = False

    def after_backward(self) -> None:
        while self._next < len(self._script):  # what waits for gradients that backward did not make
            self._do_next()
        self._finish_reductions()
        for bucket in self.buckets:
            bucket.missing = len(bucket.flat.parameters)
        for unit in self.units if self._more_follow else (*self.units, self.root):
            unit.reshard()
        self.take_gradients()

    def abandon_step(self) -> None:
        super().abandon_step()
        self._reset()
        for unit in (*self.units, self.root):
            unit.reshard()

    # State and traffic -------------------------------------------------------------------------------------------

    @contextmanager
    def unsharded(self, flat: FlatParameters, gather: bool = True) -> Iterator[None]:
        assert isinstance(flat, ReleasedParameters)
        if gather:
            flat.unshard().wait()
        else:
            flat.allocate()
        try:
            yield
        finally:
            flat.reshard()

    def expected_gradient_traffic(self, micro_batches: int) -> list[Collective]:
        root = [flat.full_bytes for flat in self.root.flats]
        blocks = [flat.full_bytes for unit in self.units for flat in unit.flats]
        kept = [flat.full_bytes for flat in self._kept.flats] if self._kept else []
        gathers = root + micro_batches * (2 * blocks)
        for payload in micro_batches * kept:
            gathers.remove(payload)
        reductions = micro_batches * [flat.full_bytes for flat in self.flats if flat.trainable]
        device = self.flats[0].full.device
        return [
            expected_reduce_scatters(reductions, self.process_group, device),
            expected_all_gathers(gathers, self.process_group, device),
            *buffer_broadcasts(self.module, self.data_parallel_size),
        ]


def merge_orders(orders: Sequence[Sequence[int]], count: int) -> list[int]:
    """The order in which the first rank ran `count` units, with those that it did not run put behind the unit that came
    before them on a rank that did, or else behind the one registered before them."""
    merged = list(orders[0])
    for order in (*orders[1:], range(count)):
        position = 0
        for index in order:
            if index not in merged:
                merged.insert(position, index)
            position = merged.index(index) + 1
    return merged

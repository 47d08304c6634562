"""ZeRO-3: as ZeRO-2, and parameters are whole only while the block that they belong to runs.

Each rank keeps a shard of everything. A model is a chain of units, one a transformer block, and a root unit for the
rest (last norm, head). Just before a unit runs, in forward and again in backward, its parameters are all-gathered
(unsharded); afterwards they are freed (resharded). The next unit is fetched while one computes. The root stays whole
until backward is through with it, and so does the last block between forward and backward; embeddings are freed after
forward, since the gradient of a lookup does not depend on the table. So a rank never holds more full parameters than
the root, embeddings and two blocks, with the gradients of two blocks beside them (some made, some reduced), and what is
on the wire for each micro-batch is two all-gathers and a reduce-scatter: 3(N-1)/N * P elements, half as much again as
DDP.

This file says when a unit is needed and when its gradients are there, which modules and autograd tell by hooks;
`sharding.schedule` says what is to be done before, in the same order on every rank.

Fp32 bytes a rank at rest, beside activations: 4 P / N parameters, 4 P / N gradients, 8 P / N optimizer states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp.buckets import DEFAULT_CAP_MB
from sharding.collectives import expected_all_gathers, expected_reduce_scatters
from sharding.flat import FlatParameters
from sharding.schedule import Schedule
from sharding.sharded import ShardedStrategy
from sharding.unit import ReleasedParameters, Unit
from sharding.units import around_units, find_tables, plan_units
from sharding.zero2 import FreedGradientBucket
from training.checkpoint.ranges import Piece
from training.communication.traffic import Collective
from training.replicated import broadcast_from_rank0, buffer_broadcasts


class Zero3(ShardedStrategy):
    """Optimizer states, gradients and parameters are sharded."""

    shards = frozenset({"optimizer_state", "gradients", "parameters"})
    communicates_in_forward = True
    buckets: list[FreedGradientBucket]

    def prepare(self) -> None:
        super().prepare()
        plans = plan_units(self.module, self.options.fixed_bucket_bytes or DEFAULT_CAP_MB * 2**20)
        tables = find_tables(self.module, plans)
        before, after = around_units(self.module, plans, tables.parameters)
        units = [Unit(plan.modules, [plan.parameters], self.process_group) for plan in plans]
        self.root = Unit([self.module], [before, after], self.process_group)
        self.tables = Unit(tables.modules, [tables.parameters], self.process_group)
        self.flats = [flat for unit in (self.root, self.tables, *units) for flat in unit.flats]
        self.buckets = [bucket for unit in (self.root, self.tables, *units) for bucket in unit.buckets]
        broadcast_from_rank0(self.plain_tensors(), self.process_group)
        self.schedule = Schedule(self.root, self.tables, units)
        self._in_backward = False
        self._add_hooks()

    @property
    def units(self) -> list[Unit]:
        """In the order of their first use, all but the root and the tables."""
        return self.schedule.units

    def _add_hooks(self) -> None:
        self.module.register_forward_pre_hook(lambda *_: self._before_forward())
        self.module.register_forward_hook(lambda *_: self._after_forward())
        for unit in self.units:
            for module in unit.modules:
                module.register_forward_pre_hook(lambda *_, unit=unit: self._before_unit(unit))
                module.register_forward_hook(lambda _, args, out, unit=unit: self._after_unit(unit, out))
        for table in self.tables.modules:  # where a checkpoint looks up again in backward
            table.register_forward_pre_hook(lambda *_: self._make_whole(self.tables))
        inside = {m for unit in self.units for member in unit.modules for m in member.modules()}
        self._temporary = [
            module.register_forward_pre_hook(lambda m, _: self._ran.append(m))
            for module in self.module.modules()
            if module not in inside or any(module in unit.modules for unit in self.units)
        ]
        for unit in (self.root, self.tables, *self.units):
            for bucket in unit.buckets:
                for slot, parameter in enumerate(bucket.flat.parameters):
                    parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, unit, bucket, slot))

    def _make_whole(self, unit: Unit) -> None:
        self.schedule.gather(unit)
        unit.unshard()  # out of turn, if a module runs again
        unit.wait()

    # Forward -----------------------------------------------------------------------------------------------------

    def _before_forward(self) -> None:
        self._in_backward = False
        self._ran: list[nn.Module] = []
        for unit in self.units:
            unit.running = 0
            unit.reshard()
        self.schedule.begin_forward()
        self._make_whole(self.root)
        self._make_whole(self.tables)
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
            is_over = self.schedule.order_is_agreed or any(member in self._ran for member in earlier.modules)
            if is_over and not earlier.running:
                earlier.reshard()
        self._make_whole(unit)
        self._prefetch(index + 1)

    def _prefetch(self, index: int) -> None:
        if index < len(self.units):
            self.schedule.gather(self.units[index])

    def _after_unit(self, unit: Unit, output: Any) -> None:
        if not self._in_backward:
            unit.running -= 1
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self._before_backward(unit))

    def _after_forward(self) -> None:
        self.schedule.do_rest()
        if not torch.is_grad_enabled():
            self._reshard(*self.units, self.root, self.tables)
            return
        saved_tables = not self.schedule.reads_tables_again and self.tables.is_saved()
        for handle in self._temporary:
            handle.remove()
        self.schedule.agree(self._ran, saved_tables, self.module, self.process_group)
        if not self.schedule.reads_tables_again:
            if saved_tables:
                raise RuntimeError(
                    "backward reads the weight of an embedding in this step, and did not in the first, since when it "
                    "is freed after forward; use zero2 for such a model"
                )
            self._reshard(self.tables)
        self._in_backward = True
        self.schedule.begin_backward()
        last = self.schedule.last_unit
        self._reshard(*(unit for unit in self.units if unit is not last))
        if last:
            last.unshard()

    def _reshard(self, *units: Unit) -> None:
        for unit in units:
            unit.reshard()

    # Backward ----------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit) -> None:
        self._make_whole(unit)
        self.schedule.do_ready_reductions()
        if unit is not self.schedule.last_unit:
            self.schedule.do_gather()

    def _on_gradient(self, unit: Unit, bucket: FreedGradientBucket, slot: int, _: Tensor) -> None:
        act = self.schedule.reduction_of(bucket)
        if act is None:
            raise RuntimeError(
                f"a gradient of a parameter of shape {tuple(bucket.flat.parameters[slot].shape)} came after its unit "
                "was reduced: modules run in another order than in the first step; use zero2 for such a model"
            )
        if all(other.full is None for other in act.buckets):  # the first one of this act
            self.schedule.finish_reductions()
        bucket.place(slot)
        bucket.missing -= 1
        if unit is self.schedule.last_unit and not any(other.missing for other in act.buckets):
            self.schedule.do_gather()  # not earlier: at the start of backward, activations take the most memory
        self.schedule.do_ready_reductions()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Every micro-batch is reduced; but the root stays whole for the next one."""
        self.schedule.keeps_root = True
        try:
            yield
        finally:
            self.schedule.keeps_root = False

    def after_backward(self) -> None:
        self.schedule.do_rest()  # what waits for gradients that backward did not make
        self.schedule.finish_reductions()
        for bucket in self.buckets:
            bucket.missing = len(bucket.flat.parameters)
        self._reshard(*self.units, self.tables, *([] if self.schedule.keeps_root else [self.root]))
        self.take_gradients()

    def abandon_step(self) -> None:
        super().abandon_step()
        self._in_backward = False
        self.schedule.begin_forward()
        self._reshard(*self.units, self.root, self.tables)

    # State and traffic -------------------------------------------------------------------------------------------

    def parameter_pieces(self) -> list[Piece]:
        return self._pieces_of(self.flats)  # what lies in none of them has no elements

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
        tables = [flat.full_bytes for flat in self.tables.flats]
        blocks = [flat.full_bytes for unit in self.units for flat in unit.flats]
        last = self.schedule.last_unit
        kept = [flat.full_bytes for flat in last.flats] if last else []
        gathers = root + micro_batches * (tables + 2 * blocks)
        for payload in micro_batches * kept:
            gathers.remove(payload)
        reductions = micro_batches * [flat.full_bytes for flat in self.flats if flat.trainable]
        device = self.flats[0].full.device
        return [
            expected_reduce_scatters(reductions, self.process_group, device),
            expected_all_gathers(gathers, self.process_group, device),
            *buffer_broadcasts(self.module, self.data_parallel_size),
        ]

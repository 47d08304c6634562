"""What the stages of ZeRO share: an optimizer over this rank's shard, clipping over shards, and whole state dicts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.runtime.mesh import REPLICATE
from ddp_lab.strategy.account import Collective, ModelSize, Piece, clip_parts, require_matching_state, shapes_of
from ddp_lab.strategy.building import cast_inputs
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.communication.collectives import (
    all_gather,
    expected_all_gathers,
    expected_reduce_scatters,
)
from ddp_lab.strategy.gradient_watch import given_gradient
from ddp_lab.strategy.groups import Groups
from ddp_lab.strategy.modules import find_blocks, keep_from_being_read
from ddp_lab.strategy.optimizers import MakeOptimizer, OptimizerPart, hand_over, require_elementwise, require_given_up
from ddp_lab.strategy.replicated import broadcast_from_rank0, buffer_broadcasts
from ddp_lab.strategy.strategy import Strategy
from sharding.options.placement import Placement
from sharding.parts.flat import FlatParameters
from sharding.parts.gradient_buckets import GradientBucket
from sharding.parts.in_shards import GradientInShards

if TYPE_CHECKING:
    from sharding.options.offload import HostUpdate


class ShardedStrategy(Strategy):
    """Base of the stages.

    Attributes:
        flats: Flat parameters of which this rank owns a shard, frozen ones (in ZeRO-3) among them.
        buckets: The gradients of the trainable ones.
    """

    supports = Supports(
        offload=frozenset({"optimizer", ":"}),
        param_dtype=True,
        replicas=True,
        experts=True,
    )
    flats: Sequence[FlatParameters]
    buckets: Sequence[GradientBucket]
    host_update: "HostUpdate | None"

    def prepare(self) -> None:
        self.placement = Placement.of(self.options)
        if self.placement.param_dtype:
            cast_inputs([self.module, *find_blocks(self.module)], self.placement.param_dtype)
        if self.trainable_elements < self.groups.shard_size:
            raise UnsupportedError(
                f"{self.trainable_elements} trainable elements cannot be sharded over {self.groups.shard_size} ranks: "
                "use fewer ranks, or a replicated strategy"
            )
        self.host_update = None
        self._unused: set[nn.Parameter] = set()
        self._has_zeros = False  # zero_grad has made all gradients zeros
        self.group_of_buffers = self.process_group
        if "parameters" in self.shards:
            keep_from_being_read(self.module)

    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        optimizer = require_elementwise(super().build_optimizer(make_optimizer), self.options.elementwise)
        parts = {
            parameter: OptimizerPart(piece, start)
            for bucket in self.buckets
            for parameter, piece, start in bucket.flat.parts()
        }
        require_given_up(hand_over(optimizer, parts), self.trainable)
        self._in_shards = {p: GradientInShards.of(p) for bucket in self.buckets for p in bucket.flat.parameters}
        if self.placement.offload:
            from sharding.options.offload import HostUpdate

            self.host_update = HostUpdate(self.placement.offload, optimizer, list(reversed(self.buckets)))
        return optimizer

    def update(self) -> None:
        self._forget_gradients()
        if self.host_update is not None:
            self.host_update.run(self.publish)
            return
        super().update()
        for bucket in reversed(self.buckets):  # the order in which forward needs them
            self.publish(bucket.flat)

    def publish(self, flat: FlatParameters) -> None:
        """Runs when this rank's shard is updated."""
        flat.shard_has_changed()

    def before_micro_batch(self) -> None:
        for bucket in self.buckets:
            bucket.is_last = not self.steps.another_follows
            if not self.is_in_pipeline:
                bucket.missing = len(bucket.flat.parameters)

    def before_step(self) -> None:
        self._forget_gradients()
        broadcast_from_rank0(self.buffers(), self.group_of_buffers)
        for bucket in self.buckets:
            bucket.averages, bucket.missing = self.steps.averages, len(bucket.flat.parameters)
            if bucket.shard is None or self._has_zeros:
                continue
            if any(piece.grad is not None for piece in bucket.flat.pieces.values()):
                raise OneRankError(
                    "gradients of the step before are still here, where sharded strategies add none to them; call "
                    "strategy.zero_grad() after each step"
                )
            bucket.reset()  # the optimizer's own zero_grad was called
        self._has_zeros = False

    def groups_of(self, parameter: nn.Parameter) -> Groups:
        """Which ranks hold its shards."""
        return self.groups.of_experts if parameter in self.of_experts else self.groups

    def broadcast_plain_tensors(self) -> None:
        for group, tensors in self.by_group(self.plain_tensors()):
            broadcast_from_rank0(tensors, group)

    def plain_tensors(self) -> list[Tensor]:
        """Parameters that are not sharded (frozen ones before ZeRO-3; without elements), and buffers."""
        return [*self._plain_parameters(), *self.module.buffers()]

    def _plain_parameters(self) -> list[nn.Parameter]:
        sharded = {p for flat in self.flats for p in flat.parameters}
        return [p for p in self.module.parameters() if p not in sharded]

    # Gradients ---------------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """What of each parameter is in the shards. Its gradient is the reduced one."""
        return (item for bucket in self.buckets for item in bucket.flat.pieces.items())

    def take_gradients(self) -> None:
        """Hand the reduced shards to the optimizer, when their sums over replicas are here."""
        if any(parameter.grad is not None for bucket in self.buckets for parameter in bucket.flat.parameters):
            raise given_gradient()
        for bucket in self.buckets:
            bucket.finish_replicas()
            bucket.flat.set_gradient(bucket.shard)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._has_zeros = not set_to_none
        if self.host_update is not None:  # the optimizer holds no gradients
            for _, piece in self.pieces():
                if piece.grad is not None:
                    piece.grad = None if set_to_none else piece.grad.zero_()
        self._forget_gradients()
        if set_to_none:
            for bucket in self.buckets:
                bucket.reset()

    def _forget_gradients(self) -> None:
        """Of the module's parameters; shards stay."""
        for parameter in self.trainable.values():
            parameter.grad = None

    def holding(self) -> set[nn.Parameter]:
        return {parameter for parameter, piece in self.pieces() if piece.grad is not None}

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        super().drop_gradients(parameters)
        self._unused = set(parameters)
        for parameter, piece in self.pieces() if parameters else ():
            if parameter in self._unused:
                piece.grad = None
        for parameter, gradient in self._in_shards.items():
            if parameter not in self._unused:
                parameter.grad = gradient

    def gradients(self) -> Iterator[Tensor]:
        return (bucket.shard for bucket in self.buckets if bucket.shard is not None)

    def gradient_share(self) -> Iterable[Tensor]:
        if self.groups.replica != 0:  # the first replica speaks for all
            return ()
        if self.model_parallel is None:
            return self.gradients()
        return (p.grad for parameter, p in self.pieces() if p.grad is not None and self.speaks_for(parameter))

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """As all strategies do; padding is left out, since 0 times a factor that is NaN would stay there for good."""
        scaled = [piece.grad for _, piece in self.pieces() if piece.grad is not None]
        return clip_parts(scaled, max_norm, self.groups.everyone, self.device, self.gradient_share())

    def gradient_tensors(self) -> Iterable[Tensor]:
        plain_gradients = (
            gradient for gradient in super().gradient_tensors() if not isinstance(gradient, GradientInShards)
        )
        return [*plain_gradients, *(tensor for bucket in self.buckets for tensor in bucket.tensors())]

    def full_gradients(self) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.trainable.items()}
        gradients = ((name, p.grad) for name, p in self.trainable.items() if p not in self._in_shards)
        result = {name: gradient.cpu().clone() for name, gradient in gradients if gradient is not None}
        for bucket in self.buckets:
            full = bucket.flat.gathered(bucket.shard)
            for slot, parameter in enumerate(bucket.flat.parameters):
                if parameter not in self._unused:
                    result[names[parameter]] = bucket.flat.layout.view(full, slot).cpu().clone()
        return self.of_whole_model(result)

    def traffic_of(self, gathered: Sequence[FlatParameters], reduced: Sequence[GradientBucket]) -> list[Collective]:
        """What a step sends that all-gathers these parameters and reduce-scatters these gradients."""
        device = self.flats[0].full.device
        traffic = buffer_broadcasts(self.module, self.group_size)
        if self.groups.replicate is not None:
            sums = [bucket.shard_bytes for bucket in self.buckets]
            over = self.groups.replicas, "gradients", REPLICATE
            traffic.append(Collective("all_reduce", len(sums), sum(sums), *over))
        for group in dict.fromkeys([self.groups.shard, *(flat.group for flat in self.flats)]):
            scattered = [bucket.full_bytes for bucket in reduced if bucket.flat.group is group]
            traffic.append(expected_reduce_scatters(scattered, group, device))
            traffic.append(expected_all_gathers([f.full_bytes for f in gathered if f.group is group], group, device))
        return traffic

    # State -------------------------------------------------------------------------------------------------------

    def expected_memory(self, size: ModelSize) -> dict[str, int]:
        return super().expected_memory(size) | self.placement.expected_memory(size, self.groups.shard_size, self.shards)

    def expected_host_bytes(self, size: ModelSize) -> int:
        return self.placement.expected_host_bytes(size, self.groups.shard_size)

    def parameter_tensors(self) -> Iterable[Tensor]:
        return [*self._plain_parameters(), *(tensor for flat in self.flats for tensor in flat.tensors())]

    def communication_tensors(self) -> Iterable[Tensor]:
        gathered = [flat.full for flat in self.flats] if "parameters" in self.shards else []
        buckets = self.buckets if "gradients" in self.shards else ()
        return [*gathered, *(tensor for bucket in buckets for tensor in bucket.tensors() if tensor is not bucket.shard)]

    def memory_breakdown(self) -> dict[str, int]:
        return super().memory_breakdown() | ({"optimizer_state": 0} if self.host_update else {})

    def host_tensors(self) -> Iterable[Tensor]:
        if self.host_update is None:
            return ()
        shards = (flat.shard for flat in self.flats if flat.is_offloaded)
        return [*shards, *self.host_update.gradients, *super().optimizer_tensors()]

    def parameter_pieces(self) -> list[Piece]:
        if "parameters" not in self.saves_shards_of:
            return super().parameter_pieces()
        return self._pieces_of(self.flats)  # what lies in none of them has no elements

    @property
    def saves_shards_of(self) -> frozenset[str]:
        apart = self.placement.param_dtype or self.placement.offload
        return self.shards | {"parameters"} if apart else self.shards

    def parameters_are_loaded(self) -> None:
        for flat in self.flats:
            if "parameters" in self.shards:
                flat.shard_has_changed()
            else:
                flat.fill_own_part()
                all_gather(flat.full, flat.group).wait()

    def updated_pieces(self) -> list[Piece]:
        return self._pieces_of(flat for flat in self.flats if flat.trainable)

    def _pieces_of(self, flats: Iterable[FlatParameters]) -> list[Piece]:
        """This rank's shards, cut where one parameter ends and the next begins."""
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        return [Piece(names[parameter], start, piece) for flat in flats for parameter, piece, start in flat.parts()]

    def full_state_dict(self) -> dict[str, Tensor]:
        self.finish_parameter_synchronization()
        tensors: dict[Any, Tensor] = {}
        for flat in self.flats:
            values = flat.whole()
            if self.groups.is_first_copy:
                tensors |= {p: flat.layout.view(values, slot).cpu().clone() for slot, p in enumerate(flat.parameters)}
        state = self.module.state_dict(keep_vars=True) if self.groups.is_first_copy else {}
        return self.of_whole_model(
            {name: tensors[p] if p in tensors else p.detach().cpu().clone() for name, p in state.items()},
            with_aliases=True,
        )

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        state = self.of_this_part(state)
        require_matching_state(shapes_of(self.module), state, self.process_group)
        self.finish_parameter_synchronization()
        targets = self.module.state_dict(keep_vars=True)
        values = {targets[name]: tensor for name, tensor in state.items()} if self.groups.is_first_copy else {}
        with torch.no_grad():
            for flat in self.flats:
                flat.set_values(values)
            for tensor in self.plain_tensors():
                if tensor in values:
                    tensor.copy_(values[tensor])
        self.broadcast_plain_tensors()

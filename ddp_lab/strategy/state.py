"""A strategy's state: whole, under the plain module's names, and in parts, as checkpoints save and load it."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.strategy.hooks import Hooks
from ddp_lab.strategy.ranges import Piece

if TYPE_CHECKING:
    from ddp_lab.strategy.batches import MicroBatch


class State(Hooks):
    """Attributes:
    parameter_dtypes: In which parameters are saved, by name: their own, though the module may compute in
        `options.param_dtype`.
    """

    parameter_dtypes: dict[str, torch.dtype]

    # Whole tensors -----------------------------------------------------------------------------------------------

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model on CPU under the plain module's own names; empty on ranks other than 0. Collective."""

    @abstractmethod
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `full_state_dict` gave to rank 0; the other ranks' `state` is not read. Collective.

        Raises:
            ValueError: on every rank, `state` does not fit the module; names what is wrong.
        """

    @abstractmethod
    def full_gradients(self) -> dict[str, Tensor]:
        """The whole gradients of the last step on CPU, by parameter name, without parameters that no rank used.

        For inspection: of a model that is cut over ranks, on rank 0. Collective: it gathers what is sharded.
        """

    def of_whole_model(self, parts: dict[str, Tensor], with_aliases: bool = False) -> dict[str, Tensor]:
        """Put together what `process_group` has gathered of its part of the model. Collective.

        Args:
            parts: On CPU, by name; read where `copy_rank` is 0.
            with_aliases: Name a tensor that the model knows by several names by each of them.

        Returns:
            Whole tensors on rank 0 of the ranks that see the same samples, and nothing on the others among them.
        """
        if self.model_parallel is None or self.copy_rank != 0:
            return parts
        wholes = self.model_parallel.gathered(parts)
        aliases = self.model_parallel.aliases.items() if with_aliases else ()
        return wholes | {alias: wholes[name] for alias, name in aliases if name in wholes}

    def of_this_part(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The reverse, where rank 0 has whole tensors. Collective.

        Raises:
            ValueError: on every rank, `state` does not fit the module; names what is wrong.
        """
        if self.model_parallel is not None:
            require_matching_state(self.model_parallel.whole_shapes(self.module), state, self.everyone)
            state = self.model_parallel.scattered(state, self.module) if self.copy_rank == 0 else {}
        return state

    # What a checkpoint saves and loads: each rank what it holds ----------------------------------------------------

    @property
    def saves_shards_of(self) -> frozenset[str]:
        """Those of `parameters` and `optimizer_state` whose pieces are this rank's, and its replicas', alone."""
        return self.shards

    def parameter_pieces(self) -> list[Piece]:
        """What this rank holds of all parameters, frozen ones included.

        That is its shard if `saves_shards_of` names parameters, otherwise everything.
        """
        return [Piece(name, 0, parameter) for name, parameter in self.module.named_parameters()]

    def parameters_are_loaded(self) -> None:
        """Runs when a checkpoint has filled the tensors of `parameter_pieces` on all ranks. Collective. Default: these
        are what the module computes with."""

    def updated_pieces(self) -> list[Piece]:
        """The parameters, or ranges of them, for which this rank's `updating_optimizer` keeps states.

        That is its shard if `shards` names the optimizer's state, otherwise everything.
        """
        return [Piece(name, 0, parameter) for name, parameter in self.trainable.items()]

    def on_this_rank(self, tensor: Tensor) -> Tensor:
        """The elements of a piece, or of an optimizer state of it, that are here."""
        return tensor.detach()

    def relearn(self, first_step: "Callable[[], Sequence[MicroBatch]]") -> None:
        """Decide as the run that saved a checkpoint did, so that sums are rounded as in a run that never stopped. Runs
        before the checkpoint's state is loaded. Collective. Default: nothing to decide.

        Args:
            first_step: Makes this rank's micro-batches of the first step.
        """


def shapes_of(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's tensors, by name."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict(keep_vars=True).items()}


def require_matching_state(
    wanted: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], group: dist.ProcessGroup
) -> None:
    """Refuse a state (rank 0's; the others' is not read) that does not fit a module. `wanted`: its `shapes_of`.

    Raises:
        ValueError: on every rank, names the entries that are missing, unknown or of another shape.
    """
    problem = [_state_problem(wanted, state) if dist.get_rank(group) == 0 else ""]
    dist.broadcast_object_list(problem, group=group, group_src=0)
    if problem[0]:
        raise ValueError(f"load_full_state_dict: {problem[0]}")


def _state_problem(wanted: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor]) -> str:
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    problems = [f"missing {name}" for name in wanted if name not in given]
    problems += [f"unknown {name}" for name in given if name not in wanted]
    problems += [
        f"{name} has shape {given[name]} instead of {shape}"
        for name, shape in wanted.items()
        if given.get(name, shape) != shape
    ]
    return "; ".join(problems)

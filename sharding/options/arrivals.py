"""Updated parameters on their way to this rank: each part of a model waits for its own parameters before it runs."""

from collections.abc import Iterable, Sequence
from functools import partial

from torch import nn

from ddp_lab.strategy.communication.collectives import Pending
from ddp_lab.strategy.modules import ModuleHook, parts_around
from sharding.parts.flat import FlatParameters


class Arrivals:
    """Lets forward begin while the parameters of later parts of the model are still being gathered.

    A part is a block, or a module outside blocks (an embedding, a norm, a head). Some parameters are waited for before
    anything runs: those that lie in no part, and those of parts that the first forward pass did not call, since another
    module may use their weights.

    Args:
        blocks: The blocks of `module`; if there are none, forward waits for all parameters.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[nn.Module], flats: Sequence[FlatParameters]) -> None:
        self._flats = flats
        self._pending: dict[FlatParameters, Pending] = {}
        parts = [part for _, part in parts_around(module, set(blocks))] if blocks else []
        inside = {member for part in parts for member in part.modules()}
        around = [member for member in module.modules() if member not in inside]
        self._needed_first = self._holding(p for member in around for p in member.parameters(recurse=False))
        self._not_called = {part: self._holding(part.parameters()) for part in parts}
        module.register_forward_pre_hook(ModuleHook(lambda *_: self._wait_for(self._needed_first)))
        for part in parts:
            part.register_forward_pre_hook(ModuleHook(partial(self._before_part, self._not_called[part])))
        self._first = module.register_forward_hook(ModuleHook(lambda *_: self._after_first_forward()))

    def start(self, flat: FlatParameters, pending: Pending) -> None:
        """Note that `flat` is being gathered; `pending` is waited for before it is used."""
        self._pending[flat] = pending

    def wait(self) -> None:
        """Wait for all parameters on their way."""
        self._wait_for(self._flats)

    def _before_part(self, flats: Sequence[FlatParameters], part: nn.Module, _: object) -> None:
        self._not_called.pop(part, None)
        self._wait_for(flats)

    def _after_first_forward(self) -> None:
        self._first.remove()
        self._needed_first = [*self._needed_first, *(flat for flats in self._not_called.values() for flat in flats)]

    def _holding(self, parameters: Iterable[nn.Parameter]) -> list[FlatParameters]:
        held_parameters = set(parameters)
        return [flat for flat in self._flats if held_parameters.intersection(flat.parameters)]

    def _wait_for(self, flats: Sequence[FlatParameters]) -> None:
        for flat in flats:
            if flat in self._pending:
                self._pending.pop(flat).wait()

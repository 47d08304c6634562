"""Units must run in the same order on every rank: gathering one is collective, and ranks that gather different ones
mix their parameters, where these are of equal size, or wait for each other for ever.

The first forward pass is in lockstep: before each unit the ranks tell each other which one it is. Every later pass must
repeat the first, which each rank sees for itself without a message.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from training.communication.agreement import StepAgreement
from training.errors import OneRankError, UnsupportedError

END = -1


class UnitOrder:
    """Watches which units run. Make it after the hooks that gather them, so that its own come first.

    Args:
        units: By the names that errors give them.
        rank: This rank's place in the agreement.
    """

    def __init__(self, units: Mapping[str, nn.Module], agreement: StepAgreement, rank: int) -> None:
        self._names, self._agreement, self._rank = list(units), agreement, rank
        self._known: dict[bool, list[int]] = {}
        self._known_now: list[int] | None = None
        self._run: list[int] | None = None
        for index, unit in enumerate(units.values()):
            unit.register_forward_pre_hook(self._hook(index), prepend=True)

    @contextmanager
    def watched(self, is_training: bool) -> Iterator[None]:
        """Within this context is one forward pass. Training and evaluation may each have an order of their own.

        Raises:
            UnsupportedError: on every rank, in the first pass, when ranks differ in the next unit.
            OneRankError: on this rank, when it leaves the order of the first pass.
        """
        self._known_now, self._run = self._known.get(is_training), []
        try:
            yield
            self._check(END)
            self._known[is_training] = self._known_now or self._run
        finally:
            self._run = None  # what backward runs again, for activation checkpoints, is not of this order

    def _hook(self, index: int) -> Callable[[nn.Module, Any], None]:
        def before_unit(unit: nn.Module, arguments: Any) -> None:
            if self._run is not None:
                self._check(index)
                self._run.append(index)

        return before_unit

    def _check(self, index: int) -> None:
        assert self._run is not None
        if self._known_now is None:
            others = [int(other) for other in self._agreement.all_gather(index)]
            if any(other != index for other in others):
                said = "; ".join(f"rank {rank}: {self._name(other)}" for rank, other in enumerate(others))
                raise UnsupportedError(f"ranks run different units at the same time ({said}), which {ADVICE}")
            return
        position = len(self._run)
        wanted = self._known_now[position] if position < len(self._known_now) else END
        if index != wanted:
            said = f"rank {self._rank} runs {self._name(index)} where it first ran {self._name(wanted)}"
            raise OneRankError(f"{said}, which {ADVICE}")

    def _name(self, index: int) -> str:
        return "none more" if index == END else self._names[index]


ADVICE = "sharded parameters do not allow: all ranks must run the same units in the same order; use a replicated choice"

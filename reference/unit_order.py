"""Checks that units run in the same order on every rank.

An all-gather of a unit is collective. If ranks gather different units, they mix parameters of equal size, or wait for
each other for ever. So in the first forward pass the ranks tell each other before each unit which one it is. Every
later pass must repeat the first, which each rank checks by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ddp_lab.runtime.errors import OneRankError, UnsupportedError
from ddp_lab.strategy.exchange import Exchange

END = -1


class UnitOrder:
    """Watches which units run. Create it after the hooks that gather units, so that its own hooks run first.

    Args:
        units: By the names that errors show.
        rank: This rank's number in the agreement.
    """

    def __init__(self, units: Mapping[str, nn.Module], agreement: Exchange, rank: int) -> None:
        self._names, self._agreement, self._rank = list(units), agreement, rank
        self._known: dict[bool, list[int]] = {}
        self._known_now: list[int] | None = None
        self._run: list[int] | None = None
        for index, unit in enumerate(units.values()):
            unit.register_forward_pre_hook(self._hook(index), prepend=True)

    @contextmanager
    def watched(self, is_training: bool) -> Iterator[None]:
        """Context of one forward pass. Training and evaluation may have different orders.

        Raises:
            UnsupportedError: on every rank, in the first pass, if the next unit is not the same on all ranks.
            OneRankError: on this rank, if it leaves the order of the first pass.
        """
        self._known_now, self._run = self._known.get(is_training), []
        try:
            yield
            self._check(END)
            self._known[is_training] = self._known_now or self._run
        finally:
            self._run = None  # what backward runs again, for activation checkpoints, does not count

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
        return "no more" if index == END else self._names[index]


ADVICE = "sharded parameters do not allow: all ranks must run the same units in the same order; use a replicated choice"

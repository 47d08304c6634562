"""Ways to train on a mesh with a micro-batch: recomputation, and compiled blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_lab.planner.contracts import Costs
from ddp_lab.planner.plan import Case
from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.recompute.setting import NONE, OP, SELECTIVE

LEVELS = (NONE, SELECTIVE, OP, "block")
"""Recomputation, from the fastest and largest to the slowest and smallest."""


@dataclass(frozen=True)
class Ways:
    """What is searched over besides choice, mesh and micro-batch.

    Attributes:
        levels: Of recomputation, those of `LEVELS` that are wanted, in their order.
        costs: By whether blocks are compiled. The first one is the faster one.
    """

    levels: Sequence[str]
    costs: Mapping[bool, Costs]

    def of(self, case: Case, steps: int) -> list[list[Case]]:
        """The case with so many micro-batches in each way that goes together, from the fastest on: those that are
        compiled, and the eager ones of other levels."""
        chains, levels = list[list[Case]](), set[str]()
        for compiled in self.costs:
            chain = list[Case]()
            for level in (one for one in self.levels if one not in levels):
                try:
                    chain.append(self.put(case, steps, level, compiled))
                except UserError:  # it does not go with another setting
                    continue
            levels |= {each.config.strategy.activation_checkpointing for each in chain}
            chains += [chain] * bool(chain)
        return chains

    def put(self, case: Case, steps: int, level: str, compiled: bool) -> Case:
        """
        Raises:
            UserError: these do not go together.
        """
        config = case.config.but(grad_accum_steps=steps, activation_checkpointing=level, compile=compiled)
        return replace(case, config=config, costs=self.costs[compiled])

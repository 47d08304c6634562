"""Buckets that fit the link: how `bucket_ddp_async` comes to its bucket sizes where the user gives none.

The first steps are watched and the link is measured (`ddp.link_fit`); a plan is made of both (`ddp.bucket_plan`). A
checkpoint keeps the buckets, so that a resumed run adds up its gradients in the same order as one that never stopped.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor, nn

from ddp.bucket_plan import USUAL_BYTES, choose, describe, usual_ends
from ddp.link_fit import WATCHED_STEPS, LinkFit
from ddp_lab.strategy.options import StrategyOptions

UNKNOWN = (
    f"buckets of {USUAL_BYTES // 2**20} MiB: large all-reduces took hardly longer than small ones, so nothing could be "
    "fitted to this link"
)
Assignment = list[list[nn.Parameter]]
"""The parameters of each bucket, in the order in which buckets are all-reduced."""


class FittedBuckets:
    """Decides the buckets once, in the first steps.

    Args:
        trainable: The trainable parameters by name, in an order that is the same on all ranks.

    Attributes:
        is_watching: Whether the decision is still to come. No bucket is all-reduced before the end of backward then.
        note: The decision in one sentence, for the user of the run.
    """

    def __init__(
        self, trainable: Mapping[str, nn.Parameter], group: dist.ProcessGroup, options: StrategyOptions
    ) -> None:
        self._trainable, self._updates_early = trainable, options.overlap_optimizer
        # Compressed gradients keep the default size: what is timed here are all-reduces of whole gradients. So do the
        # parts of a model: other ranks, with other parts, would decide otherwise.
        self._is_wanted = self.is_watching = options.fixed_bucket_bytes is None and not (
            options.compress or options.reduce_dtype == "bf16" or options.model_parallel
        )
        self._watch = LinkFit(list(trainable.values()), group, options.clock)
        self.note = ""

    @property
    def settling_steps(self) -> int:
        return WATCHED_STEPS + 1 if self.is_watching else 0

    def begin_step(self) -> Assignment | None:
        """Watch another step, or answer with the buckets that all later steps use. Collective."""
        if not self.is_watching:
            return None
        if not self._watch.is_due:
            self._watch.begin_step()
            return None
        self.is_watching = False
        order, timeline, is_known = self._watch.timeline(self._updates_early)
        ends = choose(timeline) if is_known else usual_ends(timeline)
        self.note = describe(timeline, ends) if is_known else UNKNOWN
        return [order[start:end] for start, end in pairwise([0, *ends])]

    def on_gradient(self, parameter: Tensor) -> None:
        """The gradient of `parameter` is ready, in the last micro-batch of a watched step."""
        self._watch.on_gradient(parameter)

    def time_update(self, step: Callable[[], None]) -> None:
        """Make an optimizer step, and time it if the step is watched."""
        if self.is_watching:
            self._watch.time_update(step)
        else:
            step()

    def names(self, assignment: Sequence[Sequence[nn.Parameter]]) -> list[list[str]] | None:
        """The buckets as a checkpoint keeps them; None if they were not fitted."""
        if self.is_watching or not self._is_wanted:
            return None
        names = {parameter: name for name, parameter in self._trainable.items()}
        return [[names[parameter] for parameter in parameters] for parameters in assignment]

    def from_names(self, learned: list[list[str]] | None) -> Assignment | None:
        """The buckets that `names` gave to an earlier run; None if they do not hold this model's parameters."""
        named = sorted(name for names in learned or () for name in names)
        if not (self._is_wanted and learned and all(learned) and named == sorted(self._trainable)):
            return None
        self.is_watching = False
        self.note = f"{len(learned)} buckets, fitted to the link in the run that saved the checkpoint"
        return [[self._trainable[name] for name in names] for names in learned]

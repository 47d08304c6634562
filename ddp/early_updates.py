"""What happens to a reduced bucket while later buckets are in flight: a look for NaN, and perhaps the optimizer.

Without `--overlap-optimizer` each rank looks at its share of the bucket, and the optimizer runs at the end of the step.
With it each rank looks at the whole bucket and updates the bucket's parameters at once, unless a value is not finite.
The host does not wait to know that: the optimizer decides it on the device.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.linalg import vector_norm

from ddp.buckets import Bucket
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.runtime.watch.phases import phase
from ddp_lab.strategy.replicated import ReplicatedStrategy
from ddp_lab.strategy.verdict import not_finite, update_unless


class EarlyUpdates:
    """Which parameters of a step are updated already, and whether all reduced buckets are finite so far."""

    def __init__(self, strategy: ReplicatedStrategy) -> None:
        self._strategy = strategy
        self.begin_step()

    def begin_step(self) -> None:
        self._updated: set[nn.Parameter] = set()
        self._norms: list[torch.Tensor] = []

    def check(self, bucket: Bucket) -> None:
        """Look at this rank's share of `bucket`."""
        rank, size, numel = self._strategy.group_rank, self._strategy.group_size, len(bucket.flat)
        self._norms.append(vector_norm(bucket.flat[numel * rank // size : numel * (rank + 1) // size]))

    def check_and_update(self, bucket: Bucket) -> None:
        """Look at the whole of `bucket`, and update its parameters if all is finite so far.

        Only those that received a gradient on this rank: whether another rank used the others is known later.
        """
        strategy = self._strategy
        self._norms.append(vector_norm(bucket.flat) / strategy.group_size**0.5)
        found_inf = not_finite(self.norm())
        received = dict(zip(strategy.trainable.values(), strategy.watch.received(), strict=True))
        parameters = [parameter for parameter in bucket.parameters if received[parameter]]
        with phase("optimizer"), only(strategy.optimizer, parameters):
            update_unless(found_inf, strategy.optimizer, strategy.optimizer.step)
        self._updated.update(parameters)

    def norm(self) -> torch.Tensor:
        """Of this rank's share of all that was looked at, as `Strategy.norm_of_share` answers. Where each rank looks at
        everything, each counts for an equal part of the square."""
        return vector_norm(torch.stack(self._norms), dtype=torch.float64)

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Within this context, the optimizer updates only what is not updated yet."""
        if not self._updated:
            yield
            return
        with only(self._strategy.optimizer, [p for p in self._strategy.trainable.values() if p not in self._updated]):
            yield


@contextmanager
def only(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within this context, `optimizer` holds `parameters` alone, with their settings and states.

    Raises:
        UnsupportedError: A step has changed a setting of a whole group, such as a count of steps. Such an optimizer
            must update all parameters together.
    """
    groups, chosen = optimizer.param_groups, set(parameters)
    parts = [{**group, "params": [p for p in group["params"] if p in chosen]} for group in groups]
    optimizer.param_groups = parts
    try:
        yield
    finally:
        optimizer.param_groups = groups
    for group, part in zip(groups, parts, strict=True):
        changed = [name for name in part if name != "params" and part[name] is not group.get(name)]
        if changed:
            name = type(optimizer).__name__
            raise UnsupportedError(
                f"--overlap-optimizer and --offload update bucket by bucket, but {name} keeps "
                f"{', '.join(changed)} for a whole parameter group"
            )

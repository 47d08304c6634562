"""The learning rate of each step: linear warm-up, then constant, or decay to 0 at the end of the run.

With W warm-up steps and T steps in the whole run, the rate of step k, counted from 0, is `--lr` times

    (k + 1) / W                                 if k < W
    1                                           constant
    1 - p,  with p = (k - W) / (T - W)          linear
    (1 + cos(pi p)) / 2                         cosine (Loshchilov and Hutter, 2017, "SGDR", without restarts)

It depends on the number of the step alone, so a run that resumes continues with the same rates. p would be 1 at the
step after the last one: no step has a rate of 0.
"""

import math
from collections.abc import Callable

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError


def learning_rates(config: RunConfig, steps: int) -> Callable[[int], float]:
    """The rate by number of the step, from 0.

    Args:
        config: With the learning rate resolved.
        steps: Optimizer steps of the whole run, those before it resumed among them.

    Raises:
        UserError: warm-up is longer than the run.
    """
    peak, warmup = config.lr, config.warmup_steps
    assert peak is not None, "it is resolved"
    if warmup > steps:
        raise UserError(f"--warmup-steps {warmup}: the run has only {steps} optimizer steps; give at most so many")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / (steps - warmup)
        decayed = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return decayed.get(config.schedule, 1.0)

    return lambda step: peak * factor(step)

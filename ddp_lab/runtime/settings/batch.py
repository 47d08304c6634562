"""How many samples a step takes, and how many steps there are."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.field import flag

_batch = partial(flag, "batch")


@dataclass(frozen=True)
class BatchSettings:
    """Batches and steps."""

    global_batch_size: int = _batch(
        8,
        "samples in an optimizer step: micro-batch x --grad-accum-steps x ranks that see different samples; "
        "if it is not given, the nearest that divides among them",
        at_least=1,
    )
    grad_accum_steps: int = _batch(
        2, "micro-batches whose gradients a rank accumulates before the optimizer step", at_least=1
    )
    epochs: int | None = _batch(
        None, "passes over the training samples (default: 1, or as many as --max-steps needs)", at_least=1
    )
    max_steps: int | None = _batch(None, "stop after this many optimizer steps (default: whole epochs)", at_least=1)

    def nearest_batch(self, data_parallel_size: int) -> int:
        """`global_batch_size`, or the nearest that divides into whole micro-batches."""
        unit = self.grad_accum_steps * data_parallel_size
        return max(1, round(self.global_batch_size / unit)) * unit

    def micro_batch_size(self, data_parallel_size: int) -> int:
        """Samples in one micro-batch of one rank. `data_parallel_size`: ranks that see different samples.

        Raises:
            UserError: `global_batch_size` does not divide into whole micro-batches; names the nearest sizes that do.
        """
        unit = self.grad_accum_steps * data_parallel_size
        if self.global_batch_size % unit:
            below = self.global_batch_size // unit * unit
            nearest = " or ".join(str(size) for size in (below, below + unit) if size)
            raise UserError(
                f"--global-batch-size {self.global_batch_size} does not divide by --grad-accum-steps "
                f"{self.grad_accum_steps} x {data_parallel_size} ranks = {unit}; the nearest that does: {nearest}"
            )
        return self.global_batch_size // unit

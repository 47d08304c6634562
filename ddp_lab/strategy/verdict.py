"""How a step went on all ranks: found on the device, read by the host later."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddp_lab.runtime.errors import NonFiniteError
from ddp_lab.runtime.watch.phases import waiting
from ddp_lab.strategy.batches import Weighted, first_bad_sample


class ReadLater:
    """A tensor of the device that the host will want to know. On CUDA it is copied to pinned memory, after what is
    queued now."""

    def __init__(self, tensor: Tensor) -> None:
        self.is_here = tensor.device.type == "cpu"
        self._host = tensor
        if not self.is_here:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def tensor(self) -> Tensor:
        """The values, on the CPU. Waits for the device if it has not come so far."""
        if not self.is_here:
            with waiting("device"):
                self._event.synchronize()
        return self._host


class Verdict:
    """How forward and backward of a step went on all ranks.

    Args:
        sums: Over all ranks: the mean loss over the global batch, and its gradient's squared norm; (2,) in fp64.
        share: This rank's part of the loss, an fp64 scalar.
        step: Number of the step, from 0.
        loss_scale: With fp16, that of the step, a scalar on the device.

    Attributes:
        loss: The mean over the global batch, an fp32 scalar on the device.
        found_inf: 1.0 if the loss or a gradient is not finite, else 0.0; an fp32 scalar on the device.
        tokens: In the global batch, as the ranks have told each other; 0 if they have not.
        load: Of experts (`strategy.model_parallel.Balance`), if there are.
    """

    tokens = 0
    load: ReadLater | None = None

    def __init__(self, sums: Tensor, share: Tensor, step: int, loss_scale: Tensor | None = None) -> None:
        self.step = step
        self.loss = sums[0].float()
        self.found_inf = not_finite(sums)
        scales = [] if loss_scale is None else [loss_scale.double().view(1)]
        self._read = ReadLater(torch.cat([sums, share.view(1), *scales]))

    @property
    def is_here(self) -> bool:
        """Whether the host can read it without waiting for a device."""
        return self._read.is_here

    @property
    def nonfinite(self) -> str | None:
        """`the loss` or `a gradient`, if it is not finite on some rank. The host reads."""
        loss_is_finite, norm_is_finite, *_ = self._read.tensor().isfinite().tolist()
        return None if loss_is_finite and norm_is_finite else "a gradient" if loss_is_finite else "the loss"

    @property
    def loss_and_norm(self) -> tuple[float, float]:
        """The mean loss over the global batch, and the 2-norm of its gradient over the whole model, not clipped. The
        host reads."""
        loss, square, *_ = self._read.tensor()
        return loss.float().item(), square.sqrt().item()

    @property
    def expert_load(self) -> list[list[int]] | None:
        """For each layer, how many tokens chose each expert. The host reads."""
        return None if self.load is None else self.load.tensor().long().tolist()

    @property
    def loss_scale(self) -> float | None:
        """What losses of the step were multiplied by; None unless in fp16. The host reads."""
        scales = self._read.tensor()[3:].tolist()
        return scales[0] if scales else None

    @property
    def skipped(self) -> bool:
        """Whether the step changes nothing, because in fp16 something of it overflowed on some rank. The host reads."""
        return self.loss_scale is not None and self.nonfinite is not None

    @property
    def own_loss(self) -> float:
        """This rank's part of the loss. The host reads."""
        return self._read.tensor()[2].item()


def not_finite(values: Tensor) -> Tensor:
    """1.0 if one of `values` is NaN or infinite, else 0.0: an fp32 scalar on their device, by one kernel."""
    found_inf = torch.zeros((), dtype=torch.float32, device=values.device)
    torch._amp_foreach_non_finite_check_and_unscale_([values], found_inf, torch.ones_like(found_inf))
    return found_inf


def update_unless(found_inf: Tensor, optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    """Run `update`, a step of `optimizer` that changes nothing where `found_inf` is 1.

    Only fused optimizers decide that on the device, if their parameters are there. For others the host reads
    `found_inf`, and so waits.
    """
    updated = next((parameter for group in optimizer.param_groups for parameter in group["params"]), found_inf)
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or updated.device != found_inf.device:
        if not found_inf.item():
            update()
        return
    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    try:
        update()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]


def nonfinite_error(
    verdict: Verdict,
    micro_batches: Sequence[Weighted] | None,
    gather: Callable[[float], list[float]],
    first_nonfinite_round: Callable[[Sequence[Weighted]], int],
    hint: str,
) -> NonFiniteError:
    """The error that every rank raises, where a loss or a gradient is not finite. Collective.

    Args:
        micro_batches: What the step was made of; None in a loop of the caller's own.
        gather: Gives the values of all ranks.
        first_nonfinite_round: `Loop.first_nonfinite_round`.
        hint: What else may be the cause.
    """
    quantity, scale = verdict.nonfinite, verdict.loss_scale
    # The ranks on which it was not finite first
    culprits: Sequence[int] = ()
    if quantity == "the loss":
        culprits = [rank for rank, loss in enumerate(gather(verdict.own_loss)) if not math.isfinite(loss)]
    elif micro_batches is not None:
        rounds = gather(first_nonfinite_round(micro_batches))
        first = min((number for number in rounds if number >= 0), default=None)
        culprits = [rank for rank, number in enumerate(rounds) if number == first]
    if culprits:
        where = f"on rank {', '.join(map(str, culprits))}"
    elif micro_batches is None:
        where = "on some rank"
    else:
        where = "after the sum over ranks (each rank's own was finite when the step was run again)"
    # What may help
    samples = gather(first_bad_sample(micro_batches or ()))
    advice = "a lower --lr or --clip-grad-norm may help"
    if holders := [rank for rank, sample in enumerate(samples) if sample >= 0]:
        advice = f"sample {samples[holders[0]]:.0f} of rank {holders[0]} in this step, from 0, holds NaN or infinity"
    elif verdict.step == 0:
        advice = "no update came before it, so it is of the data, the first weights or the loss, and not of --lr"
    if scale is not None:
        advice = f"so it stays at every loss scale, which has fallen to {scale:g}; {advice}"
    error = NonFiniteError(
        f"step {verdict.step}: {quantity} is not finite {where}; no parameter is updated yet; {advice}{hint}"
    )
    error.rank = culprits[0] if culprits else None
    return error

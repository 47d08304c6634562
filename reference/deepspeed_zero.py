"""DeepSpeed's ZeRO stages 1, 2 and 3 with their default settings, from the optional extra `deepspeed`.

Stage 1: every rank holds all parameters and gradients, and 1/N of the optimizer states. Gradients are all-reduced (not
reduce-scattered) after the last micro-batch, and updated parameters all-gathered after the step: 3(N-1)/N * P elements.
Stage 2 keeps 1/N of the gradients, and all-reduces at every micro-batch. Stage 3 also keeps 1/N of the parameters,
except those of up to 100,000 elements, which stay whole. It reduce-scatters gradients. Below a billion parameters it
gathers each parameter once per micro-batch and keeps it until backward: 2(N-1)/N * P elements. All stages keep their
own fp32 copy of this rank's part of the parameters.
"""

import io
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.account import (
    ModelSize,
    Piece,
    expected_state_bytes,
    require_matching_state,
    shapes_of,
)
from ddp_lab.strategy.capabilities import Supports
from ddp_lab.strategy.optimizers import MakeOptimizer, require_elementwise
from ddp_lab.strategy.options import BF16_TRUE, FP16
from ddp_lab.strategy.replicated import broadcast_from_rank0
from ddp_lab.strategy.strategy import Strategy

LARGEST_BUCKET, KEPT_WHOLE = 500_000_000, 100_000
"""DeepSpeed's defaults, in elements. In stage 3: the largest parameter that stays whole."""


class Inner(nn.Module):
    """Answers with the loss beside the answer of `module`, because DeepSpeed replaces tensors that it finds by others
    that its backward begins with. Enters autocast, which DeepSpeed turns off."""

    def __init__(self, module: nn.Module, autocast: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module, self.autocast = module, autocast

    def forward(self, **micro_batch: Tensor) -> tuple[Tensor, Any]:
        with self.autocast():
            answer = self.module(**micro_batch)
        return answer.loss, answer


class DeepSpeedZero(Strategy):
    """What the three stages share."""

    always_averages = True
    reduces_given_gradients = False
    supports = Supports(
        compile=False,
        refusals=(
            (lambda o: o.reduce_dtype, "--reduce-dtype: DeepSpeed reduces gradients in their own dtype here"),
            (lambda o: o.recomputes,
             "--activation-checkpointing: DeepSpeed has its own; choose zero1, zero2 or zero3"),
            (lambda o: o.precision in (FP16, BF16_TRUE),
             "--precision: DeepSpeed scales losses and keeps masters by itself; take zero1, zero2 or zero3"),
        ),
    )  # fmt: skip
    stage: ClassVar[int]

    def build_optimizer(self, make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
        broadcast_from_rank0([*self.module.parameters(), *self.module.buffers()], self.process_group)
        self.require_supported()
        self.all_sizes = [p.numel() for p in self.module.parameters()]  # stage 3 will remove the elements
        optimizer = require_elementwise(super().build_optimizer(make_optimizer), self.options.elementwise)
        try:
            with redirect_stdout(io.StringIO()):  # it prints much, and some of it not through a logger
                self.deepspeed = load_deepspeed(self.device)
                self.engine, self.zero, _, _ = self.deepspeed.initialize(
                    model=Inner(self.module, self.steps.autocast), optimizer=optimizer, config=self.settings()
                )
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise UnsupportedError(f"DeepSpeed cannot train this module: {error}") from error
        return self.zero

    def require_supported(self) -> None:
        """Refuse what DeepSpeed would fail at later, or silently do in another way."""
        if self.process_group is not dist.group.WORLD:
            raise UnsupportedError("DeepSpeed shards over all ranks; it was given a smaller process group")
        for name, parameter in self.module.named_parameters():
            if parameter.dtype is not torch.float32:
                raise UnsupportedError(f"DeepSpeed wants one dtype; parameter {name} is {parameter.dtype}, not fp32")
            if parameter.ndim == 0:
                raise UnsupportedError(f"DeepSpeed takes no 0-d parameters; give {name} the shape (1,)")

    def settings(self) -> dict[str, Any]:
        """DeepSpeed's defaults, except for clipping and for a bucket that fits a small model.

        By default the bucket has 5e8 elements, 2 GB, for any model. Losses are weighted before DeepSpeed sees them.
        """
        bucket = min(LARGEST_BUCKET, self.trainable_elements)
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": bucket},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # the default is to clip to 1
            "steps_per_print": 10**12,
        }

    def before_step(self) -> None:
        broadcast_from_rank0(self.buffers(), self.process_group)

    def micro_batch(self, last: bool = True) -> AbstractContextManager[None]:
        """Not supported: DeepSpeed has an engine of its own for such loops."""
        raise UnsupportedError(
            "DeepSpeed strategies run in the runner's loop alone; for yours, DeepSpeed has its engine"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        loss, answer = self.engine(*args, **kwargs)
        answer.loss = loss
        return answer

    def before_micro_batch(self) -> None:
        self.engine.set_gradient_accumulation_boundary(not self.steps.another_follows)

    def finish_gradient_synchronization(self) -> None:
        unused = [n for n, used in zip(self.trainable, self.watch.received_in_last_round(), strict=True) if not used]
        if unused:
            raise UnsupportedError(
                f"no gradient for {', '.join(unused)} in this step; DeepSpeed updates unused parameters as if they had "
                "one, and ranks must use the same"
            )

    def update(self) -> None:
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Frees all gradients, because DeepSpeed has none that could be set to zero."""
        for parameter in self.trainable.values():
            parameter.grad = None  # stage 3's own code for this fails on a CPU, which has no streams
        self.zero.zero_grad()
        for group in self.zero.averaged_gradients:
            self.zero.averaged_gradients[group] = None

    # Shards and whole tensors --------------------------------------------------------------------------------------

    def gradients(self) -> Iterable[Tensor]:
        return [shard for shards in self.zero.averaged_gradients.values() if shards is not None for shard in shards]

    def gradient_share(self) -> Iterable[Tensor]:
        return self.gradients()

    def gradient_tensors(self) -> Iterable[Tensor]:
        return [*super().gradient_tensors(), *self.gradients()]

    def parameter_tensors(self) -> Iterable[Tensor]:
        parameters = list(self.module.parameters())
        return [*parameters, *(getattr(p, "ds_tensor") for p in parameters if self.stage == 3)]  # noqa: B009

    def communication_tensors(self) -> Iterable[Tensor]:
        return self.module.parameters() if self.stage == 3 else ()

    def optimizer_tensors(self) -> Iterable[Tensor]:
        """Optimizer states, and DeepSpeed's own copy of the parameters, which the optimizer updates."""
        flat = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        return [*super().optimizer_tensors(), *flat]

    def expected_memory(self, size: ModelSize) -> dict[str, int]:
        """The optimizer step frees gradients, and has an fp32 copy of this rank's part of the parameters. Stage 3 keeps
        small parameters whole, in addition to its part of them."""
        expected = expected_state_bytes(size, self.group_size, self.shards, optimizer_values=3)
        whole_bytes = sum(4 * n for n in self.all_sizes if n <= KEPT_WHOLE) if self.stage == 3 else 0
        return expected | {"gradients": 0, "parameters": expected["parameters"] + whole_bytes}

    def parameter_pieces(self) -> list[Piece]:
        """Not supported: DeepSpeed keeps states in flat partitions and has checkpoints of its own."""
        raise UnsupportedError(
            "DeepSpeed strategies can neither save nor resume checkpoints; take zero1, zero2 or zero3"
        )

    def full_gradients(self) -> dict[str, Tensor]:
        full_gradient = self.deepspeed.utils.safe_get_full_grad
        return {name: full_gradient(p).detach().cpu().clone() for name, p in self.trainable.items()}

    def gathered(self, writer: int | None = None) -> AbstractContextManager[Any]:
        """Context in which the module holds whole parameters. Changes by rank `writer` reach all ranks at its end."""
        if self.stage < 3:
            return nullcontext()
        return self.deepspeed.zero.GatheredParameters(list(self.module.parameters()), modifier_rank=writer)

    def full_state_dict(self) -> dict[str, Tensor]:
        with self.gathered():
            if self.group_rank != 0:
                return {}
            return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        with self.gathered(writer=0):
            require_matching_state(shapes_of(self.module), state, self.process_group)
            if self.group_rank == 0:
                self.module.load_state_dict(state)
            broadcast_from_rank0([*self.module.parameters(), *self.module.buffers()], self.process_group)
        self.zero.refresh_fp32_params()


class DeepSpeedZero1(DeepSpeedZero):
    """Optimizer states are sharded."""

    stage = 1
    shards = frozenset({"optimizer_state"})


class DeepSpeedZero2(DeepSpeedZero):
    """Gradients too."""

    reduces_every_micro_batch = True  # so that they need less memory
    stage = 2
    shards = frozenset({"optimizer_state", "gradients"})


class DeepSpeedZero3(DeepSpeedZero):
    """Parameters too."""

    reduces_every_micro_batch = True
    stage = 3
    shards = frozenset({"optimizer_state", "gradients", "parameters"})


def load_deepspeed(device: torch.device) -> Any:
    """The package, without its log, for the device of the module: it looks for an accelerator when it is imported."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    return deepspeed

"""What a strategy may be told. Imports nothing heavy."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_lab.runtime.errors import require
from ddp_lab.strategy.recompute import setting as recomputation

if TYPE_CHECKING:
    from ddp_lab.runtime.mesh import ShardGroups
    from ddp_lab.strategy.model_parallel import ModelParallel

AUTO = "auto"
FP16 = "fp16"
PRECISIONS = ("fp32", "bf16", FP16)
PARAM_DTYPES, REDUCE_DTYPES, MASTER_DTYPES = ("bf16", "fp16"), ("fp32", "bf16"), ("bf16",)
COMPRESSIONS = ("int8", "powersgd")
OFFLOADS = ("optimizer", "parameters")


@dataclass(frozen=True)
class StrategyOptions:
    """Settings of a strategy beyond the module and its optimizer.

    Attributes:
        bucket_cap_mb: Largest gradient bucket in MiB, for strategies that fill buckets. `auto` is the strategy's own
            default: `bucket_ddp_async` measures the link and plans its buckets, unless gradients are compressed; most
            others take 25 MiB (with a first bucket of 1 MiB in PyTorch DDP).
        overlap_optimizer: Update a bucket's parameters while others are still being reduced.
        precision: `fp32`, or `bf16` or `fp16` for autocast over fp32 parameters, gradients and optimizer states.
        loss_scale: With fp16, what the loss is multiplied by in the first step (`communication.loss_scale`).
        growth_interval: With fp16, after how many steps without overflow in a row the loss scale is doubled.
        activation_checkpointing: Which blocks free their activations in forward and compute them again in backward
            (`ddp_lab.strategy.recompute.setting`).
        param_dtype: `bf16` or `fp16`: strategies that shard gather parameters, and compute, in this dtype; their shards
            keep the parameters' own. Default: compute with the parameters as they are.
        master_dtype: `bf16`, with `param_dtype` bf16: shards are in bf16 too, and updates are rounded to it at random
            (`sharding.stochastic_rounding`). Default: shards keep the parameters' own dtype.
        reduce_dtype: `fp32` or `bf16`: in which gradients are reduced. Default: fp32 with `param_dtype`, otherwise that
            of the gradients.
        find_unused_parameters: Passed to PyTorch DDP; the hand-written strategies do not need it.
        offload: `optimizer` or `parameters`, perhaps with `:FOLDER`: keep optimizer states, and with `parameters` also
            parameters, in host memory or in files (`sharding.offload`).
        compile_backend: Compile the module's blocks with this backend of torch.compile (`strategy.compilation`).
        compress: `int8` or `powersgd`: compress gradients for the all-reduce (`communication.compression`).
        parameter_groups: Function from the module to optimizer parameter groups, as `torch.optim` takes them.
            Default: one group of all trainable parameters.
        model_parallel: How the module's parameters are cut over ranks that see the same samples. Default: not at all.
        shard_groups: Over which ranks model states are sharded, and over which these shards are replicated
            (`sharding.replicas`). Default: sharded over all ranks of the strategy.
        clock: Returns seconds, for strategies that measure. A simulated cluster passes its own.
    """

    bucket_cap_mb: float | str = AUTO
    precision: str = "fp32"
    loss_scale: float = 2.0**16
    growth_interval: int = 2000
    activation_checkpointing: str = recomputation.NONE
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    master_dtype: str | None = None
    offload: str | None = None
    find_unused_parameters: bool = False
    overlap_optimizer: bool = False
    compress: str | None = None
    compile_backend: str | None = None
    parameter_groups: Callable[[Any], Sequence[dict[str, Any]]] | None = None
    model_parallel: "ModelParallel | None" = None
    shard_groups: "ShardGroups | None" = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        cap = self.bucket_cap_mb
        require(
            cap == AUTO or (not isinstance(cap, str) and 0 < cap < float("inf")),
            "--bucket-cap-mb",
            cap,
            f"a size above 0 MiB, or {AUTO}",
        )
        for flag, value, known in (
            ("--precision", self.precision, PRECISIONS),
            ("--param-dtype", self.param_dtype, (None, *PARAM_DTYPES)),
            ("--reduce-dtype", self.reduce_dtype, (None, *REDUCE_DTYPES)),
            ("--master-dtype", self.master_dtype, (None, *MASTER_DTYPES)),
            ("--compress", self.compress, (None, *COMPRESSIONS)),
            ("--offload", self.offload and self.offload.partition(":")[0], (None, *OFFLOADS)),
        ):
            require(value in known, flag, value, f"one of {', '.join(name for name in known if name)}")
        require(
            not (self.param_dtype and self.precision != "fp32"),
            "--param-dtype",
            f"{self.param_dtype} with --precision {self.precision}",
            "one or the other: autocast is over fp32 parameters",
        )
        require(
            self.master_dtype in (None, self.param_dtype),
            "--master-dtype",
            self.master_dtype,
            f"with --param-dtype {self.master_dtype}",
        )
        require(
            not (self.compile_backend and self.activation_checkpointing == recomputation.SELECTIVE),
            "--activation-checkpointing",
            f"{recomputation.SELECTIVE} with --compile",
            "one or the other: a policy does not see the operators of a compiled block",
        )
        require(
            not (self.compress and self.reduce_dtype),
            "--compress",
            f"{self.compress} with --reduce-dtype {self.reduce_dtype}",
            "one or the other",
        )
        recomputation.Recomputation.parse(self.activation_checkpointing)
        if self.precision == FP16:
            require(
                not self.overlap_optimizer,
                "--overlap-optimizer",
                f"with --precision {FP16}",
                "one or the other, since a step is skipped if any gradient of it overflows",
            )
            require(
                not self.compress,
                "--compress",
                f"{self.compress} with --precision {FP16}",
                "one or the other, since an overflow would stay in the error feedback",
            )

    @property
    def fixed_bucket_bytes(self) -> float | None:
        """The bucket size in bytes if the user has set one, else None."""
        return None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb * 2**20

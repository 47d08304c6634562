"""What a strategy may be told. Imports nothing heavy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_lab.runtime.cli import ascii_number
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import CONTEXT, TENSOR
from ddp_lab.runtime.settings.field import (
    AUTO,
    EVERYTHING,
    LOSS,
    MAY_DIFFER,
    MEMORY,
    MUST_EQUAL,
    TIME,
    TRAFFIC,
    check_combinations,
    check_values,
    flag,
    flags_of,
    given,
    has_value,
)
from ddp_lab.runtime.settings.mesh import EXPERTS, STAGES, above_one

if TYPE_CHECKING:
    from ddp_lab.runtime.mesh import ShardGroups
    from ddp_lab.strategy.model_parallel import ModelParallel

FP32, BF16, FP16, BF16_TRUE = PRECISIONS = ("fp32", "bf16", "fp16", "bf16-true")
PARAM_DTYPES, REDUCE_DTYPES = ("bf16", "fp16"), ("fp32", "bf16")
OFFLOADS = ("optimizer", "parameters")
RECOMPUTATION = NO_RECOMPUTATION, SELECTIVE, BLOCK = ("none", "selective", "block")
"""From the fastest and largest to the slowest and smallest."""
INDUCTOR = "inductor"
_precision = partial(flag, "precision", resume=MUST_EQUAL)
_memory, _communication = (partial(flag, group, resume=MAY_DIFFER) for group in ("memory", "communication"))


def bucket_cap(value: float | str) -> float | str:
    """What `--bucket-cap-mb` takes: a size in MiB, or `auto`.

    Raises:
        UserError: it is neither.
    """
    try:
        size = value if value == AUTO else ascii_number(float)(str(value))
    except ValueError:
        raise UserError(f"'{value}' is neither a size in MiB nor {AUTO}") from None
    if size != AUTO and not 0 < float(size) < float("inf"):
        raise UserError(f"--bucket-cap-mb {value}: must be a size above 0 MiB, or {AUTO}")
    return size


def offload_text(text: str) -> str:
    """What `--offload` takes.

    Raises:
        UserError: it names neither of `OFFLOADS`.
    """
    if text.partition(":")[0] not in OFFLOADS:
        raise UserError(f"'{text}' is none of {', '.join(OFFLOADS)}, with or without :FOLDER")
    return text


@dataclass(frozen=True)
class StrategyOptions:
    """Settings of a strategy beyond the module and its optimizer. Those with a flag say what they do there.

    Attributes:
        bucket_cap_mb: Largest gradient bucket in MiB, for strategies that fill buckets. `auto` is the strategy's own
            default: 25 MiB (with a first bucket of 1 MiB in PyTorch DDP), and of `bucket_ddp_async`, `zero1` and
            `zero2` a tenth of the gradients if that is between 1 and 25 MiB.
        compile_backend: The backend of torch.compile that compiles the module's blocks (`strategy.compilation`).
            Default: inductor with `compile`, else none.
        elementwise: The optimizer works on each element by itself, though it is none of those that are known to
            (`strategy.optimizers`): a sharded choice may cut parameters for it.
        growth_interval: With fp16, after how many steps without overflow in a row the loss scale is doubled.
        parameter_groups: Function from the module to optimizer parameter groups, as `torch.optim` takes them.
            Default: one group of all trainable parameters.
        model_parallel: How the module's parameters are cut over ranks that see the same samples. Default: not at all.
        shard_groups: Over which ranks model states are sharded, and over which these shards are replicated
            (`sharding.options.replicas`). Default: sharded over all ranks of the strategy.
    """

    precision: str = _precision(
        FP32,
        "bf16 and fp16 are autocast over fp32 master states, fp16 with a dynamic loss scale "
        "(docs/how-it-works/precision.md); bf16-true keeps all in bf16, optimizer states too: lossy",
        choices=PRECISIONS,
        affects=EVERYTHING,
        head={
            BF16_TRUE: "Parameters, gradients and optimizer states are in bf16. This is lossy: an update below half a "
            "unit in the last place of a weight is lost."
        },
    )
    loss_scale: float | None = _precision(
        None,
        "fp16: the loss scale of the first step (default: 65536)",
        needs=(has_value("precision", FP16),),
        affects=(LOSS,),
    )
    param_dtype: str | None = _precision(
        None,
        "ZeRO and FSDP2 gather parameters and compute in this dtype, over shards in the model's own (default: no cast)",
        choices=PARAM_DTYPES,
        needs=(has_value("precision", FP32).because("since each says what modules compute in"),),
        excludes=(EXPERTS,),
        unsupported="this strategy computes with the parameters that it updates; take zero1, zero2, zero3, "
        "pytorch_zero2 or pytorch_zero3, or --precision bf16",
        affects=EVERYTHING,
        head="Parameters are gathered and computed with in {param_dtype}, and updated in their own dtype: activations "
        "and gradients are rounded, and losses differ from those of fp32.",
    )
    reduce_dtype: str | None = _precision(
        None,
        "reduce gradients in this dtype (default: fp32 with --param-dtype, else the gradients' dtype)",
        choices=REDUCE_DTYPES,
        excludes=(has_value("precision", BF16_TRUE).because("whose gradients are in bf16"), EXPERTS),
        affects=EVERYTHING,
        head={"bf16": "Gradients are rounded to bf16 before they are added up over ranks."},
    )
    compile: bool = _precision(
        False,
        "compile each block of the model with torch.compile; needs a C++ compiler (docs/compile.md)",
        excludes=(
            above_one(TENSOR, CONTEXT).because("whose collectives would be in the graph"),
            STAGES,
            EXPERTS,
        ),
        unsupported="this strategy has hooks within blocks; take zero1, zero2 or zero3",
        resume=MAY_DIFFER,
        affects=(TIME, MEMORY, LOSS),
        head="Blocks of the model were compiled with torch.compile.",
    )
    activation_checkpointing: str = _memory(
        NO_RECOMPUTATION,
        "free activations of blocks in forward and compute them again in backward: block keeps only inputs, "
        "selective also attention and every second matrix product",
        choices=RECOMPUTATION,
        excludes=(
            given("compile").because("since a policy does not see the operators of a compiled block", of=(SELECTIVE,)),
        ),
        affects=(TIME, MEMORY),
    )
    loss_chunks: int = _memory(
        1,
        "causal-lm: compute head and loss in N parts of a micro-batch's tokens, so that only one part's logits "
        "exist at a time (docs/own-workload.md)",
        excludes=(
            above_one(TENSOR, CONTEXT).because("over whose ranks a loss is cut already"),
            EXPERTS,
        ),
        affects=(TIME, MEMORY),
    )
    offload: str | None = _memory(
        None,
        "keep optimizer states, or also parameters, in host memory and update them there, or in files with :FOLDER "
        "(default: keep all on the device)",
        normal=offload_text,
        metavar="WHAT[:FOLDER]",
        excludes=(EXPERTS,),
        unsupported="zero1, zero2 and zero3 take optimizer states off the device, zero3, pytorch_zero2 and "
        "pytorch_zero3 parameters; to files, with :FOLDER, the hand-written ones alone",
        affects=(TIME, MEMORY),
        trials=(None, "optimizer", "parameters:folder"),
    )
    bucket_cap_mb: float | str = _communication(
        AUTO,
        "largest gradient bucket in MiB; auto: 25, and of bucket_ddp_async, zero1 and zero2 a tenth of the gradients "
        "if that is between 1 and 25",
        normal=bucket_cap,
        metavar=f"{{MIB,{AUTO}}}",
        affects=(TIME, MEMORY, TRAFFIC),
        trials=(AUTO, 0.5),
    )
    compress: str | None = _communication(
        None,
        "compress gradients for the all-reduce, with loss (default: off)",
        choices=("int8",),
        excludes=(
            given("reduce_dtype"),
            has_value("precision", FP16).because("since an overflow would stay in the error feedback"),
            EXPERTS,
        ),
        unsupported="gradients are compressed by replicated strategies alone; take one of main_ddp.py",
        resume=MUST_EQUAL,
        affects=EVERYTHING,
        head="Gradients are compressed ({compress}): what is reduced is rounded, so this is not the same training as "
        "without compression, and its times and bytes cannot be compared with it.",
    )
    find_unused_parameters: bool = _communication(
        False,
        "let PyTorch DDP search for parameters that get no gradient",
        affects=(TIME,),
    )

    elementwise: bool = False
    growth_interval: int = 2000
    compile_backend: str | None = None
    parameter_groups: Callable[[Any], Sequence[dict[str, Any]]] | None = None
    model_parallel: "ModelParallel | None" = None
    shard_groups: "ShardGroups | None" = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "compile_backend", self.compile_backend or (INDUCTOR if self.compile else None))
        object.__setattr__(self, "compile", self.compile_backend is not None)
        check_values(self)
        check_combinations(fields := flags_of(self), {field.name: getattr(self, field.name) for field in fields})

    @property
    def offloaded(self) -> str:
        """What `offload` names, without the folder; empty where it names nothing."""
        return (self.offload or "").partition(":")[0]

    @property
    def recomputes(self) -> bool:
        """Whether backward computes activations again."""
        return self.activation_checkpointing != NO_RECOMPUTATION

    @property
    def least_itemsize(self) -> int:
        """Bytes of an element in the narrowest dtype in which gradients may be sent."""
        is_full = self.precision == FP32 and not (self.param_dtype or self.reduce_dtype)
        return 1 if self.compress else 4 if is_full else 2

    @property
    def fixed_bucket_bytes(self) -> float | None:
        """The bucket size in bytes if the user has set one, else None."""
        return None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb * 2**20

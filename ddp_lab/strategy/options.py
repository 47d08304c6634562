"""What a strategy may be told. Imports nothing heavy."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_lab.runtime.cli import ascii_number
from ddp_lab.runtime.settings.field import Rules, check, flag, one_of

if TYPE_CHECKING:
    from ddp_lab.runtime.mesh import ShardGroups
    from ddp_lab.strategy.model_parallel import ModelParallel

AUTO = "auto"
FP16, BF16_TRUE = "fp16", "bf16-true"
PRECISIONS = ("fp32", "bf16", FP16, BF16_TRUE)
PARAM_DTYPES, REDUCE_DTYPES = ("bf16", "fp16"), ("fp32", "bf16")
OFFLOADS = ("optimizer", "parameters")
RECOMPUTATION = NO_RECOMPUTATION, SELECTIVE, BLOCK = ("none", "selective", "block")
"""From the fastest and largest to the slowest and smallest."""
INDUCTOR = "inductor"
_precision, _memory, _communication = (partial(flag, group) for group in ("precision", "memory", "communication"))


def bucket_cap(text: str) -> float | str:
    """What `--bucket-cap-mb` takes: a number, or `auto`.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        return text if text == AUTO else ascii_number(float)(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a size in MiB nor {AUTO}") from None


def offload_text(text: str) -> str:
    """What `--offload` takes.

    Raises:
        argparse.ArgumentTypeError: it names neither of `OFFLOADS`.
    """
    one_of(OFFLOADS, text.partition(":")[0], ", with or without :FOLDER")
    return text


def is_size(value: float | str) -> bool:
    return not isinstance(value, str) and 0 < value < float("inf")


RULES: Rules = (
    (
        lambda o: o.bucket_cap_mb == AUTO or is_size(o.bucket_cap_mb),
        f"--bucket-cap-mb {{0.bucket_cap_mb}}: must be a size above 0 MiB, or {AUTO}",
    ),
    (
        lambda o: o.offload is None or o.offloaded in OFFLOADS,
        f"--offload {{0.offloaded}}: must be one of {', '.join(OFFLOADS)}",
    ),
    (
        lambda o: not o.param_dtype or o.precision == "fp32",
        "--param-dtype {0.param_dtype} with --precision {0.precision}: must be one or the other: each says what "
        "modules compute in",
    ),
    (
        lambda o: not o.compile_backend or o.activation_checkpointing != SELECTIVE,
        "--activation-checkpointing selective with --compile: must be one or the other: a policy does not see the "
        "operators of a compiled block",
    ),
    (
        lambda o: not o.reduce_dtype or o.precision != BF16_TRUE,
        f"--reduce-dtype with --precision {BF16_TRUE}: must be one or the other, since gradients are in bf16 then",
    ),
    (
        lambda o: not (o.compress and o.reduce_dtype),
        "--compress {0.compress} with --reduce-dtype {0.reduce_dtype}: must be one or the other",
    ),
    (
        lambda o: not (o.compress and o.precision == FP16),
        f"--compress {{0.compress}} with --precision {FP16}: must be one or the other, since an overflow would"
        " stay in the error feedback",
    ),
)


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
        "fp32",
        "bf16 and fp16 are autocast over fp32 master states, fp16 with a dynamic loss scale "
        "(docs/how-it-works/loss_scaling.md); bf16-true keeps all in bf16, optimizer states too: lossy",
        choices=PRECISIONS,
    )
    loss_scale: float | None = _precision(
        None, "fp16: the loss scale of the first step (default: 65536)", above_zero=True
    )
    param_dtype: str | None = _precision(
        None,
        "ZeRO and FSDP2 gather parameters and compute in this dtype, over shards in the model's own (default: no cast)",
        choices=PARAM_DTYPES,
    )
    reduce_dtype: str | None = _precision(
        None,
        "reduce gradients in this dtype (default: fp32 with --param-dtype, else that of the gradients)",
        choices=REDUCE_DTYPES,
    )
    compile: bool = _precision(
        False, "compile each block of the model with torch.compile; needs a C++ compiler (docs/compile.md)"
    )
    activation_checkpointing: str = _memory(
        NO_RECOMPUTATION,
        "free activations of blocks in forward and compute them again in backward: block keeps inputs alone, selective "
        "also attention and every second matrix product",
        choices=RECOMPUTATION,
    )
    loss_chunks: int = _memory(
        1,
        "causal-lm: compute head and loss for so many parts of a micro-batch's tokens one after the other, so that "
        "only these logits exist at a time (docs/language-models.md)",
        at_least=1,
    )
    offload: str | None = _memory(
        None,
        "keep optimizer states, or also parameters, in host memory and update them there, or in files with :FOLDER "
        "(default: keep all on the device)",
        read=offload_text,
        metavar="WHAT[:FOLDER]",
    )
    bucket_cap_mb: float | str = _communication(
        AUTO,
        "largest gradient bucket in MiB; auto: 25, and of bucket_ddp_async, zero1 and zero2 a tenth of the gradients "
        "if that is between 1 and 25",
        read=bucket_cap,
        metavar=f"{{MIB,{AUTO}}}",
    )
    compress: str | None = _communication(
        None, "compress gradients for the all-reduce, with loss (default: do not)", choices=("int8",)
    )
    find_unused_parameters: bool = _communication(False, "let PyTorch DDP search for parameters that get no gradient")

    elementwise: bool = False
    growth_interval: int = 2000
    compile_backend: str | None = None
    parameter_groups: Callable[[Any], Sequence[dict[str, Any]]] | None = None
    model_parallel: "ModelParallel | None" = None
    shard_groups: "ShardGroups | None" = None

    def __post_init__(self) -> None:
        if self.compile and self.compile_backend is None:
            object.__setattr__(self, "compile_backend", INDUCTOR)
        check(self, RULES)

    @property
    def offloaded(self) -> str:
        """What `offload` names, without the folder; empty where it names nothing."""
        return (self.offload or "").partition(":")[0]

    @property
    def fixed_bucket_bytes(self) -> float | None:
        """The bucket size in bytes if the user has set one, else None."""
        return None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb * 2**20

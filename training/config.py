"""Settings of a run: frozen dataclasses, checked when they are built and written beside every trace.

This module imports nothing heavy, so that `--help` answers at once.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from training.errors import UserError

PRECISIONS = ("fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
BACKENDS = ("auto", "gloo", "nccl")
AUTO = "auto"
COMPRESSIONS = ("bf16", "powersgd")
LATEST = "latest"

RECORD_VERSION = 7
"""Of the run record's format (`docs/run-record.md`)."""


@dataclass(frozen=True)
class StrategyOptions:
    """What a strategy may be told beyond the module and its optimizer.

    Attributes:
        bucket_cap_mb: Largest gradient bucket in MiB, for strategies that fill buckets. `auto` is what the strategy
            takes by itself: `bucket_ddp_async` measures the link and plans its buckets, unless gradients are
            compressed; most others take 25 MiB (with a first bucket of 1 MiB in PyTorch DDP).
        overlap_optimizer: Update a bucket's parameters while others are still being reduced.
        precision: `fp32`, or `bf16` for autocast over fp32 parameters, gradients and optimizer states.
        find_unused_parameters: Passed to PyTorch DDP; the hand-written strategies need no such hint.
        compress: `bf16` or `powersgd`: all-reduce less than the gradients, rounded (`communication.compression`).
        parameter_groups: Function of the module that answers with optimizer parameter groups, as `torch.optim` takes
            them. Default: one group of all trainable parameters.
        clock: Answers with seconds, to strategies that measure. A pretended cluster passes its own.
    """

    bucket_cap_mb: float | str = AUTO
    precision: str = "fp32"
    find_unused_parameters: bool = False
    overlap_optimizer: bool = False
    compress: str | None = None
    parameter_groups: Callable[[Any], Sequence[dict[str, Any]]] | None = None
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        cap = self.bucket_cap_mb
        _require(
            cap == AUTO or (not isinstance(cap, str) and 0 < cap < float("inf")),
            "--bucket-cap-mb",
            cap,
            f"a size above 0 MiB, or {AUTO}",
        )
        _require(
            self.compress is None or self.compress in COMPRESSIONS,
            "--compress",
            self.compress,
            f"one of {', '.join(COMPRESSIONS)}",
        )
        _require(self.precision in PRECISIONS, "--precision", self.precision, f"one of {', '.join(PRECISIONS)}")

    @property
    def fixed_bucket_bytes(self) -> float | None:
        """The size that was asked for, if it was."""
        return None if isinstance(self.bucket_cap_mb, str) else self.bucket_cap_mb * 2**20


def bucket_cap(text: str) -> float | str:
    """What `--bucket-cap-mb` takes: a number, or `auto`.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        return text if text == AUTO else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a size in MiB nor {AUTO}") from None


def _flag(default: Any, help: str, parse: Callable[[str], Any] | None = None, alone: Any = None) -> Any:
    """`alone`: what the flag means where no value follows it; without one, a value has to."""
    return dataclasses.field(default=default, metadata={"help": help, "parse": parse, "alone": alone})


@dataclass(frozen=True)
class RunConfig:
    """One training run. Each field is a flag of the same name (`training.cli` builds the command line from here)."""

    choice: str = _flag("", "the strategy to train with")
    workload: str = _flag("auto", "model and data to train on; auto is 'yelp' with CUDA and 'sample' without")
    model: str | None = _flag(None, "hub id or local save_pretrained folder, instead of the one of workload yelp")
    dataset: str | None = _flag(
        None, "hub id, save_to_disk folder, or parquet, CSV or JSON-lines file or folder with columns text and label"
    )
    train_samples: int | None = _flag(None, "training samples to use (default: what the workload sets)")
    eval_samples: int | None = _flag(None, "held-out samples to evaluate on (default: what the workload sets)")
    global_batch_size: int = _flag(8, "samples in an optimizer step: micro-batch x --grad-accum-steps x ranks")
    grad_accum_steps: int = _flag(2, "micro-batches whose gradients a rank adds up before the optimizer step")
    epochs: int = _flag(1, "passes over the training samples")
    max_steps: int | None = _flag(None, "stop after this many optimizer steps (default: whole epochs)")
    lr: float | None = _flag(None, "learning rate of AdamW (default: what the workload sets)")
    clip_grad_norm: float | None = _flag(None, "scale gradients down to this norm over the whole model")
    seed: int = _flag(0, "seed of initial weights, data order and dropout")
    precision: str = _flag("fp32", "fp32, or bf16 for autocast over fp32 master states")
    bucket_cap_mb: float | str = _flag(
        AUTO,
        "largest gradient bucket in MiB; auto: bucket_ddp_async fits its buckets to the measured link (25 with "
        "--compress), others take their own, mostly 25",
        bucket_cap,
    )
    overlap_optimizer: bool = _flag(
        False, "bucket_ddp_async: update a bucket's parameters while others are still being reduced"
    )
    compress: str | None = _flag(None, "all-reduce gradients rounded: bf16 or powersgd (default: as they are)")
    find_unused_parameters: bool = _flag(False, "let PyTorch DDP search for parameters that get no gradient")
    depth: int = _flag(40, "layers of workload mlp")
    width: int = _flag(4096, "features of each layer of workload mlp")
    device: str = _flag("auto", "auto, cpu or cuda; auto takes CUDA where there is a GPU")
    backend: str = _flag("auto", "auto, gloo or nccl; auto takes NCCL with CUDA and Gloo without")
    timeout_minutes: float = _flag(10.0, "how long a collective may wait for a missing rank, in minutes")
    output_dir: str = _flag(".", "root folder of profile/")
    checkpoint_every: int | None = _flag(
        None, "save a checkpoint every so many optimizer steps, and after the last (docs/checkpoints.md)"
    )
    checkpoint_dir: str | None = _flag(
        None, "folder of this run's checkpoints (default: checkpoints/<choice> in --output-dir)"
    )
    checkpoint_async: bool = _flag(False, "write checkpoints in the background, from a copy in host memory")
    keep_last: int | None = _flag(None, "keep only so many of the newest checkpoints (default: all)")
    resume: str | None = _flag(
        None,
        "go on from this checkpoint, or from the newest in a folder; alone, or latest: in --checkpoint-dir",
        None,
        LATEST,
    )
    no_profile: bool = _flag(False, "train without torch.profiler and write no traces")
    profile_wait: int = _flag(
        4, "optimizer steps before each profile window, not profiled; none in which a choice settles is either"
    )
    profile_warmup: int = _flag(1, "optimizer steps for which the profiler runs but throws its events away")
    profile_active: int = _flag(3, "optimizer steps in each profile window")
    profile_repeat: int = _flag(1, "number of profile windows")

    def __post_init__(self) -> None:
        for name in (
            "global_batch_size",
            "grad_accum_steps",
            "epochs",
            "depth",
            "width",
            "profile_active",
            "profile_repeat",
        ):
            _require(getattr(self, name) >= 1, flag_name(name), getattr(self, name), "a whole number of at least 1")
        for name in ("train_samples", "eval_samples", "max_steps", "checkpoint_every", "keep_last"):
            value = getattr(self, name)
            _require(value is None or value >= 1, flag_name(name), value, "a whole number of at least 1")
        for name in ("profile_wait", "profile_warmup"):
            _require(getattr(self, name) >= 0, flag_name(name), getattr(self, name), "a whole number of at least 0")
        for name in ("lr", "clip_grad_norm", "timeout_minutes"):
            value = getattr(self, name)
            _require(value is None or 0 < value < float("inf"), flag_name(name), value, "a number above 0")
        for name, allowed in (("device", DEVICES), ("backend", BACKENDS)):
            _require(
                getattr(self, name) in allowed, flag_name(name), getattr(self, name), f"one of {', '.join(allowed)}"
            )
        _require(0 <= self.seed < 2**32, "--seed", self.seed, "a whole number from 0 to 4294967295")
        _require(
            not (self.overlap_optimizer and self.clip_grad_norm),
            "--overlap-optimizer",
            "with --clip-grad-norm",
            "one or the other, since the norm of all gradients is known only when all of them are reduced",
        )
        saves, saves_or_resumes = bool(self.checkpoint_every), bool(self.checkpoint_every or self.resume)
        _require(saves or not self.checkpoint_async, "--checkpoint-async", "", "with --checkpoint-every")
        _require(saves or not self.keep_last, "--keep-last", self.keep_last, "with --checkpoint-every")
        _require(
            saves_or_resumes or self.checkpoint_dir is None,
            "--checkpoint-dir",
            self.checkpoint_dir,
            "with --checkpoint-every or --resume",
        )
        self.strategy_options()

    def strategy_options(self) -> StrategyOptions:
        return StrategyOptions(
            bucket_cap_mb=self.bucket_cap_mb,
            precision=self.precision,
            find_unused_parameters=self.find_unused_parameters,
            overlap_optimizer=self.overlap_optimizer,
            compress=self.compress,
        )

    def micro_batch_size(self, data_parallel_size: int) -> int:
        """Samples in one micro-batch of one rank.

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

    def profile_steps(self, settling_steps: int = 0) -> int:
        """Optimizer steps that the profiler's whole schedule takes, with a strategy that needs so many to settle."""
        window = self.profile_wait + self.profile_warmup + self.profile_active
        return self.steps_before_profile(settling_steps) + self.profile_repeat * window

    def steps_before_profile(self, settling_steps: int) -> int:
        """Optimizer steps before the schedule begins, so that none in which a strategy settles is in a window."""
        return max(0, settling_steps - self.profile_wait - self.profile_warmup)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _require(holds: bool, flag: str, value: object, wanted: str) -> None:
    if not holds:
        raise UserError(f"{flag} {value}".rstrip() + f": must be {wanted}")

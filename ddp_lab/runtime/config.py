"""Settings of a run: frozen dataclasses, checked when they are built and written beside every trace.

This module imports nothing heavy, so that `--help` answers at once.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_lab.runtime.errors import UserError, require
from ddp_lab.runtime.link.speed import NONE, canonical
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.profiling.chosen_ranks import ranks_in
from ddp_lab.strategy.options import (
    AUTO,
    COMPRESSIONS,
    FP16,
    MASTER_DTYPES,
    OFFLOADS,
    PARAM_DTYPES,
    PRECISIONS,
    REDUCE_DTYPES,
    StrategyOptions,
)
from ddp_lab.strategy.recompute import setting as recomputation

DEVICES = ("auto", "cpu", "cuda")
NCCL, LEGACY_NCCL = "nccl", "nccl-legacy"
"""Torch's names for its NCCL backend and for the class that was it before (docs/cuda.md)."""
BACKENDS = ("auto", "gloo", NCCL, LEGACY_NCCL)
CLASSIFICATION, CAUSAL_LM = "classification", "causal-lm"
TASKS = (CLASSIFICATION, CAUSAL_LM)
LATEST = "latest"
SCHEDULES = ("constant", "linear", "cosine")
"""Of the learning rate (`ddp_lab.runtime.schedule`)."""
SEQUENCE_PARALLEL, ASYNC = "-sp", "-async"
"""Behind a mesh in the label of a run."""
LOG_TARGETS = ("tensorboard", "wandb")

RECORD_VERSION = 10
"""Version of the run record's format (`docs/run-record.md`)."""


def bucket_cap(text: str) -> float | str:
    """What `--bucket-cap-mb` takes: a number, or `auto`.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    try:
        return text if text == AUTO else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a size in MiB nor {AUTO}") from None


def mesh_text(text: str) -> str:
    """What `--mesh` takes.

    Raises:
        argparse.ArgumentTypeError: it is no mesh.
    """
    try:
        return str(Mesh.parse(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def link_text(text: str) -> str:
    """What `--link` takes.

    Raises:
        argparse.ArgumentTypeError: it is no link.
    """
    try:
        return canonical(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def log_targets(text: str) -> str:
    """What `--log-to` takes.

    Raises:
        argparse.ArgumentTypeError: a target is unknown, or its package is not installed.
    """
    targets = text.split(",")
    for target in targets:
        if target not in LOG_TARGETS:
            raise argparse.ArgumentTypeError(f"'{target}' is none of {', '.join(LOG_TARGETS)}")
        if targets.count(target) > 1:
            raise argparse.ArgumentTypeError(f"'{text}' names {target} twice")
        spec = find_spec(target)
        if spec is None or spec.origin is None:  # a folder of this name here, such as W&B's own, is no package
            raise argparse.ArgumentTypeError(f"{target} is not installed; run: uv sync --extra {target}")
    return text


def offload_text(text: str) -> str:
    """What `--offload` takes.

    Raises:
        argparse.ArgumentTypeError: it names neither of `OFFLOADS`.
    """
    if text.partition(":")[0] not in OFFLOADS:
        raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(OFFLOADS)}, with or without :FOLDER")
    return text


def _flag(
    group: str,
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    at_least: int | None = None,
    above_zero: bool = False,
    parse: Callable[[str], Any] | None = None,
    alone: Any = None,
) -> Any:
    """A field, and all that `--help`, `docs/command-line.md` and the checks need to know of its flag.

    Args:
        group: The heading in `--help`.
        choices: The values that it takes, if they are few.
        at_least: The smallest value. `above_zero`: any finite number above 0.
        parse: Reads the value from text. Default: the field's type.
        alone: The value of the flag when no value follows it. Default: a value must follow.
    """
    metadata = {"group": group, "help": help, "choices": choices, "at_least": at_least, "above_zero": above_zero}
    return dataclasses.field(default=default, metadata=metadata | {"parse": parse, "alone": alone})


_data = partial(_flag, "model and data")
_batch = partial(_flag, "batch")
_mesh = partial(_flag, "mesh")
_precision = partial(_flag, "precision")
_memory = partial(_flag, "memory")
_communication = partial(_flag, "communication")
_profiling = partial(_flag, "profiling")
_checkpoints = partial(_flag, "checkpoints")
_run = partial(_flag, "run")


@dataclass(frozen=True)
class RunConfig:
    """One training run. Each field is a flag of the same name (`flags` builds the command line from here)."""

    choice: str = _data("", "the strategy to train with")
    task: str = _data(CLASSIFICATION, "what --model learns from --dataset (docs/language-models.md)", choices=TASKS)
    workload: str = _data(
        AUTO,
        "model and data to train on, or FILE.py:FUNCTION of your own (docs/own-workload.md); auto is 'hub' or 'yelp' "
        "with --model or --dataset, else 'sample-lm' with --task causal-lm, 'yelp' with CUDA and 'sample' without",
    )
    model: str | None = _data(
        None, "hub id or local save_pretrained folder; for causal-lm also a folder with a config.json alone"
    )
    dataset: str | None = _data(
        None,
        "hub id, save_to_disk folder, or parquet, CSV, JSON, JSON-lines or text file or folder; with texts and labels, "
        "for causal-lm texts, or columns prompt and completion",
    )
    text_column: str = _data("text", "the column of --dataset that has the text")
    label_column: str = _data("label", "the column of --dataset that has the labels, names or whole numbers")
    streaming: bool = _data(False, "causal-lm: read no more of --dataset than --train-samples and --eval-samples need")
    sequence_length: int | None = _data(
        None,
        "causal-lm: tokens in a sequence (default: 128 for sample-lm, else 1024 or what the model takes)",
        at_least=2,
    )
    train_samples: int | None = _data(None, "training samples to use (default: set by the workload)", at_least=1)
    eval_samples: int | None = _data(None, "held-out samples to evaluate on (default: set by the workload)", at_least=1)
    depth: int = _data(40, "layers of workload mlp", at_least=1)
    width: int = _data(4096, "features of each layer of workload mlp", at_least=1)

    lora_rank: int | None = _data(
        None,
        "freeze the model, and train LoRA adapters of this rank beside its linear layers (default: train the model)",
        at_least=1,
    )
    lora_alpha: int | None = _data(
        None, "what adapters give is multiplied by this over --lora-rank (default: twice --lora-rank)", at_least=1
    )

    mesh: str | None = _mesh(
        None,
        "the ranks by dimension, from the outermost: dp=2,tp=2, or replicate=2,shard=4 (docs/how-it-works/mesh.md; "
        "default: all ranks see different samples)",
        parse=mesh_text,
    )
    sequence_parallel: bool = _mesh(
        False, "with tp, each rank also keeps only its part of the tokens between attention and MLP"
    )
    async_tensor_parallel: int | None = _mesh(
        None,
        "with --sequence-parallel, cut products into so many pieces, and overlap each with the gather or scatter of "
        "another (docs/how-it-works/tensor_parallel.md; default: no overlap)",
        at_least=2,
    )
    plan: str | None = _mesh(
        None, "with tp, TOML file that says which module is cut how, for models that have no plan here"
    )

    global_batch_size: int = _batch(
        8, "samples in an optimizer step: micro-batch x --grad-accum-steps x ranks", at_least=1
    )
    grad_accum_steps: int = _batch(
        2, "micro-batches whose gradients a rank accumulates before the optimizer step", at_least=1
    )
    epochs: int = _batch(1, "passes over the training samples", at_least=1)
    max_steps: int | None = _batch(None, "stop after this many optimizer steps (default: whole epochs)", at_least=1)

    precision: str = _precision(
        "fp32",
        "bf16 and fp16 are autocast over fp32 master states, fp16 with a dynamic loss scale "
        "(docs/how-it-works/loss_scaling.md)",
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
    master_dtype: str | None = _precision(
        None,
        "with --param-dtype bf16, ZeRO keeps shards in bf16 too, without fp32 masters, and rounds each update at "
        "random: lossy (default: the model's own)",
        choices=MASTER_DTYPES,
    )
    tf32: bool = _precision(False, "on GPUs, matrix products of fp32 tensors in TF32: 10 bits of mantissa, but faster")

    compile: bool = _precision(
        False, "compile each block of the model with torch.compile; needs a C++ compiler (docs/compile.md)"
    )
    activation_checkpointing: str = _memory(
        recomputation.NONE,
        "free activations of these blocks in forward and compute them again in backward: block is all, every:N each "
        "N-th, selective all but matrix products and attention; torch:block and torch:every:N by torch's own code",
        parse=recomputation.text,
    )
    offload: str | None = _memory(
        None,
        "keep optimizer states, or also parameters, in host memory and update them there, or in files with :FOLDER "
        "(default: keep all on the device)",
        parse=offload_text,
    )

    backend: str = _communication(
        AUTO, "auto is NCCL with CUDA and Gloo without; nccl-legacy is torch's older NCCL class", choices=BACKENDS
    )
    link: str = _communication(
        NONE,
        "give each rank a link of this rate and latency, without a GPU: 1gbit, or 250mbit,50us; none is the machine as "
        "it is (docs/link.md)",
        parse=link_text,
    )
    outer_link: str | None = _communication(
        None,
        "with --link and --nodes, give each rank a second link of this rate and latency, for what goes between nodes",
        parse=link_text,
    )
    nodes: int | None = _communication(
        None, "with --outer-link, on how many nodes the ranks are taken to be, neighbours together", at_least=2
    )
    timeout_minutes: float = _communication(
        10.0, "how long a collective may wait for a missing rank, in minutes", above_zero=True
    )
    bucket_cap_mb: float | str = _communication(
        AUTO,
        "largest gradient bucket in MiB; auto: bucket_ddp_async fits its buckets to the measured link (25 MiB with "
        "--compress), others take their own default, mostly 25 MiB",
        parse=bucket_cap,
    )
    overlap_optimizer: bool = _communication(
        False, "bucket_ddp_async: update a bucket's parameters while others are still being reduced"
    )
    compress: str | None = _communication(
        None, "compress gradients for the all-reduce, with loss (default: do not)", choices=COMPRESSIONS
    )
    find_unused_parameters: bool = _communication(False, "let PyTorch DDP search for parameters that get no gradient")

    no_profile: bool = _profiling(False, "train without torch.profiler and write no traces")
    profile_wait: int = _profiling(
        4,
        "optimizer steps before each profile window, without the profiler; steps in which a strategy settles are "
        "never profiled",
        at_least=0,
    )
    profile_warmup: int = _profiling(
        1, "optimizer steps for which the profiler runs but discards its events", at_least=0
    )
    profile_active: int = _profiling(3, "optimizer steps in each profile window", at_least=1)
    profile_repeat: int = _profiling(1, "number of profile windows", at_least=1)
    profile_ranks: str | None = _profiling(None, "profile these ranks only, such as 0,1,8 or 0-3 (default: all)")
    nsys: bool = _profiling(
        False, "mark profile windows and phases for Nsight Systems, under which the run is started, and write no traces"
    )
    memory_snapshot: bool = _profiling(
        False, "on GPUs, also write what CUDA memory holds, and who allocated it, at the end of each profile window"
    )

    checkpoint_every: int | None = _checkpoints(
        None, "save a checkpoint every so many optimizer steps, and after the last (docs/checkpoints.md)", at_least=1
    )
    checkpoint_dir: str | None = _checkpoints(
        None, "folder of this run's checkpoints (default: checkpoints/<choice> in --output-dir)"
    )
    checkpoint_async: bool = _checkpoints(False, "write checkpoints in the background, from a copy in host memory")
    keep_last: int | None = _checkpoints(None, "keep only so many of the newest checkpoints (default: all)", at_least=1)
    resume: str | None = _checkpoints(
        None,
        "continue from this checkpoint, or from the newest in a folder; without a value, or with latest: from the "
        "newest in --checkpoint-dir; auto: the same, or start from the beginning if there is none",
        alone=LATEST,
    )

    generate: int | None = _run(
        None, "at the end, print so many tokens that the language model makes (default: none)", at_least=1
    )
    prompt: str | None = _run(None, "the text that --generate goes on with (default: of the held-out data)")
    lr: float | None = _run(None, "learning rate of AdamW (default: set by the workload)", above_zero=True)
    schedule: str = _run(
        "constant", "learning rate after warm-up: constant, or falling to 0 at the end of the run", choices=SCHEDULES
    )
    warmup_steps: int = _run(0, "first optimizer steps, in which the learning rate rises linearly to --lr", at_least=0)
    clip_grad_norm: float | None = _run(
        None, "scale gradients down to this norm over the whole model (default: do not)", above_zero=True
    )
    seed: int = _run(0, "seed of initial weights, data order and dropout", at_least=0)
    device: str = _run(AUTO, "auto is CUDA if there is a GPU", choices=DEVICES)
    output_dir: str = _run(".", "root folder of profile/")
    log_to: str | None = _run(
        None, "also log each step to tensorboard, wandb, or both with a comma between", parse=log_targets
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), flag_name(field.name)
            choices, least = field.metadata["choices"], field.metadata["at_least"]
            if value is None:
                continue
            if choices:
                require(value in choices, flag, value, f"one of {', '.join(choices)}")
            if least is not None:
                require(value >= least, flag, value, f"a whole number of at least {least}")
            if field.metadata["above_zero"]:
                require(0 < value < float("inf"), flag, value, "a number above 0")
        object.__setattr__(self, "link", canonical(self.link))
        if self.outer_link is not None:
            object.__setattr__(self, "outer_link", canonical(self.outer_link))
            is_usable = NONE not in (self.link, self.outer_link) and self.nodes is not None
            require(is_usable, "--outer-link", self.outer_link, "a rate, with --link RATE and --nodes")
        require(self.nodes is None or self.outer_link is not None, "--nodes", self.nodes, "with --outer-link RATE")
        if self.mesh is not None:
            object.__setattr__(self, "mesh", str(Mesh.parse(self.mesh)))
        cut = Mesh.parse(self.mesh).model_size > 1 if self.mesh else False
        require(cut or not self.sequence_parallel, "--sequence-parallel", "", "with --mesh and tp above 1")
        require(
            self.sequence_parallel or self.async_tensor_parallel is None,
            "--async-tensor-parallel",
            self.async_tensor_parallel,
            "with --sequence-parallel, whose gathers and scatters it overlaps",
        )
        require(
            not self.async_tensor_parallel or self.activation_checkpointing != recomputation.SELECTIVE,
            "--async-tensor-parallel",
            f"with --activation-checkpointing {recomputation.SELECTIVE}",
            "one or the other, since products in pieces are not kept",
        )
        require(cut or self.plan is None, "--plan", self.plan, "with --mesh and tp above 1")
        require(not (cut and self.compile), "--compile", "", "without tp, whose collectives would be in the graph")
        require(not (cut and self.lora_rank), "--lora-rank", self.lora_rank, "without tp: no plan names adapters")
        require(
            not (cut and self.overlap_optimizer),
            "--overlap-optimizer",
            f"with --mesh {self.mesh}",
            "without tp, since a rank sees only a part of each bucket's norm",
        )
        require(self.seed < 2**32, "--seed", self.seed, "a whole number from 0 to 4294967295")
        require(
            not (self.overlap_optimizer and self.clip_grad_norm),
            "--overlap-optimizer",
            "with --clip-grad-norm",
            "one or the other, since the norm is known only when all gradients are reduced",
        )
        require(
            self.precision == FP16 or not self.loss_scale, "--loss-scale", self.loss_scale, f"with --precision {FP16}"
        )
        require(bool(self.lora_rank or not self.lora_alpha), "--lora-alpha", self.lora_alpha, "with --lora-rank")
        saves, saves_or_resumes = bool(self.checkpoint_every), bool(self.checkpoint_every or self.resume)
        require(saves or not self.checkpoint_async, "--checkpoint-async", "", "with --checkpoint-every")
        require(saves or not self.keep_last, "--keep-last", self.keep_last, "with --checkpoint-every")
        require(
            saves_or_resumes or self.checkpoint_dir is None,
            "--checkpoint-dir",
            self.checkpoint_dir,
            "with --checkpoint-every or --resume",
        )
        require(self.generate is not None or self.prompt is None, "--prompt", self.prompt, "with --generate")
        if self.profile_ranks is not None:
            ranks_in(self.profile_ranks, "--profile-ranks")
        self.strategy_options()

    @property
    def label(self) -> str:
        """Names the run's folders: the choice, with its mesh and `nccl-legacy` behind, so that these never mix:
        `zero2@dp2-tp2`."""
        mesh = Mesh.parse(self.mesh).label if self.mesh else None
        if mesh and self.sequence_parallel:
            mesh += SEQUENCE_PARALLEL + (f"{ASYNC}{self.async_tensor_parallel}" if self.async_tensor_parallel else "")
        return labelled(self.choice, mesh, self.backend if self.backend == LEGACY_NCCL else None)

    def strategy_options(self) -> StrategyOptions:
        return StrategyOptions(
            bucket_cap_mb=self.bucket_cap_mb,
            precision=self.precision,
            loss_scale=self.loss_scale or StrategyOptions.loss_scale,
            activation_checkpointing=self.activation_checkpointing,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            master_dtype=self.master_dtype,
            offload=self.offload,
            find_unused_parameters=self.find_unused_parameters,
            overlap_optimizer=self.overlap_optimizer,
            compress=self.compress,
            compile_backend="inductor" if self.compile else None,
        )

    def profiles(self, rank: int) -> bool:
        """Whether this rank is profiled."""
        chosen = self.profile_ranks is None or rank in ranks_in(self.profile_ranks, "--profile-ranks")
        return chosen and not self.no_profile

    def require_profiled_ranks(self, world_size: int) -> None:
        """Check that every rank that is to be profiled exists.

        Raises:
            UserError: names the first that does not.
        """
        ranks = range(world_size) if self.profile_ranks is None else ranks_in(self.profile_ranks, "--profile-ranks")
        if (highest := max(ranks)) >= world_size:
            raise UserError(
                f"--profile-ranks {self.profile_ranks}: there is no rank {highest}; the run has ranks 0 to "
                f"{world_size - 1}"
            )

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

    def profile_steps(self, settling_steps: int = 0) -> int:
        """Optimizer steps that the profiler's whole schedule takes.

        Args:
            settling_steps: Steps that the strategy needs to settle (`Strategy.settling_steps`).
        """
        window = self.profile_wait + self.profile_warmup + self.profile_active
        return self.steps_before_profile(settling_steps) + self.profile_repeat * window

    def steps_before_profile(self, settling_steps: int) -> int:
        """Optimizer steps before the schedule begins, so that the strategy has settled before the first window."""
        return max(0, settling_steps - self.profile_wait - self.profile_warmup)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def choice_folder(config: RunConfig) -> Path:
    """Where a run leaves its traces and its record."""
    return Path(config.output_dir) / "profile" / config.label


def labelled(choice: str, *settings: str | None) -> str:
    """`<choice>@<setting>...`, without those that are None."""
    return "@".join([choice, *(setting for setting in settings if setting is not None)])


def split_label(label: str) -> tuple[str, str | None]:
    """The choice of `labelled`, and the backend or None."""
    choice, *settings = label.split("@")
    return choice, LEGACY_NCCL if LEGACY_NCCL in settings else None


def flag_name(field_name: str) -> str:
    """The flag of a field of `RunConfig`."""
    return "--ddp-choice" if field_name == "choice" else "--" + field_name.replace("_", "-")

"""What is trained, on what, and in which batches."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import EXPERT
from ddp_lab.runtime.settings.field import (
    AUTO,
    EVERYTHING,
    LOSS,
    MAY_DIFFER,
    MEMORY,
    MUST_EQUAL,
    TIME,
    TRAFFIC,
    Condition,
    flag,
    given,
)
from ddp_lab.runtime.settings.mesh import EXPERTS, STAGES, TENSOR_PARTS, degree_of

CLASSIFICATION, CAUSAL_LM = TASKS = ("classification", "causal-lm")
WORKLOADS = {
    "sample": "13 M-parameter Llama classifier, random weights, on built-in reviews; no download",
    "digits": "small CNN with BatchNorm on scikit-learn's 1797 images of digits; no download, the first to try",
    "sample-lm": "1.9 M-parameter Llama language model, random weights, on built-in prose; no download",
    "sample-moe": "the same with 8 experts a layer instead of its MLP, of which each token gets 2: 4.7 M parameters",
    "hub": "--model and --dataset, for --task classification or causal-lm",
    "yelp": "SmolLM2-360M-Instruct on Yelp reviews from the hub, or --model and --dataset",
    "smollm2-360m": "SmolLM2-360M's architecture, random weights, on built-in reviews; no download",
    "mlp": "--depth bias-free linear + ReLU layers of --width features on synthetic regression data",
    "transformer-small": "d_model/d_ff/layers/heads 768/3072/12/12, random tokens",
    "transformer-medium": "d_model/d_ff/layers/heads 1024/4096/24/16, random tokens",
    "transformer-large": "d_model/d_ff/layers/heads 1280/5120/36/20, random tokens",
    "transformer-xl": "d_model/d_ff/layers/heads 1600/6400/48/25, random tokens",
    "transformer-2.7b": "d_model/d_ff/layers/heads 2560/10240/32/32, random tokens",
}
"""By name, a sentence for `--help`, in display order."""
SAMPLE_EXPERTS = 8
"""In a layer of workload sample-moe."""
UNEVEN_EXPERTS = Condition(
    f"an ep that does not divide its {SAMPLE_EXPERTS} experts",
    ("mesh",),
    lambda mesh: SAMPLE_EXPERTS % degree_of(mesh, EXPERT) > 0,
    of=("sample-moe",),
)

_data = partial(flag, "model and data", resume=MUST_EQUAL)
_batch = partial(flag, "batch", resume=MAY_DIFFER)


def is_own(name: str) -> bool:
    """Whether `--workload` names a file of the user, and a function in it."""
    return ":" in name or name.endswith(".py")


def known_workload(name: str) -> str:
    if not (name in (AUTO, *WORKLOADS) or is_own(name)):
        raise UserError(unknown_name("workload", name, WORKLOADS))
    return name


@dataclass(frozen=True)
class DataSettings:
    """Strategy, model and data."""

    choice: str = _data("", "the strategy to train with", metavar="NAME", resume=MAY_DIFFER)
    task: str = _data(
        CLASSIFICATION,
        "the task of --model on --dataset (docs/own-workload.md)",
        choices=TASKS,
        affects=EVERYTHING,
    )
    workload: str = _data(
        AUTO,
        "model and data to train on, or FILE.py:FUNCTION of your own (docs/own-workload.md); auto is 'hub' or 'yelp' "
        "with --model or --dataset, else 'sample-lm' with --task causal-lm, 'yelp' with CUDA and 'sample' without",
        normal=known_workload,
        metavar="NAME",
        excludes=(UNEVEN_EXPERTS,),
        affects=EVERYTHING,
        trials=("auto", "mlp", "mine.py:build"),
    )
    model: str | None = _data(
        None,
        "hub id or local save_pretrained folder; for causal-lm also a folder with only a config.json",
        affects=EVERYTHING,
    )
    dataset: str | None = _data(
        None,
        "hub id, save_to_disk folder, or parquet, CSV, JSON, JSON-lines or text file or folder; with texts and labels, "
        "for causal-lm texts, or columns prompt and completion",
        affects=(TIME, LOSS),
    )
    text_column: str = _data("text", "the column of --dataset that has the text", affects=(TIME, LOSS))
    label_column: str = _data(
        "label",
        "the column of --dataset that has the labels, names or whole numbers",
        affects=(LOSS,),
    )
    streaming: bool = _data(
        False, "causal-lm: read no more of --dataset than --train-samples and --eval-samples need", resume=None
    )
    sequence_length: int | None = _data(
        None,
        "causal-lm: tokens in a sequence (default: 128 for sample-lm, else 1024 or the model's limit)",
        at_least=2,
        affects=(TIME, MEMORY, LOSS),
    )
    train_samples: int | None = _data(None, "training samples to use (default: set by the workload)")
    eval_samples: int | None = _data(None, "held-out samples to use (default: set by the workload)", resume=None)
    no_eval: bool = _data(False, "do not evaluate on held-out samples", resume=None)
    depth: int = _data(40, "layers of workload mlp")
    width: int = _data(4096, "features of each layer of workload mlp")
    lora_rank: int | None = _data(
        None,
        "freeze the model, and train LoRA adapters of this rank beside its linear layers (default: train the model)",
        excludes=(TENSOR_PARTS.because("whose plans name no adapters"), STAGES, EXPERTS),
        affects=EVERYTHING,
    )
    lora_alpha: int | None = _data(
        None,
        "the adapters' output is multiplied by --lora-alpha over --lora-rank (default: twice --lora-rank)",
        needs=(given("lora_rank"),),
        affects=(LOSS,),
    )


@dataclass(frozen=True)
class BatchSettings:
    """How many samples a step takes, and how many steps there are."""

    global_batch_size: int = _batch(
        8,
        "samples in an optimizer step: micro-batch x --grad-accum-steps x ranks that see different samples; "
        "if it is not given, the nearest that divides among them",
        resume=MUST_EQUAL,
        affects=(TIME, MEMORY, LOSS),
    )
    grad_accum_steps: int = _batch(
        2,
        "micro-batches whose gradients a rank accumulates before the optimizer step",
        affects=(TIME, MEMORY, TRAFFIC),
    )
    epochs: int | None = _batch(
        None,
        "passes over the training samples (default: 1, or as many as --max-steps needs)",
    )
    max_steps: int | None = _batch(None, "stop after this many optimizer steps (default: whole epochs)")

    def nearest_batch(self, data_parallel_size: int) -> int:
        """`global_batch_size`, or the nearest that divides into whole micro-batches."""
        unit = self.grad_accum_steps * data_parallel_size
        return max(1, round(self.global_batch_size / unit)) * unit

    def micro_batch_size(self, data_parallel_size: int) -> int:
        """Samples in one micro-batch of one rank. `data_parallel_size`: ranks that see different samples."""
        unit = self.grad_accum_steps * data_parallel_size
        if self.global_batch_size % unit:
            below = self.global_batch_size // unit * unit
            nearest = " or ".join(str(size) for size in (below, below + unit) if size)
            raise UserError(
                f"--global-batch-size {self.global_batch_size} does not divide by --grad-accum-steps "
                f"{self.grad_accum_steps} x {data_parallel_size} ranks = {unit}; the nearest that does: {nearest}"
            )
        return self.global_batch_size // unit

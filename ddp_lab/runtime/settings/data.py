"""What is trained, and on what."""

from dataclasses import dataclass
from functools import partial

from ddp_lab.runtime.settings.field import flag
from ddp_lab.strategy.options import AUTO

CLASSIFICATION, CAUSAL_LM = "classification", "causal-lm"
TASKS = (CLASSIFICATION, CAUSAL_LM)

_data = partial(flag, "model and data")


@dataclass(frozen=True)
class DataSettings:
    """Strategy, model and data."""

    choice: str = _data("", "the strategy to train with", metavar="NAME")
    task: str = _data(CLASSIFICATION, "what --model learns from --dataset (docs/language-models.md)", choices=TASKS)
    workload: str = _data(
        AUTO,
        "model and data to train on, or FILE.py:FUNCTION of your own (docs/own-workload.md); auto is 'hub' or 'yelp' "
        "with --model or --dataset, else 'sample-lm' with --task causal-lm, 'yelp' with CUDA and 'sample' without",
        metavar="NAME",
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
    no_eval: bool = _data(False, "do not evaluate on held-out samples")
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


def is_own(name: str) -> bool:
    """Whether `--workload` names a file of the user, and a function in it."""
    return ":" in name or name.endswith(".py")

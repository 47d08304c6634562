"""Fine-tuning with LoRA (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models"), by `peft`.

The model is frozen. Beside each of its linear layers stand two small trainable matrices, of rank r. A classifier's head
trains too.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.groups import from_rank0
from ddp_lab.strategy.modules import names_alone
from ddp_lab.strategy.strategy import Strategy

TASKS = {"ForSequenceClassification": "SEQ_CLS", "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM"}
"""By how the class of a model is called, peft's task type."""


def with_adapters(workload: Workload, config: RunConfig) -> Workload:
    return replace(workload, model=adapted(workload.model, config.workload, config.lora_rank or 0, config.lora_alpha))


def adapted(model: nn.Module, name: str, rank: int, alpha: int | None = None) -> nn.Module:
    """The model of the workload `name` with adapters, and the rest frozen."""
    if find_spec("peft") is None:
        raise UserError("--lora-rank: peft is not installed; run: uv sync --extra lora")
    from peft import LoraConfig, get_peft_model
    from transformers import PreTrainedModel

    kind = type(model).__name__
    task = next((task for ending, task in TASKS.items() if kind.endswith(ending)), None)
    if task is None or not isinstance(model, PreTrainedModel):
        raise UserError(
            f"--lora-rank: the model of workload {name} is of class {kind}; adapters are for text "
            "classifiers and causal language models of transformers"
        )
    settings = LoraConfig(r=rank, lora_alpha=alpha or 2 * rank, target_modules="all-linear", task_type=task)
    adapters: nn.Module = get_peft_model(model, settings)
    return adapters


def save_adapter(strategy: Strategy, folder: Path) -> None:
    """Write what has been trained, whole or not at all, for `peft.PeftModel.from_pretrained`. Collective."""
    state = strategy.full_state_dict()

    def write() -> None:
        try:
            with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
                unfinished = Path(temporary) / folder.name
                with names_alone():
                    strategy.module.save_pretrained(unfinished, state_dict=state, save_embedding_layers=False)  # type: ignore[operator]
                unfinished.rename(folder)
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror or error}") from error

    from_rank0(write)

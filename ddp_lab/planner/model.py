"""A model of a plan: built without weights, with batches to match.

The model is what the runner trains, in fp32: a classifier with as many labels as reviews have stars
(`ddp_lab.runtime.data.text`), on batches of token ids that are padded to one length; or a causal language model
(`ddp_lab.runtime.data.causal_lm`), on whole sequences of one document. Image models classify ImageNet's pictures.
"""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.lora import adapted
from ddp_lab.runtime.data.samples import STARS
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.data.workloads import build_workload
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.data import CAUSAL_LM, CLASSIFICATION
from ddp_lab.strategy.batches import MicroBatch

TOKENS, IMAGES, SAMPLES = "tokens", "images", "samples"
WORKLOAD = "workload"
"""Instead of a type of transformers' configuration: the model is what a function of the user makes."""
IMAGE_PIXELS, IMAGE_CLASSES = 224, 1000
ATTENTION_DROPOUT = {"attn_pdrop", "attention_dropout"}
"""What configurations call it."""


@dataclass(frozen=True)
class Model:
    """A model, which can be built where tensors hold no data.

    Attributes:
        type: Of transformers' configuration (`model_type`): `llama`, `gpt2`, `resnet`, ...
        config: What differs from that configuration's defaults.
        parameters: Of the published model with its published head; None if nothing is published.
        task: As the runner's `--task`.
        lora_rank: As the runner's.
    """

    name: str
    type: str
    config: Mapping[str, Any]
    parameters: int | None = None
    task: str = CLASSIFICATION
    lora_rank: int | None = None

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def kind(self) -> str:
        """`tokens`, `images` or `samples`: what it takes."""
        return SAMPLES if self.type == WORKLOAD else IMAGES if self.type == "resnet" else TOKENS

    def build(self) -> nn.Module:
        """The module that the runner would train, in training mode, on the device and in the mode of the caller. But
        attention has no dropout: kernels of GPUs keep nothing for it, and those that run without data keep all
        scores."""
        if self.lora_rank:
            return copied(with_adapters(self))
        return copied(workload_of(self.name).model) if self.kind == SAMPLES else self._of_transformers()

    def _of_transformers(self) -> nn.Module:
        import transformers

        maker: Any
        if self.kind == IMAGES:
            maker, config = transformers.AutoModelForImageClassification, self.configuration(num_labels=IMAGE_CLASSES)
        elif self.task == CAUSAL_LM:
            maker, config = transformers.AutoModelForCausalLM, self.configuration(use_cache=False)
        else:
            maker = transformers.AutoModelForSequenceClassification
            config = self.configuration(num_labels=STARS, pad_token_id=0, use_cache=False)
        for name in ATTENTION_DROPOUT & vars(config).keys():
            setattr(config, name, 0.0)
        try:
            return maker.from_config(config, trust_remote_code=False, dtype=torch.float32).train()
        except Exception as error:  # transformers' classes raise anything that their arithmetic leads to
            raise UserError(f"model {self.name}: cannot be built: {first_line(error)}") from error

    @property
    def attention_dropout(self) -> float:
        """Of the configuration, which `build` sets to 0."""
        settings = vars(self.configuration())
        return max((settings[name] for name in ATTENTION_DROPOUT & settings.keys()), default=0.0)

    def configuration(self, **more: Any) -> Any:
        """transformers' configuration of it, or that of the module of a workload, if it has one."""
        if self.kind == SAMPLES:
            return getattr(workload_of(self.name).model, "config", SimpleNamespace())
        from transformers import AutoConfig

        try:
            return AutoConfig.for_model(self.type, **{**self.config, **more})
        except Exception as error:  # as above
            raise UserError(f"model {self.name}: no configuration can be made: {first_line(error)}") from error

    def elements(self) -> int:
        """Parameters of what the runner would train; tied ones count once. Raises as `build`."""
        return sum(parameter.numel() for parameter in skeleton(self).parameters())

    def of_layers(self, count: int) -> "Model":
        """The same with so many layers."""
        config = {name: value for name, value in self.config.items() if name not in ("n_layer", "layer_types")}
        return replace(self, config=config | {"num_hidden_layers": count})

    def micro_batches(self, count: int, samples: int, sequence_length: int) -> Sequence[MicroBatch]:
        """`count` micro-batches of so many samples, on the device and in the mode of the caller. `sequence_length`:
        tokens of a sample, padding included; not used for images."""
        if self.kind == SAMPLES:
            workload = workload_of(self.name)
            chosen = [workload.train[place % len(workload.train)] for place in range(samples)]
            return [workload.collate(chosen) for _ in range(count)]
        batch = {"labels": torch.zeros(samples, dtype=torch.long)}
        if self.kind == IMAGES:
            batch["pixel_values"] = torch.zeros(samples, 3, IMAGE_PIXELS, IMAGE_PIXELS)
        elif self.task == CAUSAL_LM:
            batch = dict.fromkeys(("input_ids", "labels"), torch.ones(samples, sequence_length, dtype=torch.long))
        else:
            tokens = torch.ones(samples, sequence_length, dtype=torch.long)
            # Real samples differ in length, so attention needs a mask, which it does not for a single sample.
            tokens[1:, -1] = 0
            batch |= {"input_ids": tokens, "attention_mask": tokens.clone()}
        return [{name: tensor.clone() for name, tensor in batch.items()} for _ in range(count)]

    def require_length(self, sequence_length: int) -> None:
        """Refuse samples of more tokens than the model has positions."""
        if self.kind != TOKENS:
            return
        most = getattr(self.configuration(), "max_position_embeddings", None)
        if most is not None and sequence_length > most:
            raise UserError(f"--sequence-length {sequence_length}: {self.name} has {most} positions; give at most that")


@cache
def skeleton(model: Model) -> nn.Module:
    """The module without memory. Raises as `Model.build`."""
    with torch.device("meta"):
        return model.build()


@cache
def alike_layers(model: Model) -> int:
    """How many layers it has, all alike; 1 if they differ, or if nothing is known of them."""
    if model.kind != TOKENS:
        return 1
    settings = model.configuration()
    count = getattr(settings, "num_hidden_layers", 1)
    stacks = [part for part in skeleton(model).modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    forms = {tuple(weight.shape for weight in layer.parameters()) for stack in stacks for layer in stack}
    types = {*(getattr(settings, "layer_types", None) or ())}  # attention to all tokens, or to a window of them
    return count if len(forms) == 1 and len(types) < 2 else 1


@cache
def workload_of(name: str) -> Workload:
    """What the runner trains with this `--workload`, tried as it tries it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.dict(os.environ, LOCAL_RANK="0"):
            return build_workload(RunConfig.of(workload=name, device="cpu"))
    finally:
        dist.destroy_process_group()


@cache
def with_adapters(model: Model) -> nn.Module:
    """The model with LoRA, without memory: peft moves what it makes, which tensors of a simulation cannot."""
    with _disable_current_modes(), torch.device("meta"):
        return adapted(replace(model, lora_rank=None).build(), model.name, model.lora_rank or 0)


def copied(module: nn.Module) -> nn.Module:
    """A copy whose parameters and floating-point buffers are made in the mode and on the device of the caller."""
    device, memo = torch.get_default_device(), dict[int, Any]()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() or tensor.is_meta:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return deepcopy(module, memo).train()


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

"""Models by name, from a local `config.json`, or from a few sizes."""

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ddp_lab.planner.model import WORKLOAD, Model
from ddp_lab.runtime.cli import unknown_name
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.causal_lm import sample_model
from ddp_lab.runtime.data.workloads import BUILT_IN_LANGUAGE
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.data import CAUSAL_LM, is_own
from ddp_lab.untrusted import settings_in

TABLE = Path(__file__).with_name("models.toml")
MOST_PARAMETERS, MOST_LAYERS, MOST_WIDTH = 10**13, 10_000, 1_000_000
"""Larger numbers are taken for a mistake; building such models would take hours."""
DEFAULT_VOCABULARY = 49_152
"""SmolLM2's, for models by sizes."""
HEAD_WIDTH = 64
NOT_OF_THE_SHAPE = (
    "model_type",
    "architectures",
    "num_labels",
    "id2label",
    "label2id",
    "problem_type",
    "torch_dtype",
    "dtype",
    "quantization_config",
)
"""Entries of a `config.json` that are not taken over."""


@cache
def table() -> dict[str, Model]:
    """The built-in models, by name on the hub."""
    return {
        name: Model(name, entry["type"], entry["config"], entry["parameters"])
        for name, entry in tomllib.loads(TABLE.read_text()).items()
    }


def find(name: str) -> Model:
    """A built-in model (its hub name, with or without owner, in any case, `-Instruct` or not; or its beginning up to a
    hyphen, if no other model's is the same), that of a built-in workload, or one that a local `config.json` describes
    (the file, or a folder that holds it)."""
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        return from_file(path)
    plain_name = plain(name)
    if name in BUILT_IN_LANGUAGE:
        return of_workload(name)
    if is_own(name):
        return checked(Model(name, WORKLOAD, {}))
    spellings = {plain(hub_name).partition("/")[2]: model for hub_name, model in table().items()}
    spellings |= {plain(hub_name): model for hub_name, model in table().items()}
    if plain_name in spellings:
        return spellings[plain_name]
    longer = {model.name: model for spelling, model in spellings.items() if spelling.startswith(f"{plain_name}-")}
    if len(longer) == 1:
        return longer.popitem()[1]
    near = unknown_name("model", name, [*table(), *(hub_name.partition("/")[2] for hub_name in table())])
    raise UserError(f"{near} Or give a local folder with a config.json, or --d-model, --d-ff and --layers")


def of_workload(name: str) -> Model:
    """The language model of one of `BUILT_IN_LANGUAGE`."""
    with torch.device("meta"):
        configuration: Any = sample_model(RunConfig(workload=name)).config
    config = {key: value for key, value in configuration.to_diff_dict().items() if key not in NOT_OF_THE_SHAPE}
    return Model(name, configuration.model_type, config, task=CAUSAL_LM)


def plain(name: str) -> str:
    """A name in lower case, without the end that marks a fine-tuned model."""
    return re.sub(r"-(instruct|base|it)$", "", name.lower())


def from_file(path: Path) -> Model:
    """The model that a local `config.json` describes. Only that file is read, and no code that it names is run."""
    file = path / "config.json" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise UserError(f"--model {path}: no config.json in this folder")
    content = settings_in(file, "--model", json.loads)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UserError(f"--model {file}: has no model_type; give a config.json that save_pretrained has written")
    if "auto_map" in content:
        raise UserError(f"--model {file}: its model is code of its own (auto_map), which is never run here")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if content["model_type"] not in CONFIG_MAPPING_NAMES:
        raise UserError(f"--model {file}: {unknown_name('model_type', content['model_type'], CONFIG_MAPPING_NAMES)}")
    config = {name: value for name, value in content.items() if name not in NOT_OF_THE_SHAPE}
    return checked(Model(str(path), content["model_type"], config))


def from_sizes(
    d_model: int,
    d_ff: int,
    layers: int,
    heads: int | None = None,
    kv_heads: int | None = None,
    vocab: int | None = None,
) -> Model:
    """A Llama of these sizes; by default heads have 64 features, `kv_heads` is `heads`, and `vocab` is SmolLM2's."""
    if heads is None:
        if d_model % HEAD_WIDTH:
            raise UserError(f"--d-model {d_model}: not a multiple of {HEAD_WIDTH}, so say --heads")
        heads = d_model // HEAD_WIDTH
    if d_model % heads or d_model // heads % 2:
        raise UserError(f"--heads {heads}: --d-model {d_model} must divide into that many heads of an even width")
    if heads % (kv_heads or heads):
        raise UserError(f"--kv-heads {kv_heads}: must divide --heads {heads}")
    config = {
        "hidden_size": d_model,
        "intermediate_size": d_ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "vocab_size": vocab or DEFAULT_VOCABULARY,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }
    name = f"Llama of {layers} layers, d_model {d_model}, d_ff {d_ff}, {heads} heads, {config['vocab_size']} tokens"
    return checked(Model(name, "llama", config))


def checked(model: Model) -> Model:
    """`model`, built once without memory."""
    config = model.configuration()
    for name, most in (("num_hidden_layers", MOST_LAYERS), ("hidden_size", MOST_WIDTH)):
        value = getattr(config, name, 1)
        if isinstance(value, int) and not 1 <= value <= most:
            raise UserError(f"model {model.name}: {name} {value} must be from 1 to {most}")
    elements = model.elements()
    if elements > MOST_PARAMETERS:
        raise UserError(f"model {model.name}: {elements:.1e} parameters; more than {MOST_PARAMETERS:.0e} are refused")
    return model

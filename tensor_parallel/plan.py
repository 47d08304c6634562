"""Plans: which module of a model is cut in which way, by patterns of names. In a pattern `*` is one part of a name.

`Region` stands where f does. Within it are layers cut by `Column`, and at its end one cut by `Row`, where g is. A
`Column` outside of a region is one by itself.

Plans of transformers' Llama, Mistral, Qwen2 and GPT-2 are here. `read_plan` reads one for another model from a file.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from ddp_lab.runtime.errors import UnsupportedError, UserError
from ddp_lab.untrusted import settings_in


@dataclass(frozen=True)
class Column:
    """A linear layer, whose outputs are cut.

    Attributes:
        heads: The outputs are those of so many heads, each of which stays whole. Default: any output may be cut.
        shares: If there are fewer heads than ranks, several ranks hold the same one. So it is with keys and values.
        parts: The outputs are so many tensors in one, each of which is cut (queries, keys and values).
    """

    heads: int | None = None
    shares: bool = False
    parts: int = 1


@dataclass(frozen=True)
class Row:
    """A linear layer, whose inputs are cut as the outputs of a `Column` with as many heads."""

    heads: int | None = None


@dataclass(frozen=True)
class Region:
    """What each rank computes with its part: attention, or an MLP. `attributes` of the module are set."""

    attributes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Embedding:
    """A lookup table, whose rows are cut."""


@dataclass(frozen=True)
class Head:
    """A linear layer from hidden states to a vocabulary, whose outputs are cut. The loss is computed from the parts."""


@dataclass(frozen=True)
class Shared:
    """A module whose parameters all ranks hold, and use on different heads, or on different tokens.

    Attributes:
        of_tokens: On different tokens: with sequence parallelism alone.
        merges: Sequence parallelism ends after the module: the model reshapes the hidden states next.
    """

    of_tokens: bool = False
    merges: bool = False


@dataclass(frozen=True)
class Split:
    """The first module whose tokens sequence parallelism cuts."""


@dataclass(frozen=True)
class Merge:
    """The first module after these, if it is no `Head`."""


Style = Column | Row | Region | Embedding | Head | Shared | Split | Merge
Plan = Mapping[str, Style]
STYLES: Mapping[str, type[Style]] = {
    kind.__name__.lower(): kind for kind in (Column, Row, Region, Embedding, Head, Shared, Split, Merge)
}


def llama(config: Any, size: int) -> Plan:
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    groups = max(queries // size, 1) // max(keys // size, 1)
    return {
        "model.embed_tokens": Embedding(),
        "model.layers.0": Split(),
        "model.layers.*.input_layernorm": Shared(of_tokens=True),
        "model.layers.*.self_attn": Region({"num_key_value_groups": groups}),
        "model.layers.*.self_attn.q_proj": Column(queries),
        "model.layers.*.self_attn.k_proj": Column(keys, shares=True),
        "model.layers.*.self_attn.v_proj": Column(keys, shares=True),
        "model.layers.*.self_attn.o_proj": Row(queries),
        "model.layers.*.post_attention_layernorm": Shared(of_tokens=True),
        "model.layers.*.mlp": Region(),
        "model.layers.*.mlp.gate_proj": Column(),
        "model.layers.*.mlp.up_proj": Column(),
        "model.layers.*.mlp.down_proj": Row(),
        "model.norm": Shared(of_tokens=True),
        "lm_head": Head(),
        "score": Merge(),
    }


def gpt2(config: Any, size: int) -> Plan:
    heads = config.num_attention_heads
    return {
        "transformer.wte": Embedding(),
        "transformer.h.0": Split(),
        "transformer.h.*.ln_1": Shared(of_tokens=True),
        "transformer.h.*.attn": Region({"split_size": config.hidden_size // size}),
        "transformer.h.*.attn.c_attn": Column(heads, parts=3),
        "transformer.h.*.attn.c_proj": Row(heads),
        "transformer.h.*.ln_2": Shared(of_tokens=True),
        "transformer.h.*.mlp": Region(),
        "transformer.h.*.mlp.c_fc": Column(),
        "transformer.h.*.mlp.c_proj": Row(),
        "transformer.ln_f": Shared(of_tokens=True, merges=True),
        "lm_head": Head(),
    }


BY_MODEL_TYPE: Mapping[str, Callable[[Any, int], Plan]] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "gpt2": gpt2,
}


def plan_of(module: nn.Module, size: int) -> Plan:
    """The plan of a model of transformers, to cut it over `size` ranks."""
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", type(module).__name__)
    if kind not in BY_MODEL_TYPE:
        types = ", ".join(BY_MODEL_TYPE)
        raise UnsupportedError(f"--mesh with tp: no plan for {kind}, only for {types}; give one with --plan FILE.toml")
    plan, names = BY_MODEL_TYPE[kind](config, size), [name for name, _ in module.named_modules()]
    return {pattern: style for pattern, style in plan.items() if any(matches(name, pattern) for name in names)}


STAGES = "stages"
"""The key of a plan under which stages of a pipeline stand (`pipeline_parallel`)."""


def read_plan(path: Path) -> Plan:
    """A plan from a TOML file: `"layers.*.wq" = "column"`, or `{ style = "column", heads = 8 }`."""
    content = settings_in(path, "--plan")
    return {pattern: _style(path, pattern, value) for pattern, value in content.items() if pattern != STAGES}


def _style(path: Path, pattern: str, value: Any) -> Style:
    settings = dict(value) if isinstance(value, dict) else {"style": value}
    kind = settings.pop("style", None)
    if kind not in STYLES:
        raise UserError(f'--plan {path}: "{pattern}": style must be one of {", ".join(STYLES)}, not {kind!r}')
    unknown = settings.keys() - STYLES[kind].__dataclass_fields__.keys()
    if unknown:
        raise UserError(f'--plan {path}: "{pattern}": {kind} has no {", ".join(sorted(unknown))}')
    try:
        return msgspec.convert(settings, STYLES[kind])
    except msgspec.ValidationError as error:
        raise UserError(f'--plan {path}: "{pattern}": {error}') from error


def matched(module: nn.Module, plan: Plan) -> dict[str, Style]:
    """The style of each module that the plan names."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for pattern in plan:
        if not any(matches(name, pattern) for name in names):
            raise UnsupportedError(f'--plan: "{pattern}" matches no module of {type(module).__name__}')
    styles_by_name: dict[str, Style] = {}
    for name in names:
        styles = [style for pattern, style in plan.items() if matches(name, pattern)]
        if len(styles) > 1:
            raise UnsupportedError(f"--plan: {name} is matched by several patterns")
        if styles:
            styles_by_name[name] = styles[0]
    return styles_by_name


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` names the module: part by part, where `*` is any."""
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(w in ("*", p) for p, w in zip(parts, pattern_parts, strict=True))


def enclosing(name: str, names: Iterable[str]) -> str | None:
    """Which of `names` holds the module `name`."""
    return next((holder for holder in names if name.startswith(f"{holder}.")), None)

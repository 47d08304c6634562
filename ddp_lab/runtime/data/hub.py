"""Models and data sets by hub id or local path, through `transformers` and `datasets`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from ddp_lab.runtime.data.found import FILE_FORMATS
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.watch.phases import BUILDING, during

MODEL = "HuggingFaceTB/SmolLM2-360M-Instruct"
DATASET = "Yelp/yelp_review_full"
HELD_OUT_SPLITS = ("test", "validation")
LISTED = 10
"""Labels that a message names."""
Loaded = TypeVar("Loaded")
Labels = dict[Any, str]
"""In the order of the classes: values as the data have them, names as a person reads them."""


def labels_of(data: Any, column: str, where: str) -> Labels:
    """Of a column of a `datasets.Dataset`: all labels that a ClassLabel names, or else the distinct values, sorted."""
    from datasets import ClassLabel, Value

    feature = data.features[column]
    if isinstance(feature, ClassLabel):
        return dict(enumerate(feature.names))
    if not isinstance(feature, Value):
        raise UserError(f"{where}: column {column} holds {feature}; a label is a name or a whole number")
    values = sorted(value for value in data.unique(column) if value is not None)
    if fractions := [value for value in values if isinstance(value, float) and not value.is_integer()]:
        raise UserError(f"{where}: column {column} has {fractions[0]}; a label is a name or a whole number")
    if len(values) < 2:
        raise UserError(f"{where}: column {column} has {in_line(values)}; classification needs two labels or more")
    return {value: str(int(value) if isinstance(value, float) else value) for value in values}


def in_order_of(labels: Labels, head: Mapping[str, int]) -> Labels:
    """In the order of a model's head if that has the same names, so that a trained head is kept as it is."""
    if set(head) != set(labels.values()):
        return labels
    return dict(sorted(labels.items(), key=lambda label: head[label[1]]))


def in_line(values: Iterable[Any]) -> str:
    """The values, or the first few of them."""
    texts = list(map(repr, values))
    more = f" and {len(texts) - LISTED} others" if len(texts) > LISTED else ""
    return (", ".join(texts[:LISTED]) or "no label") + more


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model. If it has no padding token, it pads with its end-of-sequence token."""
    from transformers import AutoTokenizer

    tokenizer = _load("model", name, lambda: AutoTokenizer.from_pretrained(name, trust_remote_code=False))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise UserError(f"--model {name}: its tokenizer has neither a padding nor an end-of-sequence token")
    return tokenizer


@during(BUILDING)
def load_classifier(name: str, tokenizer: Any, labels: Sequence[str]) -> nn.Module:
    """A pretrained model in fp32 with a sequence-classification head. The head is new if it has none for `labels`."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = _load(
        "model",
        name,
        lambda: AutoModelForSequenceClassification.from_pretrained(
            name,
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            problem_type="single_label_classification",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            trust_remote_code=False,  # without this, transformers prompts the user on the terminal
        ),
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    model.config.use_cache = False
    return model


class LoadedLM(NamedTuple):
    """A causal language model in fp32. `tokenizer` is None if it has none, `is_new` says whether its weights are
    random."""

    model: Any
    tokenizer: Any
    is_new: bool


@during(BUILDING)
def load_causal_lm(name: str) -> LoadedLM:
    """A pretrained causal language model; or one with random weights, if `name` is a folder that has a config.json
    only."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    folder = Path(name).expanduser()
    is_new = folder.is_dir() and not any(any(folder.glob(kind)) for kind in ("*.safetensors", "*.bin"))
    has_tokenizer = not is_new or any(any(folder.glob(kind)) for kind in ("tokenizer*", "vocab*", "*.model"))
    tokenizer = load_tokenizer(name) if has_tokenizer else None
    if tokenizer is not None and tokenizer.eos_token_id is None:
        raise UserError(f"--model {name}: its tokenizer has no end-of-sequence token, which is to end each document")

    def load() -> Any:
        if is_new:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
        return AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )

    model = _load("model", name, load)
    model.config.use_cache = False
    return LoadedLM(model, tokenizer, is_new)


def load_splits(name: str, streams: bool = False) -> dict[str, Any]:
    """Split `train`, or the first one; then split `test` or `validation`, if there is one."""
    splits = _load("data set", name, lambda: _read_splits(name, streams))
    training = "train" if "train" in splits else next(iter(splits))
    held_out = [split for split in HELD_OUT_SPLITS if split in splits and split != training]
    return {split: splits[split] for split in (training, *held_out[:1])}


def label_numbers(name: str) -> dict[str, int]:
    """By label, the number that it has in a saved model's head; transformers' own names if it has none."""
    from transformers import AutoConfig

    return _load("model", name, lambda: AutoConfig.from_pretrained(name, trust_remote_code=False)).label2id


class Columns(NamedTuple):
    text: str = "text"
    label: str = "label"


class LabelledText(NamedTuple):
    train: Any
    evaluation: Any
    labels: Labels


def load_labelled_text(name: str, columns: Columns, train_samples: int, eval_samples: int, seed: int) -> LabelledText:
    """Training and held-out samples of a data set with a column of texts and one of labels, names or whole numbers.

    Held-out samples come from split `test` or `validation`, or from the end of the training data if there is neither.
    Labels are those of all training data, however few samples are used.
    """
    splits = load_splits(name)
    for data in splits.values():
        _require_columns(name, data, columns)
    training, *held_out = splits
    labels = labels_of(splits[training], columns.label, f"--dataset {name}: split {training}")
    order = np.random.default_rng(seed).permutation(len(splits[training])).tolist()
    if not held_out:
        if len(order) < 2:
            raise UserError(f"--dataset {name}: {len(order)} samples; needs at least one to train on and one held out")
        eval_samples = min(eval_samples, max(1, len(order) // 5))
        order, held_out_rows = order[:-eval_samples], order[-eval_samples:]
    else:
        held_out_rows = list(range(min(eval_samples, len(splits[held_out[0]]))))
    parts = []
    for split, rows in ((training, order[:train_samples]), ([*splits][-1], held_out_rows)):
        parts.append(splits[split].select(rows))
        _require_usable(f"--dataset {name}: row {{}} of split {split}", parts[-1], rows, columns, labels)
    return LabelledText(parts[0], parts[1], labels)


def tokenize(data: Any, columns: Columns, labels: Labels, tokenizer: Any, max_tokens: int) -> Sequence[Any]:
    """Replaces all columns by `input_ids`, cut at `max_tokens`, and `labels`. `datasets` caches the result."""
    numbers = {value: number for number, value in enumerate(labels)}

    def encode(batch: Any) -> dict[str, Any]:
        ids = tokenizer(batch[columns.text], truncation=True, max_length=max_tokens)["input_ids"]
        return {"input_ids": ids, "label": [numbers[label] for label in batch[columns.label]]}

    return data.map(encode, batched=True, remove_columns=data.column_names)


def _read_splits(name: str, streams: bool) -> Any:
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    path = Path(name).expanduser()
    if path.is_file():
        kind = FILE_FORMATS[path.suffix]
        return load_dataset(kind, data_files=str(path), streaming=streams, **_WHOLE_FILES.get(kind, {}))
    if path.is_dir():
        saved = any((path / marker).exists() for marker in ("dataset_dict.json", "state.json"))
        if not saved and any(path.rglob("*.txt")):
            return load_dataset("text", data_dir=str(path), streaming=streams, **_WHOLE_FILES["text"])
        data = load_from_disk(str(path)) if saved else load_dataset(str(path), streaming=streams)
        return DatasetDict(train=data) if isinstance(data, Dataset) else data
    return load_dataset(name, streaming=streams)


_WHOLE_FILES = {"text": {"sample_by": "document"}}
"""A file of plain text is one row."""


def _load(noun: str, name: str, load: Callable[[], Loaded]) -> Loaded:
    """Run a library's loading code. Whatever it raises becomes one line that says what to do."""
    try:
        return load()
    except UserError:
        raise
    except Exception as error:  # the libraries raise many kinds, from OSError to pyarrow's own
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        if Path(name).expanduser().exists():
            raise UserError(f"{noun} {name}: cannot be read: {reason}") from error
        raise UserError(
            f"{noun} {name}: cannot be loaded from the hub ({reason}); check the name and the network, give a local "
            "path, or train without either: --workload sample"
        ) from error


def _require_columns(name: str, data: Any, columns: Columns) -> None:
    missing = [column for column in columns if column not in data.column_names]
    if missing:
        raise UserError(
            f"--dataset {name}: no column {' or '.join(missing)} (it has {', '.join(data.column_names)}); name yours "
            "by --text-column and --label-column"
        )


def _require_usable(where: str, data: Any, rows: Sequence[int], columns: Columns, labels: Labels) -> None:
    """Check each sample. `where` takes the number of a row, counted from 1."""
    for row, text, label in zip(rows, data[columns.text], data[columns.label], strict=True):
        if not isinstance(text, str):
            raise UserError(f"{where.format(row + 1)} has {text!r} in column {columns.text}; every row needs a text")
        if not text.strip():
            raise UserError(f"{where.format(row + 1)} has an empty text in column {columns.text}")
        if label not in labels:
            raise UserError(
                f"{where.format(row + 1)} has label {label!r} in column {columns.label}; training data have "
                f"{in_line(labels)}"
            )

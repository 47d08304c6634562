"""Models that the planner knows by name or by a local configuration, and their batches."""

import json
import re
from pathlib import Path

import pytest

from planner import models
from training.errors import UserError


def test_names_of_models() -> None:
    for name in ("SmolLM2-360M", "smollm2-360m-instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"):
        assert models.find(name) is models.table()["HuggingFaceTB/SmolLM2-360M"]


def test_local_configuration(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"vocab_size": 90}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16", "architectures": ["X"], **shape}))
    found = models.find(str(tmp_path))
    attention, feed_forward = 4 * 64 * 64, 3 * 64 * 96
    assert found.elements() == 90 * 64 + 2 * (attention + feed_forward + 2 * 64) + 64 + 5 * 64
    assert models.find(str(file)).elements() == found.elements()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "cannot be read"),
        ("[]", "has no model_type"),
        ('{"model_type": "lama"}', "unknown model_type 'lama'; did you mean"),
        ('{"model_type": "llama", "auto_map": {"AutoModel": "evil.py--X"}}', "which is never run here"),
        ('{"model_type": "llama", "num_hidden_layers": 100000000}', "num_hidden_layers 100000000 must be from 1"),
        ('{"model_type": "vit_mae"}', "cannot be built"),
        (None, "no config.json in this folder"),
    ],
)
def test_local_configurations_that_are_none(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(expected)):
        models.find(str(tmp_path))


def test_batches_are_those_of_the_runner() -> None:
    first, _ = models.find("SmolLM2-135M").micro_batches(2, 3, 7)
    shapes = {name: tuple(tensor.shape) for name, tensor in first.items()}
    assert shapes == {"input_ids": (3, 7), "attention_mask": (3, 7), "labels": (3,)}
    assert first["attention_mask"].sum() == 3 * 7 - 2  # all but the first are padded
    (image,) = models.find("resnet-50").micro_batches(1, 2, 7)
    assert image["pixel_values"].shape == (2, 3, 224, 224)

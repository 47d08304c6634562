"""Nothing that a user gives or downloads is run: no pickle, no eval, no code of a model's author."""

import ast
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from training.errors import UserError
from training.hub import load_classifier

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    ("eval",),
    ("exec",),
    ("torch", "load"),
    ("pickle", "load"),
    ("pickle", "loads"),
    ("marshal", "loads"),
    ("yaml", "load"),
    ("joblib", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("pd", "read_pickle"),
    ("os", "system"),
}
"""Calls that run what they read. A method such as `module.eval()` has another name before the point."""


def sources() -> list[Path]:
    folders = ("training", "ddp", "sharding", "reference", "analysis", "benchmarks", "scripts", "doctor")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [*found, *ROOT.glob("main_*.py")]


def call_name(call: ast.Call) -> tuple[str, ...]:
    if isinstance(call.func, ast.Name):
        return (call.func.id,)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        return (call.func.value.id, call.func.attr)
    return ()


def test_no_source_runs_what_it_reads() -> None:
    assert len(sources()) > 50
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                assert call_name(node) not in FORBIDDEN, f"{path}:{node.lineno}"
                trusted = [word for word in node.keywords if word.arg in ("trust_remote_code", "shell")]
                assert not trusted, f"{path}:{node.lineno}"


class Planted:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["PLANTED"],))


def test_a_model_that_is_a_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    monkeypatch.setenv("PLANTED", str(tmp_path / "ran"))
    LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Planted()}))
    with pytest.raises(UserError, match="no file named model"):
        load_classifier(str(tmp_path), tokenizer=None, labels=5)
    assert not (tmp_path / "ran").exists()

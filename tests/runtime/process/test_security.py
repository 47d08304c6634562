"""Nothing that a user gives or downloads is run: no pickle, no eval, no code of a model's author."""

import ast
import json
import os
import pickle
from pathlib import Path

import pytest

from ddp_lab.runtime.data.hub import load_classifier, load_tokenizer
from ddp_lab.runtime.errors import UserError
from tests.tables import each_row

ROOT = Path(__file__).parents[3]
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


FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "runpy"}
NOT_OURS = {"tests", ".venv"}


def sources():
    """All Python files of the project but its tests, whatever folders are added."""
    folders = [path for path in ROOT.iterdir() if (path / "__init__.py").exists() and path.name not in NOT_OURS]
    paths = [path for folder in [*folders, ROOT / "scripts"] for path in folder.rglob("*.py")]
    return [*paths, *ROOT.glob("*.py")]


def call_name(call):
    if isinstance(call.func, ast.Name):
        return (call.func.id,)
    if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        return (call.func.value.id, call.func.attr)
    return ()


def test_no_source_runs_what_it_reads():
    folders = {path.relative_to(ROOT).parts[0] for path in sources()}
    strategies = {"ddp", "sharding", "reference"}
    strategies |= {f"{kind}_parallel" for kind in ("tensor", "pipeline", "context", "expert")}
    assert folders >= {"ddp_lab", "benchmarks", "scripts"} | strategies
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            problem = problem_in(node)
            assert problem is None, f"{path}:{node.lineno}: {problem}"  # type: ignore[attr-defined]


def problem_in(node):
    """Why a line would run what it reads, if it would."""
    if isinstance(node, ast.Call):
        if call_name(node) in FORBIDDEN:
            return "runs what it reads"
        for word in node.keywords:
            if word.arg in ("trust_remote_code", "shell", "allow_pickle") and not is_false(word.value):
                return f"{word.arg} is not False"
    names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
    forbidden = [name for name in names if name.split(".")[0] in FORBIDDEN_MODULES]
    return f"imports {forbidden[0]}" if forbidden else None


def is_false(node):
    return isinstance(node, ast.Constant) and node.value is False


class PlantedPickle:
    def __reduce__(self):
        return (os.mkdir, (os.environ["PLANTED"],))


def test_a_model_that_is_a_pickle_is_refused(tmp_path, monkeypatch):
    from transformers import LlamaConfig

    monkeypatch.setenv("PLANTED", str(tmp_path / "ran"))
    LlamaConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        tmp_path
    )
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": PlantedPickle()}))
    with pytest.raises(UserError, match=r"no file named model\.safetensors"):
        load_classifier(str(tmp_path), tokenizer=None, labels=list("01234"))
    assert not (tmp_path / "ran").exists()


@each_row("part", ["model", "tokenizer"])
def test_code_of_a_model_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch, part):
    """`transformers` would ask on the terminal, of every rank, and run it after a `y`."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    classes = {"AutoModelForSequenceClassification": "planted.Model", "AutoTokenizer": ["planted.Tokenizer", None]}
    config = {"model_type": "unknown-model", "auto_map": {"AutoConfig": "planted.Config", **classes}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": classes}))
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UserError, match="cannot be read"):
        load_classifier(str(tmp_path), None, 5) if part == "model" else load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()

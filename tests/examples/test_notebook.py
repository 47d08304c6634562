"""The notebook for one GPU runs on a CPU. On a GPU its flags are others."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import nbformat
import pytest
from nbclient import NotebookClient

import ddp
from ddp_lab.runtime.flags import parse_config

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "one_gpu.ipynb"


def test_flags_go_with_the_gpu():
    """The cell that asks torch, with the answers of a CPU, a T4 and an H100."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") for cell in cells), "it is kept without outputs"
    (code,) = (cell.source for cell in cells if "capability" in cell.source)
    for answer, precision, shares in (("0", "fp32", False), ("7", "fp16", True), ("9", "bf16", True)):
        names = {}
        with mock.patch.object(subprocess, "run", lambda *_, answer=answer, **__: mock.Mock(stdout=answer)):
            exec(code, {"subprocess": subprocess}, names)
        config = parse_config("", ddp.REGISTRY, arguments=["--ddp-choice", "flat_ddp", *names["flags"].split()])
        assert (config.strategy.precision, config.share_gpu) == (precision, shares)


@pytest.mark.slow
def test_it_runs_on_a_cpu(tmp_path, monkeypatch):
    """As a newcomer's Jupyter runs it, in a folder of its own; uv takes the environment of the tests."""
    (tmp_path / "examples").mkdir()
    for name in ("main_ddp.py", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.setenv("UV_NO_SYNC", "1")
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", sys.prefix)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=280, resources={"metadata": {"path": tmp_path / "examples"}}).execute()
    outputs = [output for cell in notebook.cells[1::2] for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert "--workload digits" in text and "7 of 7 strategies" in text
    pages = [output.data["text/html"] for output in outputs if "data" in output]
    assert len(pages) == 2 and all(page.count("<iframe srcdoc=") == 1 and "Plotly" in page for page in pages)
    assert "pytorch_ddp" in pages[0] and "bucket_ddp_async" in pages[1]

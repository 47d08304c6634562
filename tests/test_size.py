"""Size is a feature: tests/size.toml says how many tokens the project may have."""

import ast
import io
import subprocess
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


def tokens_of(source):
    """The number of Python tokens without comments, docstrings and line breaks, so that neither formatting nor deleting
    a docstring makes it smaller."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in LAYOUT for token in tokens) - sum(
        ast.get_docstring(node, clean=False) is not None for node in nodes
    )


def test_tokens():
    """Counts the files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True)
    names = [name for name in listed.stdout.strip("\0").split("\0") if name and (ROOT / name).exists()]
    if not names:
        pytest.skip("no git checkout")
    sizes = {"without_tests": 0, "tests": 0}
    for name in names:
        sizes["tests" if name.startswith("tests/") else "without_tests"] += tokens_of((ROOT / name).read_text())
    allowed = tomllib.loads((ROOT / "tests" / "size.toml").read_text())
    too_large = {room: f"{size} tokens of {allowed[room]}" for room, size in sizes.items() if size > allowed[room]}
    assert not too_large

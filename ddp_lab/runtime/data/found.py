"""Whether what a command line names is there: a file of the user, a model, data. Imports nothing heavy: it is asked
before torch is imported."""

import ast
from pathlib import Path

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.settings.data import is_own

FILE_FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".txt": "text"}


def require_found(config: RunConfig) -> None:
    """Check what `config` names on this machine's disk. What may be on the hub is not looked for."""
    if is_own(config.workload):
        require_function(config.workload)  # what it makes of the other names is its own affair
        return
    if name := config.model:
        path = Path(name).expanduser()
        if path.is_dir() and not (path / "config.json").exists():
            raise UserError(f"--model {name}: no config.json in this folder; give one that save_pretrained has written")
        if not path.is_dir() and _looks_local(name):
            raise UserError(f"--model {name}: no such folder")
    if name := config.dataset:
        path = Path(name).expanduser()
        if path.is_file() and path.suffix not in FILE_FORMATS:
            raise UserError(f"--dataset {name}: unknown file type; takes {', '.join(FILE_FORMATS)}")
        if path.is_file() and not _has_rows(path):
            raise UserError(f"--dataset {name}: the file is empty")
        if path.is_dir() and not any(file.is_file() for file in path.rglob("*")):
            raise UserError(f"--dataset {name}: the folder is empty")
        if not path.exists() and _looks_local(name):
            raise UserError(f"--dataset {name}: no such file or folder")


def require_function(name: str) -> tuple[Path, str]:
    """The file and the function of `FILE.py:FUNCTION`."""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function:
        raise UserError(f"--workload {name}: name a file and a function in it, such as workload.py:build")
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"--workload {name}: no file {path}")
    text = file.read_text(errors="replace")
    if function not in text and "import *" not in text:
        try:
            functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        except (SyntaxError, ValueError):
            return file, function  # Python says what is wrong when it runs the file
        raise UserError(
            f"--workload {name}: no function {function} in it; it has {', '.join(functions) or 'no function'}"
        )
    return file, function


def _has_rows(path: Path) -> bool:
    """Whether there is a line with something in it, after a header. Parquet is not looked into."""
    with path.open("rb") as file:
        lines = (line for line in file if line.strip() not in (b"", b"[]"))
        return sum(1 for _, line in zip(range(2), lines, strict=False)) > (path.suffix == ".csv")


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).suffix in FILE_FORMATS

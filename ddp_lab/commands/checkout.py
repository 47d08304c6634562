"""The folder of the repository, where there is one: an installed wheel has neither benchmarks/ nor tests/."""

from pathlib import Path

from ddp_lab.runtime.cli import exit_with_error

ROOT = Path(__file__).resolve().parents[2]


def require_checkout(command: str) -> None:
    """Leave the process with one line and exit code 2 if there is none."""
    if not (ROOT / "benchmarks").is_dir() or not (ROOT / "tests").is_dir():
        exit_with_error(f"ddp-lab {command} needs the repository: clone it, and run this there with uv run")

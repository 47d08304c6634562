"""Command lines run in the tests' own process, where torch and pandas are imported already."""

import contextlib
import io
import subprocess
import sys
from types import ModuleType
from unittest import mock

from scripts import compare_runs as compare_runs_script


def run_in_process(script: ModuleType, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    """What `python script.py arguments` prints, and its exit code."""
    out, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [f"{script.__name__.rpartition('.')[2]}.py", *arguments]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        try:
            code = script.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())


def compare_runs(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_in_process(compare_runs_script, *arguments)

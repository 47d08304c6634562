"""Command lines run in the tests' own process, where torch and pandas are imported already."""

import contextlib
import io
import subprocess
import sys
from unittest import mock

from scripts import compare_runs as script


def compare_runs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python scripts/compare_runs.py`, with what it prints and its exit code."""
    out, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["compare_runs.py", *arguments]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        try:
            code = script.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())

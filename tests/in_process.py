"""Command lines run in the tests' own process, where torch and pandas are imported already."""

import contextlib
import io
import subprocess
import sys
from inspect import signature
from unittest import mock

from ddp_lab.commands import compare


def run_in_process(script, *arguments, stdin=b""):
    """Output and exit code of a command's `main`, which takes the command line or reads `sys.argv`."""
    out, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", [script.__name__, *arguments]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin))),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        try:
            code = script.main(*[arguments] * len(signature(script.main).parameters))
        except SystemExit as stop:
            code = int(stop.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())


def compare_runs(*arguments):
    return run_in_process(compare, *arguments)

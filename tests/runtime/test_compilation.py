"""`--compile` as a user runs it: with the default backend, in processes of their own."""

import os
import subprocess
import sys

from tests.faults.scenarios import ROOT

NO_COMPILER = """
import torch
from ddp_lab.strategy.compilation import require_compiler
from ddp_lab.runtime.errors import UserError
try: require_compiler(torch.device("cpu"))
except UserError as error: print(error)
"""


def run(*command: str, **environment: str) -> str:
    answer = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=280
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_a_machine_without_a_compiler_is_told_in_one_line() -> None:
    said = run("-c", NO_COMPILER, PATH="")
    assert said.startswith("--compile: on a CPU it needs a C++ compiler") and said.count("\n") == 1

"""`--compile` where there is no compiler."""

import pytest
import torch

from ddp_lab.runtime.errors import UserError
from ddp_lab.strategy.compilation import require_compiler


def test_a_machine_without_a_compiler_is_told_in_one_line(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"^--compile: on a CPU it needs a C"):
        require_compiler(torch.device("cpu"))

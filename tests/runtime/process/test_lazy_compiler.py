"""In a fresh process: training imports torch's compiler only where somebody asks for it."""

import subprocess
import sys

import pytest

from tests.faults.scenarios import ROOT

EAGER = """
import sys, torch
from torch.profiler import profile, ProfilerActivity
from ddp_lab.runtime.process.lazy_compiler import compiler_postponed
with compiler_postponed():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    with profile(activities=[ProfilerActivity.CPU]):
        parameter.grad = torch.ones(2)
        optimizer.step()
    assert not hasattr(sys.modules["torch._dynamo"], "__file__")
    assert not any(name.startswith(("torch._dynamo.", "torch._inductor")) for name in sys.modules)
"""
ASKED = """
    import torch._dynamo.config
    assert torch._dynamo.config.cache_size_limit > 0 and "_inductor" in torch._lazy_modules
    assert torch.compile(lambda x: x + 1, backend="eager")(parameter).tolist() == (parameter + 1).tolist()
    optimizer.step()
"""
AFTERWARDS = """
assert hasattr(sys.modules.get("torch._dynamo", sys), "__file__") or "torch._dynamo" not in sys.modules
assert hasattr(torch._dynamo, "config") and hasattr(torch, "_inductor")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(EAGER, id="eager"),
        pytest.param(EAGER + ASKED + AFTERWARDS, id="asked", marks=pytest.mark.exhaustive),
    ],
)
def test_the_compiler_comes_when_it_is_asked_for(program: str) -> None:
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr

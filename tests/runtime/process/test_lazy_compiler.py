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
    loaded = {name for name in sys.modules if name.startswith(("torch._dynamo.", "torch._inductor"))}
    assert loaded <= {"torch._dynamo._trace_wrapped_higher_order_op"}, loaded
"""
ASKED = """
    from transformers import LlamaConfig, LlamaForCausalLM
    ids = torch.ones(1, 4, dtype=torch.long)
    small = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=8)
    LlamaForCausalLM(small)(input_ids=ids, labels=ids).loss.backward()
    assert not hasattr(sys.modules["torch._dynamo"], "__file__")
    import torch._dynamo.config
    assert torch._dynamo.config.cache_size_limit > 0 and "_inductor" in torch._lazy_modules
    assert torch.compile(lambda x: x + 1, backend="eager")(parameter).tolist() == (parameter + 1).tolist()
    optimizer.step()
    from transformers.integrations.flex_attention import WrappedFlexAttention
    assert WrappedFlexAttention.__init__._torchdynamo_disable
"""
AFTERWARDS = """
assert hasattr(sys.modules.get("torch._dynamo", sys), "__file__") or "torch._dynamo" not in sys.modules
assert hasattr(torch._dynamo, "config") and hasattr(torch, "_inductor")
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(EAGER, id="eager"),
        pytest.param(EAGER + ASKED + AFTERWARDS, id="asked", marks=pytest.mark.slow),
    ],
)
def test_the_compiler_comes_when_it_is_asked_for(program):
    answer = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr

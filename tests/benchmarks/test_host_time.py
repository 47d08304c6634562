"""A budget of the Python that each choice adds to a step: in function calls, which do not depend on the machine."""

import json
import subprocess
import sys

CODE = """
import json, os, sys
from benchmarks.host_time import CHOICES, function_calls, join_pretended_group, plain_loop, steps_of
join_pretended_group()
found = {}
for layers in (4, 12):
    runs = {"loop": plain_loop(layers), **{name: steps_of(name, layers) for name in CHOICES}}
    for name, run in runs.items():
        run()
        found[f"{name} {layers}"] = function_calls(run)
print(json.dumps(found), flush=True)
os._exit(0)
"""
BUDGET = {
    "simple_ddp": 315,
    "simple_ddp_ga": 315,
    "flat_ddp": 270,
    "simple_ddp_hook": 420,
    "simple_ddp_async": 430,
    "bucket_ddp_async": 215,
    "zero1": 140,
    "zero2": 195,
    "zero3": 520,
}
"""Function calls that a block of nine parameters may add, those of its hooks among them."""


def test_each_block_adds_few_calls() -> None:
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240, check=True)
    calls = json.loads(output.stdout.splitlines()[-1])
    added = {
        name: (calls[f"{name} 12"] - calls["loop 12"] - calls[f"{name} 4"] + calls["loop 4"]) / 8
        for name in (*BUDGET, "pytorch_zero3")
    }
    assert all(0 < added[name] <= budget for name, budget in BUDGET.items()), added
    assert added["zero3"] < added["pytorch_zero3"] / 2

"""A budget of the Python that each choice adds to a step: in function calls, which do not depend on the machine."""

import json
import subprocess
import sys

CODE = """
import json, os, sys
from benchmarks.host_time import CHOICES, function_calls, plain_loop, pretended_ranks, steps_of
found = {}
with pretended_ranks():
    for layers in (4, 12):
        runs = {"loop": plain_loop(layers), **{name: steps_of(name, layers) for name in CHOICES}}
        for name, run in runs.items():
            run()
            found[f"{name} {layers}"] = function_calls(run)
print(json.dumps(found), flush=True)
os._exit(0)
"""
BUDGET = {
    "simple_ddp": 475,
    "simple_ddp_ga": 475,
    "flat_ddp": 175,
    "simple_ddp_hook": 565,
    "simple_ddp_async": 575,
    "bucket_ddp_async": 120,
    "zero1": 45,
    "zero2": 75,
    "zero3": 455,
}
"""Function calls that a block of nine parameters may add: for its hooks, its collectives, and the record of these."""


def test_each_block_adds_few_calls() -> None:
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=240, check=True)
    calls = json.loads(output.stdout.splitlines()[-1])
    added = {
        name: (calls[f"{name} 12"] - calls["loop 12"] - calls[f"{name} 4"] + calls["loop 4"]) / 8
        for name in (*BUDGET, "pytorch_zero3")
    }
    assert all(0 < added[name] <= budget for name, budget in BUDGET.items()), added
    assert added["zero3"] < added["pytorch_zero3"] / 5

"""1,024 ranks of 70 B parameters: the planner's bar for time and memory, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, resource, sys, time
from ddp_lab.planner.command import build_parser
from ddp_lab.planner.plan import case_of
from ddp_lab.planner.simulation.simulate import Simulation

case = case_of(build_parser().parse_args(sys.argv[1:])).but(choice="zero3")
simulation = Simulation(case.setting, case.cluster, case.costs)
with simulation.running():
    step = simulation.measure()
print(json.dumps({
    "seconds": time.process_time(),
    "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "elements": case.model.elements(),
    "parameters": step.memory.at_rest["parameters"],
    "gathers": [issued.kind for issued in simulation.observer.issued].count("all_gather"),
}))
"""
FLAGS = "--model Llama-3.1-70B --gpus 128x8xH100 --link nvlink4 --between 8xndr --sequence-length 2048"


@pytest.mark.slow
def test_a_large_cluster_takes_less_than_a_minute_and_four_gigabytes():
    flags = [*FLAGS.split(), "--global-batch-size", "1024", "--grad-accum-steps", "1"]
    command = [sys.executable, "-c", PROGRAM, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seconds"] < 60 and found["bytes"] < 4e9
    assert 4 * found["elements"] / 1024 <= found["parameters"] <= 1.001 * 4 * found["elements"] / 1024 + 512 * 100
    # The root's two parts once; 80 blocks in forward, and all but the last again in backward; the exchange.
    assert found["gathers"] == 2 + 80 + 79 + 1

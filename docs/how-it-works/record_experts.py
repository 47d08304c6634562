"""Records how many tokens each expert of the first layer of `sample-moe` gets in each step, into `expert_load.csv`:

    python docs/how-it-works/record_experts.py

`draw.py` draws it.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
WAYS = {"a term of the loss": [], "--router-bias 0.02": ["--router-bias", "0.02"]}
TRAIN = "--mesh ep=2 --ddp-choice zero1 --workload sample-moe --device cpu --max-steps 60 --no-profile"


def load_by_step(flags: list[str], folder: Path) -> list[list[int]]:
    """Train on two ranks. For each step, the tokens of the global batch that chose each expert."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "main_parallel.py"]
    command = [*start, *TRAIN.split(), *flags, "--output-dir", str(folder)]
    subprocess.run(command, cwd=HERE.parents[1], check=True)
    (record,) = folder.rglob("*.run.json")
    return [first for first, *_ in json.loads(record.read_text())["step_expert_tokens"]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, (HERE / "expert_load.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["way", "step", *(f"expert_{expert}" for expert in range(8))])
        for way, flags in WAYS.items():
            load = load_by_step(flags, Path(folder, way))
            writer.writerows([way, step, *counts] for step, counts in enumerate(load))

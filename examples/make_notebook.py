"""Writes one_gpu.ipynb beside this file, from the texts below: `python examples/make_notebook.py`"""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).with_name("one_gpu.ipynb")
CELLS = [  # a text and code in turn
    """# Two ranks on one GPU

Trains one model with every replicated strategy on two ranks, and shows which was fastest and why. With a GPU both
ranks share it and talk over NCCL; without one they talk over Gloo. [docs/notebook.md](../docs/notebook.md) says what
was tried of this.""",
    """import subprocess
from pathlib import Path

REPOSITORY = ""  # the address of this project, if this notebook is not in a copy of it
folders = [Path.cwd(), *Path.cwd().parents, Path("ddp-lab").resolve()]
if not any((folder / "main_ddp.py").exists() for folder in folders):
    if not REPOSITORY:
        raise SystemExit("write the address of this project behind REPOSITORY in this cell")
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, "ddp-lab"], check=True)
root = next(folder for folder in folders if (folder / "main_ddp.py").exists())
%cd {root}
!command -v uv || pip install --quiet uv""",
    """`uv` makes an environment of its own in `.venv`, with this project's torch; the notebook's own stays as it is.
The first command downloads 3.2 GB, and takes the longest.""",
    """ask = "import torch; print(torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0)"
command = ["uv", "run", "--no-dev", "python", "-c", ask]
capability = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
if capability:
    precision = "bf16" if capability >= 8 else "fp16"  # older GPUs, such as a T4, only emulate bf16
    flags = f"--share-gpu --precision {precision} --workload transformer-small --global-batch-size 16"
else:
    flags = "--workload digits"
print(flags)""",
    """## A sweep

Each strategy trains for 16 steps, of which a few are traced. Without a GPU each rank gets a link of 2.5 Gbit/s, so that
overlap pays.""",
    "!uv run --no-dev ddp-lab sweep ddp 2 --max-steps 16 {flags}",
    "The page that compares them. It needs nothing but itself, so it can be shown here.",
    """import html
import re

from IPython.display import HTML


def show(page):
    script = "<script>" + (root / "reports/plotly.min.js").read_text()
    text = re.sub('<script src="[^"]*">', lambda _: script, (root / "reports" / page).read_text(), count=1)
    return HTML(f'<iframe srcdoc="{html.escape(text)}" width="100%" height="800"></iframe>')


show("compare.html")""",
    """## One strategy

What each rank did in a step of `bucket_ddp_async`: it reduces gradients in buckets while backward goes on.""",
    'show("bucket_ddp_async/summary.html")',
]


def made() -> str:
    """The notebook, without outputs."""
    cells: list[dict[str, object]] = []
    for number, text in enumerate(CELLS):
        own = {"cell_type": "code", "execution_count": None, "outputs": []} if number % 2 else {"cell_type": "markdown"}
        cells.append({**own, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)})
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(made())

"""A workload from a file of the user: it trains, and each mistake in it is one line that says where it is."""

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data import own
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.errors import UserError
from tests.ranks import RankPool
from tests.runtime.test_run import record_of, run_here
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
START = """
import torch
from torch import nn
from types import SimpleNamespace
from ddp_lab.runtime.data.workload import Workload

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x)

def samples(count):
    return [{"x": torch.full((3,), 0.1 * i), "labels": torch.tensor(i % 2)} for i in range(count)]

def mean(output, batch):
    return nn.functional.cross_entropy(output, batch["labels"])

"""
GOOD = "Workload(Model(), samples(12), samples(5), loss=mean, classifies=True)"


def message_here(name: str) -> str | None:
    try:
        own.build(RunConfig.of(workload=name, device="cpu"))
    except UserError as error:
        assert ("Error: " in str(error)) == (error.traceback is not None)
        return str(error)
    return None


def written(folder: Path, code: str) -> str:
    (folder / "mine.py").write_text(START + code)
    return f"{folder / 'mine.py'}:build"


def trained(ranks: RankPool, folder: Path, choice: str, **settings) -> dict[str, Any]:
    ranks.run(2, run_here, {"choice": choice, "output_dir": str(folder), "no_profile": True, **settings})
    return record_of(folder, choice)


def test_the_example_trains_under_every_kind_of_choice(ranks: RankPool, tmp_path):
    settings = {"workload": f"{ROOT}/examples/workload.py:build", "global_batch_size": 40, "epochs": 3}
    records = [trained(ranks, tmp_path, choice, **settings) for choice in ("baseline", "zero3")]
    for record in records:
        assert record["config"]["workload"] == settings["workload"]
        assert record["train_samples"] == 360 and record["eval"]["samples"] == 82
        assert record["train_loss"] == pytest.approx(records[0]["train_loss"], rel=1e-5)
        assert record["eval"]["loss"] < 0.85 * record["train_loss"][0]
        assert record["model_flops_per_sample"] == 2 * (2 * 10 * 64 + 3 * 64 * 1), "the inputs need no gradient"


def test_docs_have_every_field():
    """But those that only the project's own language models set."""
    text = (ROOT / "docs" / "own-workload.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    fields = [field.name for field in dataclasses.fields(Workload)]
    assert set(documented) == set(fields) - {"language", "notes"}


def test_samples_are_cut_and_labels_are_counted(ranks: RankPool, tmp_path):
    name = written(tmp_path, f"def build(config):\n    assert config.lr == 0.5\n    return {GOOD}")
    record = trained(ranks, tmp_path, "zero1", workload=name, lr=0.5, train_samples=9, eval_samples=3)
    assert record["train_samples"] == 9 and record["eval"]["samples"] == 3 and 0 <= record["eval"]["accuracy"] <= 1


MISTAKES = tomllib.loads(Path(__file__).with_name("own_mistakes.toml").read_text())


@each_row("mistake", MISTAKES)
def test_a_mistake_is_one_line_on_every_rank(ranks: RankPool, tmp_path, mistake):
    row = MISTAKES[mistake]
    built = f"{row.get('before', '')}\ndef build():\n    return {GOOD.replace(*row['put'])}" if "put" in row else ""
    written(tmp_path, row.get("code", built))
    name = str(tmp_path / row.get("name", "mine.py:build"))
    for message in ranks.run(2, message_here, name):
        assert message and "\n" not in message and message.startswith(f"--workload {name}: ") and row["says"] in message


def test_losses_that_are_means_pass(ranks: RankPool, tmp_path):
    """Of few samples, of few tokens that count, with dropout, of other samples in the batch, or zero."""
    losses = ("mean", "lambda output, batch: (output * 0).sum()", "contrast")
    for number, loss in enumerate(losses):
        code = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Dropout(0.9))
    def forward(self, x):
        return self.layer(x)
def contrast(output, batch):
    return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))
def build():
    return {GOOD.replace("mean", loss).replace("samples(5)", f"samples({1 + number})")}
"""
        assert ranks.run(2, message_here, written(tmp_path, code)) == [None, None]


def test_models_that_differ_between_ranks(ranks: RankPool, tmp_path):
    name = written(
        tmp_path,
        f"import os\ndef build():\n    work = {GOOD}\n"
        "    work.model.extra = nn.Linear(1 + int(os.environ['RANK']), 1)\n    return work",
    )
    for message in ranks.run(2, run_here, {"choice": "zero3", "workload": name, "output_dir": str(tmp_path)}):
        assert "between rank 0 and rank 1; build the same module on every rank" in message

"""`ddp-lab parity` as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddp_lab.parity import watch
from ddp_lab.parity.answer import Answer
from ddp_lab.parity.command import build_parser, main
from ddp_lab.parity.comparison import compare
from ddp_lab.parity.store import read
from tests.command_page import flags_in, section
from tests.parity_tool.test_faults import RUNS, run_both, run_one
from tests.ranks import RankPool

ROOT = Path(__file__).parents[2]


def test_recorded_runs(ranks: RankPool, tmp_path, capsys):
    ranks.run(1, run_both, tmp_path, {})
    ranks.run(2, run_one, tmp_path / "b", {"wrapper": "ddp", "fault": "not divided", "micro_batches": 4})
    runs = [str(tmp_path / run) for run in "abc"]
    assert main([*runs[:2], "--yardstick", runs[2], "--output-dir", str(tmp_path)]) == 1
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 7  # five, what was not seen, and the page
    assert output[1] == "first difference: all gradients are x 4: micro-batches"
    assert "step 0 on rank 0, 1" in output[2]
    assert output[4].startswith("before it: ")
    page = Path(output[-1].removeprefix("page: ")).read_text()
    assert output[1] in page
    assert page.count("<circle") > 40
    assert main([runs[0], runs[2], "--output-dir", str(tmp_path)]) == 0
    assert "first difference: none" in capsys.readouterr().out
    (tmp_path / "b" / "step_00001.rank_00001.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(SystemExit):
        main([*runs[:2], "--output-dir", str(tmp_path)])
    assert "step_00001.rank_00001.parquet: is damaged; record the run again" in capsys.readouterr().err


CRASHES = """
import torch, ddp_lab

class Model(torch.nn.Linear):
    def forward(self, inputs):
        self.calls = getattr(self, "calls", 0) + torch.is_grad_enabled()
        if self.calls == 2:
            raise RuntimeError("crashes")
        return super().forward(inputs)

def build():
    data = [{"inputs": torch.zeros(4)}] * 8
    return ddp_lab.Workload(model=Model(4, 4), train=data, evaluation=data, loss=lambda output, batch: output.mean())
"""


@pytest.mark.slow  # 12 s; the ranks' output is read from a process of their own
def test_what_a_failed_run_names_is_there(tmp_path):
    (tmp_path / "crashes.py").write_text(CRASHES)
    flags = ["--workload", f"{tmp_path}/crashes.py:build", "--device", "cpu", "--output-dir", str(tmp_path)]
    command = [sys.executable, "-m", "ddp_lab", "parity", "--choice", "zero1", "--ranks", "1", *flags]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    named = re.findall(rf"{tmp_path}/\S+(?:json|log)", answer.stderr)
    assert answer.returncode == 2, answer.stderr
    assert len(named) == 2 and all(Path(path).is_file() for path in named)


class Pooled(torch.nn.Module):
    """A sample's mean embedding, each sample by itself, with or without what fills it up."""

    def __init__(self):
        super().__init__()
        self.embed, self.scores, self.head = torch.nn.Embedding(9, 4), torch.nn.Softmax(-1), torch.nn.Linear(4, 4)

    def forward(self, words, attention_mask):
        weights = self.scores(attention_mask.float().log())[..., None]
        return torch.cat([self.head(sample[None]) for sample in (self.embed(words) * weights).sum(1)])


@pytest.mark.parametrize("is_masked", [True, False])
def test_padding_by_micro_batch_is_told(is_masked, tmp_path):
    words = torch.arange(1, 9) * (torch.arange(8) < torch.tensor([8, 8, 5, 4])[:, None])
    for run, size in (("a", 4), ("b", 2)):
        torch.manual_seed(0)
        recorder = watch(model := Pooled(), tmp_path / run, steps=1)
        for batch in words.split(size):
            batch = batch[:, : int((batch > 0).sum(1).max())]
            model(batch, attention_mask=(batch > 0) | (not is_masked)).square().sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        recorder.close()
    answer = Answer.of(compare(read(tmp_path / "a"), read(tmp_path / "b")), False, [])
    assert answer.differs != is_masked
    text = "\n".join(answer.lines)
    assert "called less often in run B: 1 modules" in text
    assert is_masked or "longer or shorter in run B (padding" in text
    assert is_masked or ("padded to other lengths" in answer.lines[1] and "attention_mask" in answer.lines[3])


def test_tensors_of_a_module_are_kept_whole(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = watch(model, tmp_path, whole="0")
    x = torch.randn(5, 4)
    expected = model[0](x).detach()
    model(x).sum().backward()
    optimizer.step()
    recorder.close()
    tensors = torch.load(tmp_path / "step_00000.rank_00000.pt")
    torch.testing.assert_close(tensors["output"], [expected])
    torch.testing.assert_close(tensors["output gradient"], [(expected > 0).float()])


def test_docs_have_every_flag():
    flags = [
        flag for action in build_parser()._actions for flag in action.option_strings if flag not in ("-h", "--help")
    ]
    assert flags_in(section("ddp-lab parity")) == flags


COMMANDS = RUNS["commands"]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.exhaustive] * (how == "exhaustive"), id=name)
        for how in ("often", "exhaustive")
        for name, line in COMMANDS[how].items()
    ],
)
def test_strategies_agree(line, tmp_path):
    for name in ("PLAIN", "LANGUAGE"):
        line = line.replace(name, COMMANDS[name])
    assert main([*line.split(), "--steps", "2", "--output-dir", str(tmp_path)]) == 0

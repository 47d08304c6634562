"""What context parallelism refuses, and how its runs are named. Parity stands in `test_meshes.py`."""

import pytest

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.sweep.meshes import mesh_flags
from tests.models import make_batch
from tests.parity import Case, check, one_step, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row

RING, ULYSSES, PYTORCH = ({"context_parallel": way} for way in ("ring", "ulysses", "pytorch_cp"))


@each_row(
    "model, options, message",
    [
        ("llama", {}, "is no causal language model of transformers"),
        ("plain", {}, "Plain is no causal language model"),
        ("lm, gpt2, dropout", PYTORCH, "context parallelism by pytorch_cp draws no dropout within attention"),
        ("lm, gpt2, dropout", {}, "by zigzag draws no dropout within attention (here 0.3): set it to 0"),
        ("lm, qwen2, window", {}, "Qwen2Attention uses sliding_window, which no ring does here"),
    ],
)
def test_what_is_refused(ranks: RankPool, model, options, message):
    check(ranks, Case("tp", model, "cp=2", options, refused=message))


def with_dropout():
    with strategy_of(Case("tp", "lm, gpt2, dropout", "cp=2", ULYSSES)) as strategy:
        one_step(strategy, [make_batch("lm", 2, 0)])


def test_ulysses_takes_dropout(ranks: RankPool):
    ranks.run(2, with_dropout)


@each_row(
    "settings, message",
    [
        ({"mesh": "dp=2", **RING}, "must be with --mesh and cp above 1"),
        ({"mesh": "cp=2", "link": "1gbit", **PYTORCH}, "whose all-to-alls it cannot pace"),
        ({"mesh": "ep=2", "link": "1gbit"}, "whose all-to-alls it cannot pace"),
        ({"mesh": "cp=2", "loss_chunks": 2}, "must be without tp or cp above 1"),
        ({"mesh": "cp=2", "compile": True}, "must be without tp or cp above 1"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(UserError, match=message):
        RunConfig.of(choice="tp", **settings)


def test_a_label_says_how_tokens_are_cut():
    config = RunConfig.of(choice="tp", mesh="dp=2,cp=2", **ULYSSES)
    assert config.label == "tp@dp2-cp2-ulysses"
    assert mesh_flags("dp2-cp2-ulysses") == ["--mesh", "dp=2,cp=2", "--context-parallel", "ulysses"]
    assert mesh_flags("cp2-pytorch_cp") == ["--mesh", "cp=2", "--context-parallel", "pytorch_cp"]

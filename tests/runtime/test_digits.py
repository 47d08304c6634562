"""Workload `digits`: it learns in little time, and its batch normalization has the same statistics everywhere."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ddp
import sharding
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.synthetic import DigitsCNN, build
from ddp_lab.runtime.flags import parse_config
from ddp_lab.runtime.loop import evaluate
from tests.parity import load, options_of
from tests.ranks import RankPool
from tests.runtime.test_run import record_of, run_here
from tests.tables import each_row


@pytest.mark.slow
def test_it_learns_within_four_epochs(ranks: RankPool, tmp_path):
    settings = {"choice": "simple_ddp", "workload": "digits", "global_batch_size": 64, "epochs": 4}
    settings |= {"output_dir": str(tmp_path), "no_profile": True}
    assert set(ranks.run(2, run_here, settings)) == {None}
    record = record_of(tmp_path, "simple_ddp")
    assert record["train_samples"] == 1437 and record["eval"]["samples"] == 360
    assert record["eval"]["accuracy"] > 0.9 and record["train_loss"][0] > 2
    for row in record["memory"]:
        assert row["buffers_bytes"] == 2 * 4 * (32 + 64) + 2 * 8, "means, variances, and two counters"


def losses_of_trained_and_saved(choice: str) -> tuple[float, float | None]:
    """The held-out loss that the strategy finds, and that of the model which rank 0 saves."""
    torch.manual_seed(0)
    workload = build(RunConfig(workload="digits", eval_samples=8))
    strategy = load(choice)(workload.model, lambda p: torch.optim.SGD(p, lr=0.01), options_of(choice))
    first = 4 * dist.get_rank()
    strategy.forward_backward([workload.collate(workload.train[first : first + 4])])
    strategy.step()
    loss, state = evaluate(strategy, workload, 4, strategy.device)["loss"], strategy.full_state_dict()
    if not state:
        return loss, None
    model = DigitsCNN().eval()
    model.load_state_dict(state)
    with torch.no_grad():
        return loss, model(**workload.collate(workload.evaluation)).loss.item()


@each_row("choice", ["pytorch_ddp", "zero2"])
def test_what_is_evaluated_is_what_is_saved(ranks: RankPool, choice):
    (loss, saved), (loss_of_rank1, _) = ranks.run(2, losses_of_trained_and_saved, choice)
    assert loss == loss_of_rank1 == pytest.approx(saved, rel=1e-6)


def test_the_commands_of_the_tutorial_make_sense():
    """They run as they stand, so none names a run of another machine."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "tutorial.md").read_text()
    trained = {"main_ddp.py": ddp.REGISTRY, "main_shard.py": sharding.REGISTRY}
    commands = re.findall(r"^    ((?:torchrun|python|ddp-lab|\./|grep) .+|\./\S+ .+)$", text, re.MULTILINE)
    assert len(commands) == 8
    for command in commands:
        program, *arguments = command.split()
        assert "2026" not in command, command
        if program == "torchrun":
            assert arguments[0] == "--standalone" and re.fullmatch("--nproc_per_node=[12]", arguments[1])
            assert parse_config("", trained[arguments[2]], arguments=arguments[3:]).workload in ("digits", "mlp")
        elif program == "ddp-lab":
            assert (
                arguments[0] == "report"
                and arguments[1].startswith("profile/")
                and arguments[1] in text.replace(command, "")
            )
        else:
            assert (root / program).is_file() and arguments[0] == "2"
            parse_config("", trained["main_shard.py"], arguments=["--ddp-choice", "zero3", *arguments[1:]])

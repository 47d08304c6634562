"""Choices over backends of their own, beside others in one process group's ranks."""

from contextlib import ExitStack
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from benchmarks.groups import Groups
from benchmarks.strategies import MIB, measure, parse, show, two_causes
from benchmarks.variants import parse_variant
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import Ranks
from ddp_lab.runtime.errors import UserError
from tests.ranks import RankPool

CPU = torch.device("cpu")
FLAGS = ["--workload", "mlp", "--depth", "2", "--width", "8", "--rounds", "1"]


def measured(choices: str, against: str = "pytorch_ddp") -> pd.DataFrame:
    options = parse(["--choices", choices, "--against", against, *FLAGS])
    config = RunConfig(workload="mlp", depth=2, width=8, train_samples=8, eval_samples=1, grad_accum_steps=1)
    with ExitStack() as stack:
        table = measure(options, config, Ranks(dist.get_rank(), dist.get_world_size(), CPU, "gloo"), stack)
        show(table, options)
        return table


def test_a_choice_runs_over_two_backends_in_alternation(ranks: RankPool) -> None:
    choices = ["pytorch_ddp", "pytorch_ddp@gloo", "bare_loop@gloo", "zero3@gloo:bucket_cap_mb=1", "pytorch_zero1@gloo"]
    for table in ranks.run(2, measured, ",".join(choices)):
        assert table["choice"].tolist() == [*choices, "local", "runtime"]
        assert table["backend_class"].tolist()[:-2] == ["ProcessGroupGloo"] * 5
        assert table["backend_class"][["local", "runtime"]].isna().all()
        assert table["ratio_median"].notna().all() and table["step_ms_median"].gt(0).all()
        assert table["wire_bytes"]["runtime"] < table["wire_bytes"]["pytorch_ddp"] / 2
        assert table["exposed_ms_median"]["runtime"] == 0
        assert table["exposed_ms_median"]["bare_loop@gloo"] != table["exposed_ms_median"]["local"]


def test_loops_beside_the_choices_compute_in_their_precision(ranks: RankPool) -> None:
    """Else a step in bf16 seems to hide more than all of its communication."""
    against = "zero3:precision=bf16"
    for table in ranks.run(1, measured, "zero3,zero3:precision=bf16:compile=off,local:precision=bf16", against):
        assert table["peak_bytes"]["local"] == table["peak_bytes"]["local:precision=bf16"]
        assert table["exposed_ms_median"].isna().tolist() == [label == "zero3" for label in table["choice"]]
    (plain,) = ranks.run(1, measured, "local")
    assert plain["peak_bytes"]["local"] != table["peak_bytes"]["local"]


def test_a_plain_loop_has_no_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--choices", "local:compress=int8"])
    assert "local has no setting but precision" in capsys.readouterr().err


def test_meshes_are_compared_in_one_run(ranks: RankPool) -> None:
    choices = "tp:mesh=tp2,tp:mesh=tp2:sequence_parallel=on"
    for table in ranks.run(2, on_meshes, choices):
        assert table["choice"].tolist() == ["pytorch_ddp", *choices.split(","), "local", "runtime"]
        assert table["ratio_median"].notna().all()
        part, whole = table["expected_resting_bytes"][choices.split(",")[0]], table["expected_resting_bytes"]["local"]
        assert part < 0.6 * whole, "a rank holds its part"


def on_meshes(choices: str) -> pd.DataFrame:
    options = parse(["--choices", choices, "--workload", "sample-lm", "--rounds", "1"])
    config = RunConfig(workload="sample-lm", task="causal-lm", train_samples=8, eval_samples=1, grad_accum_steps=1)
    with ExitStack() as stack:
        return measure(options, config, Ranks(dist.get_rank(), dist.get_world_size(), CPU, "gloo"), stack)


def groups_here() -> tuple[bool, bool, str]:
    """Whether a second group is another than the default one, and made once; and what is said of NCCL on a CPU."""
    groups = Groups(Ranks(dist.get_rank(), dist.get_world_size(), CPU, "gloo"), ExitStack())
    second = groups.over("gloo", "a")
    with pytest.raises(UserError) as caught:
        groups.over("nccl-legacy", "pytorch_ddp@nccl-legacy")
    is_other = second is not groups.over(None, "b") and dist.get_world_size(second) == dist.get_world_size()
    return is_other, second is groups.over("gloo", "c"), str(caught.value)


def test_a_group_is_made_once(ranks: RankPool) -> None:
    said = "pytorch_ddp@nccl-legacy: nccl-legacy needs CUDA devices"
    assert ranks.run(2, groups_here) == [(True, True, said)] * 2


def test_a_ratio_has_one_cause(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Over two classes, one choice has a ratio to itself, and another choice has none."""
    classes = {"pytorch_ddp": "new", "pytorch_ddp@old": "old", "ours": "new", "ours@old": "old", "local": None}
    variants = {label: {"choice": label.split("@")[0]} for label in classes}
    assert two_causes(classes, variants, "pytorch_ddp") == ["ours@old"]
    assert two_causes(classes, variants, "pytorch_ddp@old") == ["ours"]
    assert two_causes(classes, variants, "local") == []
    rows = dict.fromkeys(("step_ms_median", "ratio_median", "ratio_p25", "ratio_p75", "exposed_ms_median"), 1.0)
    rows |= dict.fromkeys(("peak_bytes", "resting_bytes", "expected_resting_bytes"), float(MIB))
    table = pd.DataFrame([{"choice": label, "backend_class": found} | rows for label, found in classes.items()])
    table.loc[3, "ratio_median"] = float("nan")
    table = table.assign(elements=10, world_size=2)
    table.attrs["notes"] = []
    show(table, parse(["--choices", "simple_ddp", *FLAGS]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1][:3] == ["choice", "over", "step,"]
    assert lines[5][:4] == ["ours@old", "old", "1.0", "–"] and lines[6][:4] == ["local", "–", "1.0", "1.000"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("local@gloo", "local does not communicate"),
        ("zero1@auto", "name a backend"),
        ("zero1@glo", "must be one of auto, gloo, nccl, nccl-legacy"),
        ("zero9@gloo", "zero9"),
    ],
)
def test_mistakes_in_a_choice(capsys: pytest.CaptureFixture[str], choice: str, expected: str) -> None:
    with pytest.raises(SystemExit):
        parse(["--choices", choice])
    error = capsys.readouterr().err
    assert expected in error and error.count("\n") == 1


def test_a_setting_s_value_may_have_colons() -> None:
    found = parse_variant("zero3:activation_checkpointing=torch:every:2:offload=optimizer", ["zero3"])
    assert found == {"choice": "zero3", "activation_checkpointing": "torch:every:2", "offload": "optimizer"}

"""Choices in alternation, beside others in one process group's ranks."""

from contextlib import nullcontext

import pandas as pd
import torch

from benchmarks import rounds
from benchmarks.strategies import measure, parse
from ddp_lab.runtime.cli import ROOT
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from tests.checkpoints import here
from tests.ranks import RankPool

CPU = torch.device("cpu")
MLP = ["--workload", "mlp", "--depth", "2", "--width", "8"]
THIN = ["--workload", f"{ROOT}/benchmarks/thin.py:build", "--host"]


def measured(choices: str, against: str = "pytorch_ddp", flags: list[str] = MLP) -> pd.DataFrame:
    options = parse(["--choices", choices, "--against", against, "--rounds", "1", *flags])
    sizes = {"depth": options.depth, "width": options.width, "grad_accum_steps": 1}
    config = RunConfig(workload=options.workload, train_samples=8, eval_samples=1, **sizes)
    return measure(options, config, here())


def test_the_folder_of_a_table_is_made(tmp_path):
    assert parse(["--choices", "zero1", "--csv", str(tmp_path / "new" / "times.csv")]).csv.parent.is_dir()


def test_choices_run_in_alternation(ranks: RankPool):
    choices = ["pytorch_ddp", "bare_loop", "zero3:bucket_cap_mb=1", "pytorch_zero1"]
    for table in ranks.run(2, measured, ",".join(choices)):
        assert table["choice"].tolist() == [*choices, "local", "runtime"]
        assert table["ratio_median"].notna().all() and table["step_ms_median"].gt(0).all()
        assert table["wire_bytes"]["runtime"] < table["wire_bytes"]["zero3:bucket_cap_mb=1"] / 2
        assert table["exposed_ms_median"]["runtime"] == 0
        assert table["exposed_ms_median"]["bare_loop"] != table["exposed_ms_median"]["local"]


def test_loops_beside_the_choices_compute_in_their_precision(ranks: RankPool):
    """Else a step in bf16 seems to hide more than all of its communication."""
    against = "zero3:precision=bf16"
    for table in ranks.run(1, measured, "zero3,zero3:precision=bf16:compile=off,local:precision=bf16", against):
        assert table["peak_bytes"]["local"] == table["peak_bytes"]["local:precision=bf16"]
        assert table["exposed_ms_median"].isna().tolist() == [label == "zero3" for label in table["choice"]]
    (plain,) = ranks.run(1, measured, "local")
    assert plain["peak_bytes"]["local"] != table["peak_bytes"]["local"]


def test_host_time_of_choices(ranks: RankPool):
    """A bucket's gradients are copied by one call, DDP's one by one."""
    (table,) = ranks.run(1, measured, "bucket_ddp_async", "pytorch_ddp", THIN)
    assert table.index.tolist() == ["pytorch_ddp", "bucket_ddp_async", "local", "runtime"]
    assert table["ratio_median"].gt(0).all() and table["exposed_ms_median"]["local"] == 0
    operators = table["operators"]
    assert operators["local"] < operators["runtime"] < operators["bucket_ddp_async"] < 0.7 * operators["pytorch_ddp"]


def test_a_table_is_shown_and_written(tmp_path, capsys, monkeypatch):
    """Bytes in MiB, and no column without a value."""
    table = pd.DataFrame({"choice": ["zero1"], "peak_bytes": [3 * 2**19], "against": [None]})
    monkeypatch.setattr(rounds, "joined_ranks", lambda config: nullcontext(RankContext(0, 1, CPU, "gloo")))
    assert rounds.run_program(lambda config, ranks: table, tmp_path / "t.csv") == 0
    assert capsys.readouterr().out.split() == f"choice peak, MiB zero1 1.5 table: {tmp_path / 't.csv'}".split()
    assert pd.read_csv(tmp_path / "t.csv")["peak_bytes"].tolist() == [3 * 2**19]

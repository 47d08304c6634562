"""Plans beside steps that others have measured."""

from rich.console import Console

from ddp_lab.planner import check_command
from ddp_lab.planner.command import build_parser

TINY = "--d-model 64 --d-ff 96 --layers 2 --vocab 90 --sequence-length 16 --gpus 2xH100 --global-batch-size 4"
ROW = f'[mine]\nplan = "{TINY} --grad-accum-steps 1 --choices zero3"\ntokens_per_s_gpu = 1000\nsource = "me"\n'


def check(path, text, capsys, *more):
    path.write_text(text)
    options = build_parser("check").parse_args(["--check", str(path), "--jobs", "1", *more])
    check_command.run(options, Console(width=200))
    return capsys.readouterr().out


def test_measured_and_planned_stand_side_by_side(tmp_path, capsys):
    """A compiled step takes no longer, and the worst comes with its reason."""
    fused = ROW.replace("mine", "fused") + 'compiled = true\ndiffers = "all"\n'
    said = check(tmp_path / "t.toml", ROW + fused, capsys)
    rows = {line.split()[0]: line.split() for line in said.splitlines() if line.startswith(("mine", "fused"))}
    assert rows["mine"][-6:-4] == ["zero3", "1,000"] and rows["mine"][-3] == "32.0", (
        "16 x 4 / 2 tokens at 1000 a second"
    )
    assert float(rows["fused"][-4].replace(",", "")) > float(rows["mine"][-4].replace(",", ""))
    assert (
        "Mean error" in said and "0 of 2 (0%) within 10%" in said and "Worst: fused" in said and said.endswith("all\n")
    )
    assert "fused" not in check(tmp_path / "t.toml", ROW + fused, capsys, "--rows", "mine")


def test_the_published_rows_can_be_planned():
    rows = check_command.read(check_command.TABLE)
    assert len(rows) == 15 and all(check_command.task_of(name, row) for name, row in rows.items())

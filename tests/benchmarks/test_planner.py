"""Plans beside steps that others have measured."""

import pytest

from benchmarks import planner

TINY = "--d-model 64 --d-ff 96 --layers 2 --vocab 90 --sequence-length 16 --gpus 2xH100 --global-batch-size 4"
ROW = f'[mine]\nplan = "{TINY} --grad-accum-steps 1 --choices zero3"\ntokens_per_s_gpu = 1000\nsource = "me"\n'
FUSED = ROW.replace("mine", "fused") + 'compiled = true\ndiffers = "all"\n'
ODD = '[odd]\nplan = "--model gpt2 --gpus 2xH10 --choices zero3"\ntokens_per_s_gpu = 1\nsource = "me"\n'


def test_measured_and_planned_stand_side_by_side(tmp_path, capsys):
    """A compiled step takes no longer, the worst comes with its reason, and a row that makes no sense is a line."""
    (tmp_path / "t.toml").write_text(ROW + FUSED + ODD + ODD.replace("[odd]", "[none]").replace("--gpus", "--gpu"))
    assert planner.main(["--table", str(tmp_path / "t.toml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    plain, fused = (next(line for line in lines if line.startswith(name)).split() for name in ("mine", "fused"))
    assert plain[-6:-4] == ["zero3", "1,000"] and plain[-3] == "32.0", "16 x 4 / 2 tokens at 1000 a second"
    assert float(fused[-4].replace(",", "")) > float(plain[-4].replace(",", ""))
    assert any(line.startswith("odd: unknown device 'H10'") for line in lines)
    assert any(line.startswith("none: plan = '--model gpt2 --gpu 2xH10") for line in lines)
    assert lines[-2].endswith("0 of 2 (0%) within 10%.") and lines[-1].startswith("Worst: fused")
    assert lines[-1].endswith("all")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not a TOML file"),
        ("[a]\nplan = ''\nsorce = ''", "unknown field 'sorce'; did you mean source"),
        (ROW, "'mime'"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path, capsys, text, message):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        planner.main(["--table", str(tmp_path / "t.toml"), "--rows", "mime"])
    assert message in capsys.readouterr().err


def test_the_published_rows_can_be_planned():
    rows = planner.read(planner.PUBLISHED)
    assert len(rows) == 15 and all(map(planner.case_in, rows.values()))

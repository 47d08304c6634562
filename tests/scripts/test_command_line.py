"""The command lines as a user runs them: real processes, exit codes, and what they say."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

import ddp
import sharding
from ddp_lab.runtime.config import split_label
from ddp_lab.runtime.flags import parse_config
from ddp_lab.runtime.process.environment import OF_GPUS, scheduling
from ddp_lab.runtime.settings.data import WORKLOADS
from tests.command_page import flags_in
from tests.in_process import compare_runs
from tests.traces import record, write, write_run

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TINY = ["--workload", "mlp", "--depth", "2", "--width", "8", "--train-samples", "80", "--eval-samples", "4"]
TIMEOUT_S = 240


def command(*arguments, under=None, limit_s=TIMEOUT_S):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return subprocess.run(
        [*(under or [sys.executable]), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )


def problems(errors):
    """Lines of standard error that are not about progress."""
    return [line for line in errors.splitlines() if not line.startswith("reading traces of ")]


@pytest.mark.parametrize(("name", "family"), [("main_ddp.py", ddp), ("main_shard.py", sharding)])
def test_help_and_version_load_no_torch(name, family):
    def answer_to(flag):
        script = f"import runpy, sys; sys.argv = ['{name}', '{flag}']\n"
        script += f"try: runpy.run_path('{name}', run_name='__main__')\n"
        script += "except SystemExit: print('torch' in sys.modules, 'transformers' in sys.modules)"
        return command("-c", script).stdout

    text = answer_to("--help")
    assert text.endswith("False False\n")
    for listed, sentence in {**family.REGISTRY.sentences, **WORKLOADS}.items():
        assert listed in text and sentence in text
    assert re.fullmatch(r"ddp-lab [\d.]+, torch [\d.]+\S*\nFalse False\n", answer_to("--version"))


def test_compare_says_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    """Runs of another family, and where a folder is that is named without `profile/`."""
    from ddp_lab.analysis.comparison import choices
    from ddp_lab.commands import compare

    for label in ("bucket_ddp_async", "zero3", "zero3@dp2"):
        (tmp_path / "profile" / label).mkdir(parents=True)
    monkeypatch.setattr(choices, "report_on_choices", lambda root, to, trained, *_: trained)
    assert compare.main(["sharding", "--output-dir", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "left out, since they are of other families than sharding: bucket_ddp_async, zero3@dp2\n" in output
    monkeypatch.chdir(tmp_path)
    assert compare.main(["zero3"]) == 1 and capsys.readouterr().err.endswith("or profile/zero3\n")


def test_every_flag_of_reports_is_documented():
    """Those of the entrypoints: `tests/runtime/test_flags.py`."""
    from ddp_lab.analysis.command import build_parser
    from ddp_lab.commands import compare

    text = (ROOT / "docs" / "command-line.md").read_text().split("## `benchmarks/")[0]  # theirs are tested with them
    documented = flags_in(text.split("## `ddp-lab compare`")[1])
    parsers = (compare.build_parser(), build_parser())
    reports = [action.option_strings[-1] for parser in parsers for action in parser._actions if action.option_strings]
    assert documented == [flag for flag in reports if flag != "--help"]


def trained(folder, changes, run_id="20261121-093000-0001"):
    """Traces and records of choices as a run leaves them; `changes` to the record of each."""
    for choice, change in changes.items():
        trace_dir = write_run(folder / "profile" / choice, run_id=run_id)
        content = record(choice, 0.1) | {"run_id": run_id} | change
        content["config"] = content["config"] | {"no_profile": False}
        write(trace_dir / f"{run_id}.run.json", content)


def test_passes_of_a_sweep_count_together_until_a_choice_runs_again(tmp_path):
    sweep = {
        "id": "2026-11-21T09:30:00+00:00",
        "family": "ddp",
        "command": "ddp-lab sweep ddp 2",
        "passes": 2,
        "runs": 6,
    }
    for number, seconds in ((1, 0.2), (2, 0.4)):
        of_pass = {"sweep": sweep | {"number": number}}
        changes = {"flat_ddp": of_pass, "pytorch_ddp": of_pass | {"step_time_s": [9.0, seconds]}}
        trained(tmp_path, changes, f"20261121-09300{number}-0")
    answer = compare_runs("ddp", "--output-dir", str(tmp_path))
    assert answer.returncode == 0 and "not known" in answer.stdout
    page = (tmp_path / "reports" / "compare.html").read_text()
    assert "4 of 6 runs, pass 2 of 2" in answer.stdout and "4 of 6 runs" in page
    table = pd.read_csv(tmp_path / "reports" / "compare.csv")
    assert table.run_id.unique().tolist() == ["20261121-093001-0"] and table.verdict[0] == "not known"
    trained(tmp_path, {"pytorch_ddp": {}}, "20261121-093003-0")
    for folder in (tmp_path / "profile" / "pytorch_ddp").glob("rank_*"):
        shutil.rmtree(folder)
    answer = compare_runs("ddp", "--output-dir", str(tmp_path))
    assert answer.returncode == 1 and answer.stderr.count("error: pytorch_ddp: ") == 1, "of the others there is a page"
    table = pd.read_csv(tmp_path / "reports" / "compare.csv")
    assert table.verdict[0] == "not known" and table.run_id.tolist() == ["20261121-093001-0", "20261121-093003-0"]


def test_runs_on_several_meshes_stand_in_one_table(tmp_path):
    """By mesh, and on one mesh by choice. Ratios are to the first reference. Other folders are not such runs."""
    meshes = {"zero1@dp2": "dp=2", "tp@dp2": "dp=2", "zero1@dp1-tp2-sp": "dp=1,tp=2", "zero1": None}
    trained(tmp_path, {label: {"choice": split_label(label)[0]} for label in [*meshes, "zero1@My backup"]})
    for label, mesh in meshes.items():
        (path,) = (tmp_path / "profile" / label).glob("*.run.json")
        content = json.loads(path.read_text())
        content["config"]["mesh"] = mesh
        content["expected_traffic"][0]["dimension"] = "tp" if mesh == "dp=1,tp=2" else "dp"
        write(path, content)
    answer = compare_runs("parallel", "--output-dir", str(tmp_path))
    assert answer.returncode == 0 and not problems(answer.stderr), answer.stderr
    table = pd.read_csv(tmp_path / "reports_parallel" / "compare.csv")
    assert table.choice.tolist() == ["zero1@dp1-tp2-sp", "tp@dp2", "zero1@dp2"]
    assert table.mesh.tolist() == ["dp=1,tp=2", "dp=2", "dp=2"]
    assert table.verdict.tolist()[1] == "reference"
    assert (tmp_path / "reports_parallel" / "tp@dp2" / "summary.html").exists()
    page = (tmp_path / "reports_parallel" / "compare.html").read_text()
    assert "In all other settings that are compared, the runs agree" in page and "dp=1,tp=2" in page


@pytest.mark.slow
def test_train_starts_its_ranks(tmp_path):
    flags = ["bucket_ddp_async", "--ranks", "2", *TINY, "--output-dir", str(tmp_path)]
    trained = command("-m", "ddp_lab", "train", *flags)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.count("bucket_ddp_async: done, median step") == 1 and trained.stderr == ""
    (path,) = (tmp_path / "profile" / "bucket_ddp_async").glob("*.run.json")
    record = json.loads(path.read_text())
    assert record["scheduling"] == (scheduling() if any(map(os.path.exists, OF_GPUS)) else "batch")
    assert record["settling_steps"] == 0 and record["world_size"] == 2
    assert trained.stdout.splitlines()[-2:] == [
        f"bucket_ddp_async: {name}: {line}"
        for name, line in zip(("what limits a step", "try next"), record["verdict"], strict=True)
    ]
    late = [row["late_s"] for row in record["throughput"]]
    assert None not in late and max(late) > 0, "the recorder that watches the run says who comes last"
    repeated = parse_config("", ddp.REGISTRY, arguments=["--config", str(path).replace(".run.json", ".config.toml")])
    assert repeated.as_dict() == record["config"]


def test_a_script_reports(tmp_path, capsys):
    trained(tmp_path, {"flat_ddp": {}})
    flags = ["--select", "all", "--enable-multiprocessing", "--include-last-step"]
    script = str(ROOT / "scripts" / "analyze_traces_ddp.py")
    arguments = [script, "--trace-dir", str(tmp_path / "profile" / "flat_ddp"), *flags]
    with mock.patch.object(sys, "argv", arguments), pytest.raises(SystemExit) as caught:
        runpy.run_path(script, run_name="__main__")
    (page,) = (tmp_path / "reports" / "flat_ddp").glob("run_0_*/summary.html")
    assert caught.value.code == 0
    assert capsys.readouterr() == (f"report: {page}\n", "reading traces of flat_ddp\n")


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_sweep_of_sharding(tmp_path):
    """Choices that take the flags compute the same, and their memory stands in the comparison; the others are named."""
    flags = ["2", "--output-dir", str(tmp_path), *TINY, "--max-steps", "9", "--offload", "optimizer"]
    answer = command(*flags, under=["./run_experiment_shard.sh"], limit_s=880)
    assert answer.returncode == 0 and not problems(answer.stderr), answer.stderr
    folder = tmp_path / "reports_sharding"
    table = pd.read_csv(folder / "compare.csv")
    assert table.choice.tolist() == ["zero1", "zero2", "zero3"] and "baseline: left out: --offload" in answer.stdout
    assert table.final_train_loss.tolist() == pytest.approx([table.final_train_loss[0]] * len(table), rel=1e-4)
    assert table.peak_bytes.ge(table.model_states_bytes).all() and table.model_states_bytes.gt(0).all()
    assert all((folder / name / "summary.html").exists() for name in table.choice)

"""Flags on the command line, in `--help` and the docs, and in a TOML file; mistakes: `tests/mistakes.toml`."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddp
from ddp_lab.runtime.cli import UNFIT
from ddp_lab.runtime.config import FLAGS, RunConfig
from ddp_lab.runtime.flags import build_parser, parse_config
from ddp_lab.runtime.settings.field import GROUPS
from ddp_lab.runtime.settings.file import to_toml
from ddp_lab.sweep.command import parse as parse_sweep

DOCS = Path(__file__).parents[2] / "docs" / "command-line.md"


def parsed(*arguments):
    return parse_config("", ddp.REGISTRY, arguments=arguments)


def test_help_and_docs_have_every_flag_in_its_group():
    """The docs say what --help says, word for word."""
    parser = build_parser("", ddp.REGISTRY.sentences)
    groups = [group for group in parser._action_groups if group._group_actions]
    assert [group.title for group in groups] == list(GROUPS)
    expected = []
    for group in groups:
        expected += ["", f"| {group.title} | |", "|---|---|"]
        for action in group._group_actions:
            value = "" if action.nargs == 0 else f" [{action.metavar}]" if action.nargs == "?" else f" {action.metavar}"
            expected.append(f"| `{action.option_strings[-1 if action.dest == 'help' else 0]}{value}` | {action.help} |")
    assert "\n".join(expected) in DOCS.read_text(), "docs/command-line.md needs:\n" + "\n".join(expected)
    names = [field.name for field in FLAGS]
    assert sorted(action.dest for action in parser._actions) == sorted([*names, "config", "help", "version"])
    assert "--precision {fp32,bf16,fp16,bf16-true}" in parser.format_help()


def test_names_that_would_break_a_line(capsys):
    """Of a run and of a sweep, also in a file of flags; and the name of an unknown flag."""
    names = ("workload", "model", "dataset", "text-column", "label-column", "plan", "checkpoint-dir", "resume")
    names += ("output-dir", "config", "a\nb")
    for flag in (f"--{name}" for name in names):
        for text in ("a\nb", "a\x1bb", "a\u2028b", "a\udcffb"):
            runs = [partial(parsed, "--ddp-choice", "flat_ddp", flag, text)]
            if flag in ("--output-dir", "--checkpoint-dir", "--config"):
                runs += [partial(parse_sweep, ["ddp", "2", flag, text])]
            for run in runs:
                with pytest.raises(SystemExit):
                    run()
                said = capsys.readouterr().err
                assert said.startswith("error: ") and len(said.splitlines()) == 1 and said.isascii(), (flag, text)
    assert parsed("--ddp-choice", "flat_ddp", "--generate", "1", "--prompt", "a\nb").prompt == "a\nb"


# Files of flags ------------------------------------------------------------------------------------------------------

FILE = """
ddp-choice = "zero3"
max-steps = 7
lr = 1
bucket-cap-mb = "auto"
no-profile = true
find-unused-parameters = true
model = "--odd name"
"""


def written(folder, text):
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


def test_the_command_line_wins_over_the_file(tmp_path):
    path = written(tmp_path, FILE.replace("zero3", "flat_ddp"))
    config = parsed("--config", path)
    assert config == RunConfig.of(
        choice="flat_ddp", max_steps=7, lr=1.0, no_profile=True, find_unused_parameters=True, model="--odd name"
    )
    flags = [
        "--max-steps",
        "9",
        "--profile",
        "--no-find-unused-parameters",
        f"--config={path}",
        "--ddp-choice",
        "simple_ddp",
    ]
    changed = parsed(*flags)
    assert changed == config.but(choice="simple_ddp", max_steps=9, no_profile=False, find_unused_parameters=False)


positive = st.floats(1e-12, 1e6)
CONFIGS = st.builds(
    RunConfig.of,
    choice=st.sampled_from(ddp.CHOICES),
    workload=st.sampled_from(["auto", "mlp"]),
    dataset=st.none() | st.text(st.characters(exclude_categories=UNFIT), min_size=1),
    train_samples=st.none() | st.integers(1, 10**6),
    lr=st.none() | positive,
    seed=st.integers(0, 2**32 - 1),
    bucket_cap_mb=st.just("auto") | positive,
    compress=st.sampled_from([None, "int8"]),
    find_unused_parameters=st.booleans(),
    no_profile=st.booleans(),
    resume=st.sampled_from([None, "latest", "some/folder"]),
)


@given(CONFIGS)
def test_the_file_that_a_run_leaves_gives_the_same_settings(tmp_path_factory, config):
    path = written(tmp_path_factory.getbasetemp(), to_toml(config, "a comment"))
    assert parsed("--config", path) == config

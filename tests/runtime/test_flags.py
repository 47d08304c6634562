"""Flags on the command line, in `--help` and the docs, and in a TOML file; mistakes: `tests/mistakes.toml`."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ddp
from ddp_lab.runtime.cli import UNFIT
from ddp_lab.runtime.config import FLAGS, RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import build_parser, parse_config, to_flags, to_toml
from ddp_lab.runtime.settings.field import GROUPS, kind_of
from ddp_lab.sweep.command import parse as parse_sweep

DOCS = Path(__file__).parents[2] / "docs" / "command-line.md"


def parsed(*arguments):
    return parse_config("", ddp.REGISTRY, arguments=arguments)


def documented() -> list[str]:
    """The lines of `docs/command-line.md`: what --help says, word for word, and what a run that resumes may change."""
    resume = {field.name: field.metadata["resume"] or "" for field in FLAGS}
    lines = []
    for group in build_parser("", ddp.REGISTRY.sentences)._action_groups:
        lines += ["", f"| {group.title} | | on resume |", "|---|---|---|"] * bool(group._group_actions)
        for action in group._group_actions:
            value = "" if action.nargs == 0 else f" [{action.metavar}]" if action.nargs == "?" else f" {action.metavar}"
            name = action.option_strings[-1 if action.dest == "help" else 0] + value
            lines.append(f"| `{name}` | {action.help} | {resume.get(action.dest, '')} |".replace("  |", " |"))
    return lines


def test_help_and_docs_have_every_flag_in_its_group():
    parser, lines = build_parser("", ddp.REGISTRY.sentences), documented()
    assert [line.split(" | ")[0][2:] for line in lines if line.endswith("on resume |")] == list(GROUPS)
    assert "\n".join(lines) in DOCS.read_text(), "docs/command-line.md needs:\n" + "\n".join(lines)
    names = [field.name for field in FLAGS]
    assert sorted(action.dest for action in parser._actions) == sorted([*names, "config", "help", "version"])
    assert "--precision {fp32,bf16,fp16,bf16-true}" in parser.format_help()


ADDED = """
import sys
from importlib.util import find_spec, module_from_spec

spec = find_spec("ddp_lab.runtime.settings.training")
module, before = module_from_spec(spec), "    tf32: bool ="
field = "    momentum: float = _run(0.9, 'of the optimizer', needs=(given('lr'),), excludes=(SAVES,), "
field += "affects=(LOSS,), head='Momentum is {momentum}.')\\n"
sys.modules[spec.name] = module
field += "    offset: float = _run(0.0, 'of the loss', at_least=-9.0)\\n"
exec(spec.loader.get_source(spec.name).replace(before, field + before), module.__dict__)

import msgspec, pytest
from ddp_lab.analysis.comparison.fairness import require_comparable
from ddp_lab.analysis.record import Settings
from ddp_lab.analysis.report.pages.heads import labels
from ddp_lab.runtime.checkpoint.origin import require_same_settings
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.flags import to_flags, to_toml
from tests.runtime.checkpoint.test_files import manifest
from tests.runtime.test_flags import documented, parsed
from tests.traces import record

assert "| `--momentum X` | of the optimizer (default: 0.9) | must equal |" in documented()
config = parsed("--ddp-choice", "flat_ddp", "--momentum", "0.5", "--lr", "1")
assert config.momentum == 0.5 and "--momentum=0.5" in to_flags(config) and "momentum = 0.5" in to_toml(config, "")
runs = {name: record(name, 1.0) for name in "ab"}
runs["b"]["config"]["momentum"] = 0.5
for said, refused in {
    "--momentum 0.0: must be a number above 0": lambda: config.but(momentum=0.0),
    "--offset -10.0: must be a number of at least -9": lambda: config.but(offset=-10.0),
    "--momentum 0.5: must be with --lr": lambda: config.but(lr=None),
    "--momentum 0.5: must be without --checkpoint-every": lambda: config.but(checkpoint_every=1),
    "momentum (0.9: a; 0.5: b); .* --allow-different momentum": lambda: require_comparable(runs),
    "--momentum was 0.9 and is 0.5": lambda: require_same_settings(
        msgspec.structs.replace(manifest(1), config=config.but(momentum=0.9).as_dict()), config.as_dict()
    ),
}.items():
    with pytest.raises(UserError, match=said.replace("(", "[(]").replace(")", "[)]")):
        refused()
assert "Momentum is 0.5." in labels(runs["b"]) and msgspec.convert(runs["b"]["config"], Settings).momentum == 0.5
"""


def test_a_flag_is_a_field():
    """Added in one file: command line, docs, checks, files, records, checkpoints and comparisons know it."""
    subprocess.run([sys.executable, "-c", ADDED], cwd=DOCS.parents[1], check=True, timeout=120)


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
                line = capsys.readouterr().err
                assert line.startswith("error: ") and len(line.splitlines()) == 1 and line.isascii(), (flag, text)
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


def values_of(field):
    """Of a flag: what the table says that tests try, or what fits its limits."""
    about, optional = field.metadata, st.none() if type(None) in get_args(field.type) else st.nothing()
    if tried := about["trials"] or about["choices"]:
        return st.sampled_from(tried) | optional
    by_kind = {
        bool: st.booleans(),
        int: st.integers(about["at_least"] or 1, 10**6),
        float: st.floats(1e-12, 1e6),
        str: st.text(st.characters(exclude_categories=UNFIT), min_size=1),
    }
    return optional | by_kind[kind_of(field)]


FEW = st.lists(st.sampled_from([field for field in FLAGS if field.name not in ("choice", "mesh")]), max_size=4)
(MESHES,) = [field.metadata["trials"] for field in FLAGS if field.name == "mesh"]
GIVEN = FEW.flatmap(lambda fields: st.fixed_dictionaries({field.name: values_of(field) for field in fields}))


@given(GIVEN, st.sampled_from(MESHES))
def test_files_and_flags_of_a_run_give_the_same_settings(tmp_path_factory, values, mesh):
    try:
        config = RunConfig.of(**{"choice": "flat_ddp", "mesh": mesh} | values)
    except UserError as error:
        assert ": must be with" in str(error) and str(error).startswith("--")
        return
    path = written(tmp_path_factory.getbasetemp(), to_toml(config, "a comment"))
    assert parsed("--config", path) == config == parsed(*to_flags(config))

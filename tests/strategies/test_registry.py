"""Strategies by name, and those that need what is not installed."""

import pytest

from training.errors import UserError
from training.flags import build_parser, parse_config
from training.registry import Registry

ENTRIES = {"near": ("ddp.simple_ddp:SimpleDDP", "is here"), "far": ("elsewhere.far:Far", "is not")}
REGISTRY = Registry(ENTRIES, extras={"far": "no_such_package"})
COMMAND = "uv sync --extra no_such_package"


def test_what_is_not_installed_is_listed_but_not_swept() -> None:
    assert REGISTRY.names == ("near",)
    listing = build_parser("", REGISTRY.sentences).format_help()
    assert "near  is here\n" in listing and f"far   is not (not installed: {COMMAND})" in listing
    assert Registry(ENTRIES, extras={"far": "pytest"}).names == ("near", "far")


def test_choosing_what_is_not_installed_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse_config("", REGISTRY, arguments=["--ddp-choice", "far"])
    assert left.value.code == 2
    assert capsys.readouterr().err == f"error: strategy 'far' is not installed; run: {COMMAND}\n"
    with pytest.raises(UserError, match=COMMAND):
        REGISTRY.load("far")
    assert REGISTRY.load("near").__name__ == "SimpleDDP"

"""Sentences of reports: `sentences.j2` has them, a macro each. Terminal and pages show the same string."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ddp_lab.runtime.errors import listed


@cache
def _macros() -> Any:
    environment = Environment(undefined=StrictUndefined)
    environment.filters |= {"listed": listed, "fmt": format}
    return environment.from_string(Path(__file__).with_suffix(".j2").read_text()).module


def say(name: str, *values: object) -> str:
    """The sentences of macro `name` about `values`, on one line; empty if it has nothing to say."""
    return " ".join(str(getattr(_macros(), name)(*values)).split())

"""Prints the tables of docs that come from code into their pages: the fields of the run record.

uv run python -m scripts.print_docs
"""

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ddp_lab.record_format import RunRecord

PAGE = Path(__file__).parents[1] / "docs" / "run-record.md"
_ROWS = re.compile(r"(?<=^\|---\|---\|\n)(?:^\| `.*\|\n)+", re.MULTILINE)


def fields_of(kind: Any) -> dict[str, str]:
    """What each field is: of a struct within as `outer.inner`, of a list of them as `outer[].inner`."""
    fields: dict[str, str] = {}
    texts = {name: text for base in reversed(kind.__mro__[:-1]) for name, text in _texts(base).items()}
    for name, hint in get_type_hints(kind).items():
        fields[name] = texts.get(name, "")
        in_list = next((get_args(part) for part in (hint, *get_args(hint)) if get_origin(part) is list), ())
        for struct in {part for part in (hint, *get_args(hint), *in_list) if hasattr(part, "__annotations__")}:
            fields |= {f"{name}{'[]' * bool(in_list)}.{inner}": text for inner, text in fields_of(struct).items()}
    return fields


def _texts(kind: type) -> dict[str, str]:
    """The strings under the fields of a class."""
    if not kind.__module__.startswith("ddp_lab."):
        return {}
    module = ast.parse(inspect.getsource(inspect.getmodule(kind) or kind))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__)
    pairs = pairwise(body)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def printed(page: str) -> str:
    """`page` with the table of the run record's fields as the code has them."""
    table = "".join(f"| `{name}` | {text} |\n" for name, text in fields_of(RunRecord).items())
    return _ROWS.sub(lambda _: table, page, count=1)


if __name__ == "__main__":
    PAGE.write_text(printed(PAGE.read_text()))

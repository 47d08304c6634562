"""Prints the tables of docs that come from code into their pages: fields of the run record, and columns of CSV files.

uv run python -m scripts.print_docs
"""

import ast
import inspect
import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from ddp_lab.analysis.columns import FILES, WRITTEN
from ddp_lab.record_format import RunRecord

DOCS = Path(__file__).parents[1] / "docs"
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


def with_table(text: str, meanings: Iterable[tuple[str, str]]) -> str:
    """`text` with these names and meanings as the rows of its first table."""
    return _ROWS.sub(lambda _: "".join(f"| `{name}` | {meaning} |\n" for name, meaning in meanings), text, count=1)


def record_page(page: str) -> str:
    """`page` with the fields of the run record as the code has them."""
    return with_table(page, fields_of(RunRecord).items())


def columns_page(page: str) -> str:
    """`page` with the columns of each CSV file, a section each, as `columns.toml` has them."""
    head, *sections = page.split("\n## ")
    for place, (section, tables) in enumerate(zip(sections, FILES.values(), strict=True)):
        columns = [column for table in tables for column in WRITTEN[table].items()]
        sections[place] = with_table(section, [(name, column.meaning) for name, column in columns])
    return "\n## ".join([head, *sections])


PRINTERS = {"run-record.md": record_page, "csv-columns.md": columns_page}

if __name__ == "__main__":
    for name, printer in PRINTERS.items():
        (DOCS / name).write_text(printer((DOCS / name).read_text()))

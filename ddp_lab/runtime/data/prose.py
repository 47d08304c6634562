"""English prose that ships with Python: its language reference, and what the standard library says about itself.

`pydoc_data.topics` holds the reference as `help()` shows it. The rest are docstrings. Only paragraphs of running text
are kept, each once and on one line; code, tables and lists are left out. The text depends on Python's version.
"""

import ast
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ENOUGH = 700_000
"""Characters. Modules are read, in the order of their names, until there are so many."""
SHORTEST_PARAGRAPH, LETTERS = 40, 0.85
"""A paragraph of running text has so many characters, and such a part of them are letters or spaces."""
HELD_OUT = 10
"""One document of so many is held out."""


@cache
def documents() -> tuple[list[str], list[str]]:
    """Training and held-out documents: one for each topic of the reference, and for each module. Read once."""
    known: set[str] = set()
    found: list[str] = []
    characters = 0
    for text in _texts():
        paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if ">>>" not in part]
        new = [paragraph for paragraph in paragraphs if _is_prose(paragraph) and paragraph not in known]
        known.update(new)
        if new:
            found.append("\n".join(dict.fromkeys(new)))
            characters += len(found[-1])
        if characters >= ENOUGH:
            break
    held_out = found[HELD_OUT // 2 :: HELD_OUT]
    return [document for document in found if document not in held_out], held_out


def _texts() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from sorted(topics.values(), key=len)  # long topics repeat short ones
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        nodes = (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, _DOCUMENTED))
        yield "\n\n".join(filter(None, map(ast.get_docstring, nodes)))


_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef


def _is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph) >= SHORTEST_PARAGRAPH and letters >= LETTERS * len(paragraph)

"""Published results: documents are in step with the data, and what is not is named."""

import json
import tomllib
from pathlib import Path

import pandas as pd
import pytest

from benchmarks import publish, publish_blocks
from benchmarks.publish_blocks import out_of_step, render, table
from ddp_lab.runtime.errors import UserError

ENTRY = {"commands": ["python x.py"], "machine": "m", "date": "2026-11-24", "commit": "c", "seconds": 60}
MEMORY = {**ENTRY, "rows": [{"choice": "zero3", "ranks": 2, "at rest, MiB": 1024.5, "peak, MiB": 2048.0}]}


def test_documents_are_in_step_with_the_data() -> None:
    assert list(out_of_step(json.loads(publish.DATA.read_text()))) == []


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with a table and a picture of one section, in a place of its own, in step."""
    monkeypatch.setattr(publish_blocks, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a\n<!-- results:memory -->\n<!-- /results -->\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text("<!-- results:about -->\n<!-- /results -->\n<!-- results:memory-picture -->\n<!-- /results -->\n")
    render({"memory": MEMORY})
    return page


def test_blocks_are_filled(page: Path, tmp_path: Path) -> None:
    assert list(out_of_step({"memory": MEMORY})) == []
    readme = (tmp_path / "README.md").read_text()
    assert "| choice | ranks | at rest, MiB | peak, MiB |" in readme and "| `zero3` | 2 | 1,024.5 | 2,048.0 |" in readme
    assert readme.startswith("a\n<!-- results:memory -->\n|") and "\n    python x.py\n<!-- /results -->\n" in readme
    assert "| `memory` | m | 2026-11-24 | c | 60 |" in page.read_text() and "(results/memory.svg)" in page.read_text()
    assert 0 < (tmp_path / "docs" / "results" / "memory.svg").stat().st_size < 100_000


def test_what_is_out_of_step_is_named(page: Path, tmp_path: Path) -> None:
    other = {**MEMORY, "rows": [{**MEMORY["rows"][0], "ranks": 4}]}
    assert list(out_of_step({"memory": other})) == [
        "README.md: block 'memory' is out of step with docs/results.json",
        "docs/results/memory.svg is out of step with docs/results.json",
    ]
    page.write_text("<!-- results:nothing -->\n<!-- /results -->\n")
    found = list(out_of_step({"memory": MEMORY}))
    assert found == ["docs/page.md: block 'nothing': docs/results.json has no section 'nothing'"]
    page.write_text("<!-- results:memory -->\n")
    with pytest.raises(UserError, match=r"docs/page.md: a block of results has no beginning or no end"):
        render({"memory": MEMORY})


def test_figures_are_scaled_and_have_as_many_digits_as_their_column() -> None:
    rows = publish.rows_of(
        pd.DataFrame({"bytes": [2**20, 1.26 * 2**20], "ms": [1.0, None], "choice": ["a", "b"]}),
        {"choice": ["choice"], "MiB": ["bytes", 2**-20, 1], "ms": ["ms", 1, 1]},
    )
    assert rows == [{"choice": "a", "MiB": 1.0, "ms": 1.0}, {"choice": "b", "MiB": 1.3, "ms": None}]
    assert table(rows).splitlines()[2:] == ["| a | 1.0 | 1.0 |", "| b | 1.3 | – |"]


def test_every_section_is_in_the_results() -> None:
    sections = tomllib.loads((publish.ROOT / "benchmarks" / "publish.toml").read_text())
    assert list(json.loads(publish.DATA.read_text())) == list(sections)
    shown = (publish.ROOT / "docs" / "results.md").read_text()
    assert all(f"<!-- results:{name} -->" in shown for name in [*sections, *publish_blocks.PICTURES])


def test_a_failing_command_is_one_line_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^no such thing \(python -c"):
        publish.run("python -c \"import sys; print('error: no such thing'); sys.exit(1)\"", tmp_path / "log")

"""Published results: documents are in step with the data, and what is not is named."""

import json
import tomllib
from pathlib import Path

import pytest

from benchmarks import publish
from benchmarks.publish import render
from ddp_lab.runtime.errors import UserError

ENTRY = {"commands": ["python x.py"], "machine": "m", "date": "2026-11-24", "commit": "c", "seconds": 60}
STEP = {"step, ms": 100.0, "compute, %": 60.0, "exposed, %": None, "idle, %": 40.0}
DATA = {name: {**ENTRY, "rows": [{"choice": "zero3", "ranks": 1024, **STEP}]} for name in publish.SWEEPS}


def test_documents_are_in_step_with_the_data() -> None:
    assert render(publish.ROOT, json.loads((publish.ROOT / "docs" / "results.json").read_text()), is_dry=True) == []


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with a table and the picture, filled."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a\n<!-- results:sweep-ddp -->\n<!-- /results -->\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text("<!-- results:about -->\n<!-- /results -->\n<!-- results:sweep-picture -->\n<!-- /results -->\n")
    assert len(render(tmp_path, DATA, is_dry=False)) == 3
    return page


def test_blocks_are_filled(page: Path, tmp_path: Path) -> None:
    assert render(tmp_path, DATA, is_dry=True) == []
    readme = (tmp_path / "README.md").read_text()
    assert "| choice | ranks | step, ms |" in readme and "| `zero3` | 1,024 | 100.0 | 60.0 | – | 40.0 |" in readme
    assert readme.startswith("a\n<!-- results:sweep-ddp -->\n|") and "\n    python x.py\n<!-- /results -->\n" in readme
    assert "| `sweep-ddp` | m | 2026-11-24 | c | 60 |" in page.read_text() and "(results/sweep.svg)" in page.read_text()
    assert 0 < (tmp_path / publish.PICTURE).stat().st_size < 100_000
    slow = {"choice": "slow", "ranks": 1024, **STEP, "step, ms": 9000.0}
    outlier = {name: {**ENTRY, "rows": [*DATA[name]["rows"], slow]} for name in DATA}
    render(tmp_path, outlier, is_dry=False)
    assert (tmp_path / publish.PICTURE).read_text().count("▸ 9,000 ms") >= 2


def test_what_is_out_of_step_is_named(page: Path, tmp_path: Path) -> None:
    other = {**DATA, "sweep-ddp": {**ENTRY, "rows": [{"choice": "zero3", "ranks": 4, **STEP}]}}
    before = (tmp_path / "README.md").read_text()
    assert render(tmp_path, other, is_dry=True) == ["README.md", "docs/results/sweep.svg"]
    assert (tmp_path / "README.md").read_text() == before
    page.write_text("<!-- results:nothing -->\n<!-- /results -->\n")
    with pytest.raises(UserError, match=r"docs/page.md: block 'nothing': docs/results.json has no such section"):
        render(tmp_path, DATA, is_dry=True)


def test_every_section_is_in_the_results() -> None:
    sections = tomllib.loads((publish.ROOT / "benchmarks" / "publish.toml").read_text())
    data = json.loads((publish.ROOT / "docs" / "results.json").read_text())
    assert {name: list(entry["rows"][0]) for name, entry in data.items()} == {
        name: [heading for heading, *_ in section["columns"]] for name, section in sections.items()
    }
    shown = (publish.ROOT / "docs" / "results.md").read_text()
    assert all(f"<!-- results:{name} -->" in shown for name in [*sections, "sweep-picture"])

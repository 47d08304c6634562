"""Published results: documents are in step with the data, and what is not is named."""

import json
import tomllib

from benchmarks import publish
from benchmarks.publish import render


def test_documents_are_in_step_with_the_data():
    assert render(publish.ROOT, json.loads((publish.ROOT / "docs" / "results.json").read_text()), is_dry=True) == []


def test_every_section_is_in_the_results():
    sections = tomllib.loads((publish.ROOT / "benchmarks" / "publish.toml").read_text())
    data = json.loads((publish.ROOT / "docs" / "results.json").read_text())
    assert {name: list(entry["rows"][0]) for name, entry in data.items()} == {
        name: [heading for heading, *_ in section["columns"]] for name, section in sections.items()
    }
    shown = (publish.ROOT / "docs" / "results.md").read_text()
    assert all(f"<!-- results:{name} -->" in shown for name in sections)

"""The pages of docs/how-it-works: none is missing or incomplete, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from ddp_lab.families import FAMILIES

PAGES = Path(__file__).parents[1] / "docs" / "how-it-works"
PAPER = re.compile(r"^## Papers?\b[^#]*\b(19|20)\d\d\b|^- Papers?: .*\b(19|20)\d\d\b", re.MULTILINE)


def test_every_hand_written_choice_has_a_whole_page():
    """A data-parallel choice without shards has a section of the page on data parallelism, and a row in its table."""
    choices = [
        choice
        for folder, family in FAMILIES.items()
        for choice in family.registry.sentences
        if family.registry.location(choice).startswith(f"{folder}.")
    ]
    assert len(choices) >= 9
    index = (PAGES / "README.md").read_text()
    replicated = (PAGES / "data_parallel.md").read_text()
    for choice in choices:
        if choice.startswith("zero"):
            text = (PAGES / f"{choice}.md").read_text()
            assert f"]({choice}.md)" in index and "| measured |" in text, choice
            assert text.index(f"]({choice}.svg)") < text.index(f"]({choice}.png)"), choice
        else:
            assert f"](data_parallel.md#{choice})" in index and f"\n| `{choice}` | " in replicated, choice
            assert replicated.index("](ddp.svg)") < replicated.index(f"\n## {choice}\n"), choice
            text = replicated.split(f"\n## {choice}\n")[1].split("\n## ")[0]
        assert f"]({choice}.png)" in text and PAPER.search(text), choice


@pytest.mark.parametrize("page", [*PAGES.glob("*.md"), PAGES.parent / "glossary.md"], ids=lambda page: page.stem)
def test_links_and_pictures_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []

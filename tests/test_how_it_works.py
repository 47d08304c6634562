"""The pages of docs/how-it-works: that none is missing or incomplete, and that links lead somewhere."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddp_lab.families import FAMILIES

PAGES = Path(__file__).parents[1] / "docs" / "how-it-works"
PAPER = re.compile(r"^## Papers?\n[^#]*\b(19|20)\d\d\b", re.MULTILINE)


def hand_written():
    """The choices whose code is in this repository's ddp/ and sharding/, one name for each class."""
    registries = {folder: family.registry for folder, family in FAMILIES.items()}
    return [
        choice
        for folder, registry in registries.items()
        for choice in registry.sentences
        if registry.location(choice).startswith(f"{folder}.")
    ]


def test_every_hand_written_choice_has_a_whole_page():
    choices = hand_written()
    assert len(choices) >= 9
    index = (PAGES / "README.md").read_text()
    for choice in choices:
        text = (PAGES / f"{choice}.md").read_text()
        assert f"]({choice}.md)" in index, choice
        assert f"]({choice}.png)" in text and "| measured |" in text and PAPER.search(text), choice
        drawing = choice if choice.startswith("zero") else "ddp"
        assert text.index(f"]({drawing}.svg)") < text.index(f"]({choice}.png)"), choice


def test_drawings_are_those_of_their_program():
    drawings = runpy.run_path(str(PAGES / "draw.py"))["drawings"]()
    assert {path.name: path.read_text() for path in PAGES.glob("*.svg")} == drawings
    for drawing in drawings.values():
        ElementTree.fromstring(drawing)


@pytest.mark.parametrize("page", [*PAGES.glob("*.md"), PAGES.parent / "glossary.md"], ids=lambda page: page.stem)
def test_links_and_pictures_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []

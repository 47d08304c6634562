"""docs/own-loop.md and the refusals that the cases hold."""

from pathlib import Path

from tests.strategies.cases import REFUSALS


def test_each_refusal_is_documented():
    rows = [line for line in Path("docs/own-loop.md").read_text().splitlines() if line.startswith("| ")]
    for refusal in REFUSALS:
        assert any(f"`{refusal.says}`" in row for row in rows), refusal

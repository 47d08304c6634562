"""The script that finds out why ranks on one card hang: here over Gloo, where it must see a hang that is planted."""

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.shared_card_hang import SEEN, VARIANTS
from tests.tables import each_row

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@each_row("planted", [False, True])
def test_a_planted_hang_is_seen(planted: bool) -> None:
    flags = ["--cpu", "--only", SEEN, "new_group", "two ranks", "--still-s", "4", *["--plant"] * planted]
    command = [sys.executable, "scripts/shared_card_hang.py", *flags]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200).stdout
    outcomes = [line.split()[-1] if "passes" in line else "hangs" for line in said.splitlines()[:3]]
    assert outcomes == (["hangs", "hangs", "passes"] if planted else ["passes"] * 3), said
    assert ("plain torch does not hang" in said) == (not planted) and ("limit of two ranks" in said) == planted


def test_every_variant_is_documented() -> None:
    text = (ROOT / "docs" / "cuda.md").read_text()
    assert not [name for name in VARIANTS if f"`{name}`" not in text]

"""The built-in samples, for workloads that need no download: reviews with one to five stars, and English prose.

Both are this project's own text: the reviews in the schema of Yelp/yelp_review_full, and the prose from its
documentation of November 2026. Each has a byte-level BPE tokenizer that was trained on it.
"""

import lzma
from functools import cache
from pathlib import Path
from typing import TypedDict

STARS = 5
TRAINING_REVIEWS = 2400
HELD_OUT = 10
"""One document of so many is held out."""
FOLDER = Path(__file__).parent


class Review(TypedDict):
    """`label`: stars less one, 0 to 4. `text`: one paragraph."""

    label: int
    text: str


def reviews(count: int, held_out: int) -> tuple[list[Review], list[Review]]:
    """So many to train on, and held-out ones. Where more are asked for than there are, they repeat."""
    rows = [line.split("\t") for line in _text("reviews").splitlines()]
    samples: list[Review] = [{"label": int(label), "text": text} for label, text in rows]
    train, evaluation = samples[:TRAINING_REVIEWS], samples[TRAINING_REVIEWS:]
    return [train[i % len(train)] for i in range(count)], [evaluation[i % len(evaluation)] for i in range(held_out)]


def prose() -> tuple[list[str], list[str]]:
    """Documents to train on, and held-out ones. A paragraph is a line."""
    documents = _text("prose").split("\n\n")
    held_out = documents[HELD_OUT // 2 :: HELD_OUT]
    return [document for document in documents if document not in held_out], held_out


def tokenizer_json(name: str) -> str:
    return (FOLDER / f"{name}.tokenizer.json").read_text()


@cache
def _text(name: str) -> str:
    return lzma.decompress((FOLDER / f"{name}.txt.xz").read_bytes()).decode()

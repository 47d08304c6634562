"""The picture of blocks on the page of context parallelism is of a run of this code."""

import csv
import runpy
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from tests.ranks import RankPool

PAGES = Path(__file__).parents[2] / "docs" / "how-it-works"
TIMES = ("start_ms", "end_ms")


def recorded() -> list[dict[str, Any]]:
    program = runpy.run_path(str(PAGES / "record_context.py"))
    return [row for way in program["WAYS"] for row in program["recorded"](way, 5.0)]


def test_the_picture_shows_who_computes_what(ranks: RankPool) -> None:
    drawn: list[dict[str, str]] = list(csv.DictReader((PAGES / "context_parallel.csv").open()))
    for mine in ranks.run(4, recorded):
        for row, kept in zip(mine, drawn, strict=True):
            assert [str(row[name]) for name in row if name not in TIMES] == [kept[n] for n in row if n not in TIMES]
    for way, chunks in (("ring", 4), ("zigzag", 8)):
        of_way = [row for row in drawn if row["way"] == way]
        seen = Counter(
            cell for row in of_way for cell in product(row["query_chunks"].split(), row["key_chunks"].split())
        )
        below = {(str(query), str(key)) for query in range(chunks) for key in range(query + 1)}
        assert below <= seen.keys() and set(seen.values()) == {1}, "each block of the mask is computed once"
        assert all(int(query) < int(key) for query, key in seen.keys() - below)
        last = {rank: max(float(row["end_ms"]) for row in of_way if row["rank"] == rank) for rank in "0123"}
        assert (last["3"] > 5 * last["0"]) == (way == "ring"), "2n - 1 times as much to compute, or as much"

"""Draws the ideas of the strategies into the SVG files beside it: `python docs/how-it-works/draw.py`.

A test compares the files with `drawings()`.
"""

import csv
import itertools
import re
from pathlib import Path

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1c1e21; } .b { font-weight: 600; } .m { text-anchor: middle; }
  .s { font-size: 12px; fill: #55595f; } .paper { fill: #fff; } .line { stroke: #55595f; fill: none; }
  .none { fill: none; stroke: #8c9096; stroke-dasharray: 3 2; } .a { fill: #a2a7ae; } .p { fill: #7b6fd0; }
  .g { fill: #cc6677; } .o { fill: #44aa99; } .f { fill: #56b4e9; } .c { fill: #e69f00; } .old { opacity: .35; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e8eaed; } .s { fill: #a9b0b8; } .paper { fill: #15181c; } .line { stroke: #a9b0b8; } }
  text.w { fill: #000; }
"""
HELD = "A, B: two parts of the model, in halves. Filled: the rank holds it. Faint: fills, or is old. Dashed: not there."
# Moments of a step, each with what is sent meanwhile.
ONCE = "forward:|backward of B:|backward of A:reduce-scatter B|wait:reduce-scatter A|optimizer:"
ONCE += "|next forward:all-gather A, then B"
EACH = "before:all-gather A|forward of A:all-gather B|forward of B:|backward of B:all-gather A"
EACH += "|backward of A:reduce-scatter B|wait:reduce-scatter A|optimizer:"
# Parameters, gradients and optimizer states of the units A and B at these moments.
# W: whole. S: the rank's own half. U: whole, but only its own half counts. P: whole, and old.
STATES = {
    "zero1": (ONCE, "WW WW WW WW UU WU", "PP PW WW WU UU PP", "SS SS SS SS SS SS"),
    "zero2": (ONCE, "WW WW WW WW UU WU", "SS SW WW WS SS SS", "SS SS SS SS SS SS"),
    "zero3": (EACH, "US WU SW UW WS SS SS", "SS SS SS SW WW WS SS", "SS SS SS SS SS SS SS"),
}
# What a rank computes, and below it what it sends, by the unit of time; equal digits are one call.
# F: forward. B: backward of one of three layers. O: optimizer. Two micro-batches a step.
TIMES = {
    "simple_ddp": ("FFBBB   FFBBB   OO", "     321     654"),
    "simple_ddp_ga": ("FFBBBFFBBB   OO", "          321"),
    "flat_ddp": ("FFBBBFFBBB  OO", "          11"),
    "simple_ddp_hook": ("FFBBBFFB B B OO", "        3 2 1"),
    "simple_ddp_async": ("FFBBBFFBBB OO", "        321"),
    "bucket_ddp_async": ("FFBBBFFBBB OO", "         21"),
}
NAMES = {"F": ("f", "F"), "B": ("p", "B"), "O": ("o", "O")}


def box(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect class="{look}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>\n'


def text(x: float, y: float, words: str, look: str = "") -> str:
    return f'<text class="{look}" x="{x:g}" y="{y:g}">{words}</text>\n'


def unit(x: float, y: float, state: str, rank: int, look: str) -> str:
    """A tensor as two halves, of which rank `rank` owns the one of that place."""
    own, other = {"W": (look, look), "S": (look, "none"), "U": (look, f"{look} old"), "P": (f"{look} old",) * 2}[state]
    return "".join(box(x + 22 * half, y, 21, 18, own if half == rank else other) for half in (0, 1))


def states(moments: str, *held: str) -> tuple[int, int, str]:
    """Which box is whole when, on two ranks."""
    drawn, columns = text(10, 18, HELD, "s") + text(10, 262, "sent meanwhile", "s"), moments.split("|")
    for place, (name, sent) in enumerate(moment.split(":") for moment in columns):
        x = 178 + 118 * place
        drawn += text(x + 48, 44, name, "m b") + text(x + 22, 62, "A", "m s") + text(x + 73, 62, "B", "m s")
        drawn += text(x + 48, 262, sent, "m")
        for rank, row, at in itertools.product((0, 1), range(3), (0, 1)):
            drawn += unit(x + 51 * at, 70 + 90 * rank + 25 * row, held[row].split()[place][at], rank, "pgo"[row])
    for rank in (0, 1):
        drawn += text(10, 109 + 90 * rank, f"rank {rank}", "b")
        for row, name in enumerate(("parameters", "gradients", "optimizer states")):
            drawn += text(62, 84 + 90 * rank + 25 * row, name)
    return 182 + 118 * len(columns), 276, drawn


def times() -> tuple[int, int, str]:
    """When gradients are sent."""
    drawn = text(10, 18, "One step of a rank, not to scale. F: forward, B: backward of a layer, O: optimizer;", "s")
    drawn += text(10, 34, "orange: an all-reduce. Compute waits where the upper row has a gap.", "s")
    for row, (name, lanes) in enumerate(TIMES.items()):
        drawn += text(10, 74 + 56 * row, name, "b")
        for lane, line in enumerate(lanes):
            for run in re.finditer(r"F+|O+|B|([1-9])\1*", line):
                look, shown = NAMES.get(run[0][0], ("c", ""))
                x, y, width = 160 + 34 * run.start(), 56 + 56 * row + 22 * lane, 34 * len(run[0]) - 2
                drawn += box(x, y, width, 20, look) + text(x + width / 2, y + 15, shown, "m w")
    return 790, 60 + 56 * len(TIMES), drawn


def cuts() -> tuple[int, int, str]:
    """An MLP on two ranks: the first matrix cut by columns, the second by rows, between f and g."""
    names = ("X", "A, by columns", "act(X A)", "B, by rows", "a term", "Y")
    drawn = "".join(text(105 + 140 * place, 24, name, "m b") for place, name in enumerate(names))
    for rank in (0, 1):
        y = 40 + 90 * rank
        drawn += text(10, y + 40, f"rank {rank}", "b") + box(80, y, 50, 70, "a") + box(780, y, 50, 70, "a")
        drawn += "".join(box(210 + 36 * half, y, 34, 70, "p" if half == rank else "none") for half in (0, 1))
        drawn += "".join(box(360 + 26 * half, y, 24, 70, "f" if half == rank else "none") for half in (0, 1))
        drawn += "".join(box(490, y + 36 * half, 70, 34, "p" if half == rank else "none") for half in (0, 1))
        drawn += box(640, y, 50, 70, "f old")
        for start, end in ((130, 208), (284, 358), (412, 488), (562, 638), (692, 778)):
            drawn += f'<path class="line" d="M{start + 3} {y + 35}H{end - 3}m-6 -5l6 5l-6 5"/>\n'
    for x, name, forward, backward in ((169, "f", "nothing", "all-reduce"), (735, "g", "all-reduce", "nothing")):
        drawn += box(x - 11, 36, 22, 168, "c") + text(x, 124, name, "m b w")
        drawn += text(x, 226, f"forward: {forward}", "m") + text(x, 244, f"backward: {backward}", "m")
    drawn += text(452, 226, "Each rank computes here alone, with its part of both matrices.", "m s")
    return 860, 258, drawn


def experts() -> tuple[int, int, str]:
    """Four tokens of each of two ranks go to four experts and back. A colour is an expert."""
    chosen, looks = ((0, 2, 2, 3), (1, 2, 0, 2)), "pgof"
    names = ("own tokens, routed", "sorted by expert", "where the experts are", "back, in order")
    drawn = "".join(text(170 + 200 * place, 24, name, "m b") for place, name in enumerate(names))
    arrived = [[one for every in chosen for one in every if one // 2 == rank] for rank in (0, 1)]
    for rank, own in enumerate(chosen):
        y, rows = 40 + 90 * rank, (own, sorted(own), sorted(arrived[rank]), own)
        drawn += text(10, y + 40, f"rank {rank}", "b")
        drawn += text(570, y + 72, f"experts {2 * rank}, {2 * rank + 1}: {len(arrived[rank])} rows", "m s")
        for place, row in enumerate(rows):
            x = 170 + 200 * place - 12 * len(row)
            drawn += "".join(box(x + 24 * at, y + 20, 22, 30, looks[expert]) for at, expert in enumerate(row))
            drawn += "".join(text(x + 24 * at + 11, y + 40, str(e), "m w") for at, e in enumerate(row))
    for x in (470, 690):
        drawn += box(x - 11, 36, 22, 168, "c") + text(x, 226, "all-to-all", "m")
    return 860, 240, drawn


def blocks() -> tuple[int, int, str]:
    """Which rank of a ring computed which block of the mask when, as `record_context.py` has recorded it."""
    rows = list(csv.DictReader((Path(__file__).parent / "context_parallel.csv").open()))
    drawn, looks = text(10, 18, "A colour is a rank; a number says in which turn it computes the block.", "s"), "pgof"
    per_ms = 560 / max(float(row["end_ms"]) for row in rows)
    for place, (way, of_way) in enumerate(itertools.groupby(rows, lambda row: row["way"])):
        top, turns = 66 + 250 * place, dict.fromkeys("0123", 0)
        side = 200 // (8 if way == "zigzag" else 4)
        drawn += text(10, top - 14, way, "b") + text(190, top - 14, "keys of the sequence", "m s")
        drawn += text(600, top - 14, "time, ms", "m s") + text(18, top + 104, "queries", "s")
        for row in of_way:
            rank, turn = row["rank"], turns[row["rank"]]
            turns[rank] += 1
            look, at = looks[int(rank)], top + 8 + 46 * int(rank)
            for query, key in itertools.product(row["query_chunks"].split(), row["key_chunks"].split()):
                drawn += cell(80 + side * int(key), top + side * int(query), side, look, turn, int(query) - int(key))
            start, end = (per_ms * float(row[name]) for name in ("start_ms", "end_ms"))
            drawn += box(330 + start, at, end - start - 1, 34, look)
            drawn += text(330 + (start + end) / 2, at + 22, f"{turn}", "m w")
        for rank in range(4):
            drawn += text(288, top + 30 + 46 * rank, f"rank {rank}")
        for ms in range(0, 351, 50):
            drawn += text(330 + per_ms * ms, top + 206, f"{ms}", "m s")
    return 910, 540, drawn


def cell(x: float, y: float, side: float, look: str, turn: int, below: int) -> str:
    """What queries of a chunk see of the keys of a chunk: all if `below` the diagonal, half on it, and else nothing."""
    if below < 0:
        return ""
    corners = f"M{x} {y}L{x + side - 1} {y + side - 1}H{x}Z"
    shape = box(x, y, side - 1, side - 1, look) if below else f'<path class="{look}" d="{corners}"/>\n'
    return shape + text(x + side * (0.5 if below else 0.3), y + side * (0.5 if below else 0.72) + 5, f"{turn}", "m w")


def loads() -> tuple[int, int, str]:
    """What each expert of a layer got in each step, as `record_experts.py` has recorded it."""
    rows = list(csv.DictReader((Path(__file__).parent / "expert_load.csv").open()))
    drawn, shades = text(10, 18, "Darker: more of the layer's tokens. An even share, and 2 and 3 times that:", "s"), 6
    for times in (1, 2, 3):
        drawn += box(476 + 24 * times, 6, 14, 14, f'p" fill-opacity="{times / 3:.2f}')
    for place, (way, of_way) in enumerate(itertools.groupby(rows, lambda row: row["way"])):
        top, paths = 56 + 150 * place, [""] * (shades + 1)
        drawn += text(10, top - 10, way, "b") + text(560, top - 10, "step", "m s")
        for row in of_way:
            counts = [int(row[f"expert_{expert}"]) for expert in range(8)]
            for expert, count in enumerate(counts):
                shade = min(shades, round(8 * count / sum(counts) * shades / 3))
                paths[shade] += f"M{90 + 13 * int(row['step'])} {top + 14 * expert}h12v13h-12z"
        for shade, path in enumerate(paths):
            drawn += f'<path class="p" fill-opacity="{shade / shades:.2f}" d="{path}"/>\n' if path else ""
        for expert in range(8):
            drawn += text(10, top + 11 + 14 * expert, f"expert {expert}", "s")
        for step in range(0, 60, 10):
            drawn += text(96 + 13 * step, top + 128, f"{step}", "m s")
    return 890, 346, drawn


def drawings() -> dict[str, str]:
    """Each file's content by its name."""
    made = {f"{name}.svg": states(*rows) for name, rows in STATES.items()}
    made |= {"ddp.svg": times(), "tensor_parallel.svg": cuts(), "expert_parallel.svg": experts()}
    made |= {"context_parallel.svg": blocks(), "expert_load.svg": loads()}
    size = 'width="{0}" height="{1}" viewBox="0 0 {0} {1}"'
    return {
        name: f'<svg xmlns="http://www.w3.org/2000/svg" {size.format(width, height)}>\n<style>{STYLE}</style>\n'
        f"{box(0, 0, width, height, 'paper')}{drawn}</svg>\n"
        for name, (width, height, drawn) in made.items()
    }


if __name__ == "__main__":
    for name, drawn in drawings().items():
        (Path(__file__).parent / name).write_text(drawn)

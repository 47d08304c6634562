"""Tables and pictures of the published data, and the blocks of documents that show them.

A block of a Markdown file is what stands between `<!-- results:NAME -->` and `<!-- /results -->`. NAME is a section of
`docs/results.json`, a picture of `PICTURES`, or `about`.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(^<!-- results:([\w-]+) -->\n)(.*?)(^<!-- /results -->)", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"^<!-- (?:results:|/results)", re.MULTILINE)
PICTURES = {
    "sweep-picture": (["sweep-ddp", "sweep-sharding"], "Time of one step of every strategy, by what it is spent on"),
    "memory-picture": (["memory"], "Memory of one rank with two and with four ranks"),
    "links-picture": (["links"], "Step time over the rate of the link"),
}
"""The sections that a picture shows, and its text for those who do not see it."""
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C8C8C")
Rows = Sequence[dict[str, Any]]
Data = dict[str, dict[str, Any]]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def picture_path(name: str) -> Path:
    return ROOT / "docs" / "results" / f"{name.removesuffix('-picture')}.svg"


def filled(path: Path, data: Data) -> str:
    """The document with all its blocks as the data has them.

    Raises:
        UserError: a block has no beginning or no end, or there is no data for it.
    """
    text = path.read_text()
    if len(MARKER.findall(text)) != 2 * len(BLOCK.findall(text)):
        raise UserError(f"{path.relative_to(ROOT)}: a block of results has no beginning or no end")
    return BLOCK.sub(lambda found: f"{found[1]}{content(found[2], path, data)}\n{found[4]}", text)


def content(name: str, path: Path, data: Data) -> str:
    """The text of a block in the document `path`.

    Raises:
        UserError: there is no data for it.
    """
    parts, words = PICTURES.get(name, ([] if name == "about" else [name], ""))
    if missing := [part for part in parts if part not in data]:
        raise UserError(f"{path.relative_to(ROOT)}: block '{name}': docs/results.json has no section '{missing[0]}'")
    if name == "about":
        rows = [
            {"section": f"`{section}`", **{key: entry[key] for key in ("machine", "date", "commit", "seconds")}}
            for section, entry in data.items()
        ]
        return table(rows)
    if words:
        return f"![{words}]({os.path.relpath(picture_path(name), path.parent)})"
    rows = [{**row, first: f"`{row[first]}`"} for row in data[name]["rows"] for first in list(row)[:1]]
    commands = "\n".join(f"    {command}" for command in data[name]["commands"])
    return f"{table(rows)}\n\n{commands}"


def table(rows: Rows) -> str:
    """Markdown; all numbers of a column have as many digits after the point."""
    columns = {heading: cells([row[heading] for row in rows]) for heading in rows[0]}
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(values: Sequence[Any]) -> list[str]:
    digits = max((len(str(value).partition(".")[2]) for value in values if isinstance(value, float)), default=0)
    return ["–" if value is None else value if isinstance(value, str) else f"{value:,.{digits}f}" for value in values]


def out_of_step(data: Data) -> Iterator[str]:
    """A sentence for each block and picture that differs from the data."""
    for path in documents():
        try:
            wanted = BLOCK.findall(filled(path, data))
        except UserError as error:
            yield str(error)
            continue
        for (_, name, found, _), (_, _, expected, _) in zip(BLOCK.findall(path.read_text()), wanted, strict=True):
            if found != expected:
                yield f"{path.relative_to(ROOT)}: block '{name}' is out of step with docs/results.json"
    for name, (parts, _) in PICTURES.items():
        path = picture_path(name)
        if set(parts) <= set(data) and not (path.exists() and digest(name, data) in path.read_text()):
            yield f"{path.relative_to(ROOT)} is out of step with docs/results.json"


def digest(name: str, data: Data) -> str:
    """Stands in a picture's file, so that a picture of older data is found."""
    rows = [data[part]["rows"] for part in PICTURES[name][0]]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def render(data: Data) -> None:
    """Draw the pictures, and fill the blocks of all documents.

    Raises:
        UserError: a block is broken, or has no data.
    """
    for name, (parts, _) in PICTURES.items():
        if set(parts) <= set(data):
            draw(name, data)
    for path in documents():
        text = filled(path, data)
        if text != path.read_text():
            path.write_text(text)
            print(f"filled {path.relative_to(ROOT)}")


def draw(name: str, data: Data) -> None:
    """Write a picture as SVG, the same bytes for the same data."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9})
    rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    parts, drawing = PICTURES[name][0], {"sweep": draw_sweep, "memory": draw_memory, "links": draw_links}
    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        axes.set_title({"sweep-ddp": "replicated", "sweep-sharding": "sharded"}.get(part, ""))
        drawing[name.removesuffix("-picture")](axes, data[part]["rows"])
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    picture_path(name).parent.mkdir(exist_ok=True)
    figure.savefig(picture_path(name), metadata={"Date": None, "Description": digest(name, data)})


def draw_sweep(axes: "Axes", rows: Rows) -> None:
    names, left = [row["choice"] for row in rows], [0.0] * len(rows)
    for part, colour in (("compute", COLOURS[0]), ("exposed", COLOURS[1]), ("idle", COLOURS[5])):
        widths = [row["step, ms"] * (row[f"{part}, %"] or 0) / 100 for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=f"{part} communication" if part == "exposed" else part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")


def draw_memory(axes: "Axes", rows: Rows) -> None:
    names = [f"{row['choice']}, {row['ranks']} ranks" for row in rows]
    axes.barh(names, [row["peak, MiB"] for row in rows], color=COLOURS[4], label="peak of a step")
    axes.barh(names, [row["at rest, MiB"] for row in rows], color=COLOURS[0], label="at rest")
    axes.invert_yaxis()
    axes.set_xlabel("MiB a rank")


def draw_links(axes: "Axes", rows: Rows) -> None:
    choices = list(dict.fromkeys(row["choice"] for row in rows))
    for colour, choice in zip(COLOURS, choices, strict=False):
        mine = sorted((row["link, Mbit/s"], row["step, ms"]) for row in rows if row["choice"] == choice)
        axes.loglog(*zip(*mine, strict=True), marker="o", color=colour, label=choice)
    rates = sorted({row["link, Mbit/s"] for row in rows})
    axes.set_xticks(rates, [f"{rate:,} Mbit/s" for rate in rates])
    axes.set_yticks(ticks := [100, 200, 500, 1000, 2000, 5000], [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylabel("ms a step")

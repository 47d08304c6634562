"""Run the benchmarks, and write what they measured into docs/results.json, docs/results/ and the blocks of documents.

    python benchmarks/publish.py                  # all of it, about 20 minutes on two cores; the machine must be quiet
    python benchmarks/publish.py --only memory    # one section; the others keep their data
    python benchmarks/publish.py --render         # measure nothing, fill the blocks of README.md and docs
    python benchmarks/publish.py --check          # for CI: exit code 1 if a document is out of step with the data

benchmarks/publish.toml lists the sections. A block of a document is what stands between `<!-- results:NAME -->` and
`<!-- /results -->`; NAME is a section, `about` or `sweep-picture`. Exit code 0: done. 1: a section failed, or --check
found something; a line on standard error says what. 2: the command line makes no sense.
"""

import argparse
import datetime
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.runtime.cli import OneLineParser, names_of
from ddp_lab.runtime.errors import UserError

BLOCK = re.compile(r"(^<!-- results:([\w-]+) -->\n)(.*?)(^<!-- /results -->)", re.DOTALL | re.MULTILINE)
SWEEPS = {"sweep-ddp": "replicated", "sweep-sharding": "sharded"}
PICTURE, SAYS = Path("docs/results/sweep.svg"), "Time of one step of every strategy, by what it is spent on"
COLOURS = {"compute": "#0072B2", "exposed": "#E69F00", "idle": "#8C8C8C"}
Data = dict[str, dict[str, Any]]


def main() -> int:
    sections: dict[str, Any] = tomllib.loads((ROOT / "benchmarks" / "publish.toml").read_text())
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(sections)
    parser.add_argument("--only", type=names_of("section", list(sections)), default=list(sections), help=f"of {names}")
    parser.add_argument("--render", action="store_true", help="measure nothing; fill the blocks of documents")
    parser.add_argument("--check", action="store_true", help="write nothing; name what is out of step")
    options = parser.parse_args()
    path = ROOT / "docs" / "results.json"
    data: Data = json.loads(path.read_text())
    git = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]  # before data are written
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    try:
        for name in [] if options.check or options.render else options.only:
            print(f"{name} ...", flush=True)
            found = data | {name: measure(sections[name], commit)}
            data = {each: found[each] for each in sections if each in found}
            path.write_text(json.dumps(data, indent=1) + "\n")
        stale = render(ROOT, data, is_dry=options.check)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name in stale if options.check else []:
        print(f"error: {name} is out of step; run python benchmarks/publish.py --render", file=sys.stderr)
    return int(options.check and bool(stale))


def measure(section: dict[str, Any], commit: str) -> dict[str, Any]:
    """Run a section's commands; its rows, and how and when they were measured.

    Raises:
        UserError: a command failed.
    """
    import pandas as pd

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="publish-") as folder:
        for command in section["commands"]:
            run(command.format(folder=folder))
        paths = sorted(Path(folder).glob(section["tables"]), key=lambda path: path.stat().st_mtime)
        rows = [row for path in paths for row in pd.read_csv(path).to_dict("records")]
    return {
        "machine": machine(),
        "commit": commit,
        "commands": [command.format(folder="FOLDER") for command in section["commands"]],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(time.monotonic() - started),
        "rows": [{heading: scaled(row[name], *by) for heading, name, *by in section["columns"]} for row in rows],
    }


def run(command: str) -> None:
    """Run a command line in this Python's environment.

    Raises:
        UserError: it failed; carries its own error line, or the last line that it printed.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": path}
    answer = subprocess.run(shlex.split(command), cwd=ROOT, env=environment, capture_output=True, text=True)
    if answer.returncode:
        lines = [line for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("error: ")), (lines or ["it printed nothing"])[-1])
        raise UserError(f"{reason.removeprefix('error: ')} ({command})")


def scaled(value: Any, factor: float | None = None, digits: int = 0) -> Any:
    """A number times `factor` with so many digits after the point, a whole number if none; None for no value."""
    if value != value:  # pandas' nan
        return None
    return value if factor is None else round(float(value) * factor, digits or None)


def machine() -> str:
    """Hardware and torch of this machine, in words, without its name."""
    import torch

    from ddp_lab.machine import cpu_name, physical_memory

    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())) or "no GPU"
    processor = cpu_name().replace(" x ", " cores of ", 1)
    return f"{processor}, {physical_memory() / 2**30:.0f} GiB, {gpus}, torch {torch.__version__}"


def render(root: Path, data: Data, is_dry: bool) -> list[str]:
    """Fill the blocks of README.md and docs under `root`, and draw the picture; what was out of step.

    Args:
        is_dry: Write nothing.

    Raises:
        UserError: a block has no data.
    """
    stale = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        before = path.read_text()
        after = BLOCK.sub(
            lambda found, path=path: f"{found[1]}{content(found[2], path, root, data)}\n{found[4]}", before
        )
        if after != before:
            stale.append(str(path.relative_to(root)))
            if not is_dry:
                path.write_text(after)
    digest = hashlib.sha256(json.dumps([data[sweep]["rows"] for sweep in SWEEPS]).encode()).hexdigest()[:16]
    picture = root / PICTURE
    if not (picture.exists() and digest in picture.read_text()):
        stale.append(str(PICTURE))
        if not is_dry:
            draw(picture, data, digest)
    return stale


def content(name: str, path: Path, root: Path, data: Data) -> str:
    """The text of a block in the document `path`.

    Raises:
        UserError: there is no data for it.
    """
    if name == "sweep-picture":
        return f"![{SAYS}]({os.path.relpath(root / PICTURE, path.parent)})"
    if name == "about":
        shown = ("machine", "date", "commit", "seconds")
        return table([{"section": f"`{each}`", **{key: found[key] for key in shown}} for each, found in data.items()])
    if name not in data:
        raise UserError(f"{path.relative_to(root)}: block '{name}': docs/results.json has no such section")
    first = next(iter(data[name]["rows"][0]))
    rows = [{**row, first: f"`{row[first]}`"} for row in data[name]["rows"]]
    return "\n".join([table(rows), "", *(f"    {command}" for command in data[name]["commands"])])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; all numbers of a column have as many digits after the point."""
    columns = {heading: cells([row[heading] for row in rows]) for heading in rows[0]}
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *zip(*columns.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(values: Sequence[Any]) -> list[str]:
    digits = max((len(str(value).partition(".")[2]) for value in values if isinstance(value, float)), default=0)
    return ["–" if value is None else value if isinstance(value, str) else f"{value:,.{digits}f}" for value in values]


def draw(path: Path, data: Data, digest: str) -> None:
    """Write the picture of the sweeps as SVG. It carries `digest`, so that a picture of older data is found."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    from ddp_lab.analysis.report.figures import axis_end

    rcParams.update({"svg.hashsalt": "sweep-picture", "svg.fonttype": "none", "font.size": 9})
    rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    for axes, (sweep, title) in zip(figure.subplots(1, len(SWEEPS)), SWEEPS.items(), strict=True):
        rows = data[sweep]["rows"]
        names, left = [row["choice"] for row in rows], [0.0] * len(rows)
        for part, colour in COLOURS.items():
            widths = [row["step, ms"] * (row[f"{part}, %"] or 0) / 100 for row in rows]
            label = f"{part} communication" if part == "exposed" else part
            axes.barh(names, widths, left=left, color=colour, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        room = 1.05 * (end := axis_end(left))
        axes.set(title=title, xlabel="ms a step", xlim=(0, room))
        for name, whole in zip(names, left, strict=True):
            if whole > end:
                axes.text(room, name, f"▸ {whole:,.0f} ms", ha="right", va="center", backgroundcolor="white")
        axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": digest})


if __name__ == "__main__":
    sys.exit(main())

"""Run the benchmarks, and write what they measured into docs/results.json and the blocks of documents.

    python benchmarks/publish.py                  # all of it, about 20 minutes on two cores; the machine must be quiet
    python benchmarks/publish.py --only memory    # one section; the others keep their data
    python benchmarks/publish.py --render         # measure nothing, fill the blocks of README.md and docs
    python benchmarks/publish.py --check          # for CI: exit code 1 if a document is out of step with the data

benchmarks/publish.toml lists the sections. A block of a document is what stands between `<!-- results:NAME -->` and
`<!-- /results -->`; NAME is a section, or `about`. Exit code 0: done. 1: a section failed, or --check
found something; a line on standard error says what. 2: the command line makes no sense.
"""

import datetime
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

from ddp_lab.runtime.cli import ROOT, OneLineParser, names_of
from ddp_lab.runtime.errors import UserError

BLOCK = re.compile(r"(^<!-- results:([\w-]+) -->\n)(.*?)(^<!-- /results -->)", re.DOTALL | re.MULTILINE)
Data = dict[str, dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    sections: dict[str, Any] = tomllib.loads((ROOT / "benchmarks" / "publish.toml").read_text())
    parser = OneLineParser(description=__doc__)
    names = ", ".join(sections)
    parser.add_argument("--only", type=names_of("section", list(sections)), default=list(sections), help=f"of {names}")
    parser.add_argument("--render", action="store_true", help="measure nothing; fill the blocks of documents")
    parser.add_argument("--check", action="store_true", help="write nothing; name what is out of step")
    options = parser.parse_args(arguments)
    path = ROOT / "docs" / "results.json"
    data: Data = json.loads(path.read_text())
    git = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]  # before data are written
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    try:
        for name in [] if options.check or options.render else options.only:
            print(f"{name} ...", flush=True)
            measured = data | {name: measure(sections[name], commit)}
            data = {section: measured[section] for section in sections if section in measured}
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
    """Fill the blocks of README.md and docs under `root`; what was out of step.

    Args:
        is_dry: Write nothing.

    Raises:
        UserError: a block has no data.
    """
    stale = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        before = path.read_text()
        after = BLOCK.sub(
            lambda block, path=path: f"{block[1]}{content(block[2], path, root, data)}\n{block[4]}", before
        )
        if after != before:
            stale.append(str(path.relative_to(root)))
            if not is_dry:
                path.write_text(after)
    return stale


def content(name: str, path: Path, root: Path, data: Data) -> str:
    """The text of a block in the document `path`.

    Raises:
        UserError: there is no data for it.
    """
    if name == "about":
        shown = ("machine", "date", "commit", "seconds")
        return table(
            [{"section": f"`{section}`", **{key: entry[key] for key in shown}} for section, entry in data.items()]
        )
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


if __name__ == "__main__":
    sys.exit(main())

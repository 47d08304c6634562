"""Run the benchmarks, and write what they measured into docs/results.json, docs/results/ and the blocks of documents.

    python benchmarks/publish.py                  # all of it, about 20 minutes on two cores; the machine must be quiet
    python benchmarks/publish.py --only memory    # one section; the others keep their data
    python benchmarks/publish.py --render         # measure nothing, fill the blocks of README.md and docs
    python benchmarks/publish.py --check          # for CI: exit code 1 if a document is out of step with the data

benchmarks/publish.toml lists the sections. The data is written after each of them. Exit code 0: done. 1: a section
failed, or --check found something; a line on standard error says what. 2: the command line makes no sense.
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.collectives import names_of
from benchmarks.link_lab.shaping import require_tools
from benchmarks.publish_blocks import Data, out_of_step, render
from ddp_lab.runtime.cli import OneLineParser
from ddp_lab.runtime.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

DATA = ROOT / "docs" / "results.json"


def main() -> int:
    sections: dict[str, Any] = tomllib.loads((ROOT / "benchmarks" / "publish.toml").read_text())
    sections["sweep-sharding"]["columns"] = sections["sweep-ddp"]["columns"]
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(sections)
    parser.add_argument("--only", type=names_of("section", list(sections)), default=list(sections), help=f"of {names}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and steps: to try the command")
    parser.add_argument("--render", action="store_true", help="measure nothing; fill the blocks of documents")
    parser.add_argument("--check", action="store_true", help="write nothing; name the blocks that are out of step")
    options = parser.parse_args()
    data: Data = json.loads(DATA.read_text()) if DATA.exists() else {}
    if options.check:
        problems = list(out_of_step(data))
        for problem in problems:
            print(f"error: {problem}; run python benchmarks/publish.py --render", file=sys.stderr)
        return 1 if problems else 0
    try:
        all_measured = options.render or measure_all(sections, options.only, options.quick, data)
        render({name: data[name] for name in sections if name in data})
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if all_measured else 1


def measure_all(sections: dict[str, Any], names: Sequence[str], is_quick: bool, data: Data) -> bool:
    """Measure these sections into `data` and its file; whether all went well."""
    seconds = {name: data.get(name, sections[name])["seconds"] for name in names}
    print(f"{len(names)} sections, about {sum(seconds.values()) / 60:.0f} minutes (less with --quick)", flush=True)
    started, failed, about = time.monotonic(), [], {"machine": machine(), "commit": commit()}
    for name in names:
        if name == "links" and (reason := why_no_lab()):
            print(f"links: left out, since {reason}", flush=True)
            continue
        print(f"{name}: about {seconds[name]} s ...", flush=True)
        try:
            data[name] = {**about, **measure(sections[name], is_quick)}
        except UserError as error:
            failed.append(name)
            print(f"error: {name}: {error}; its data stays as it was", file=sys.stderr, flush=True)
            continue
        print(f"{name}: took {data[name]['seconds']} s", flush=True)
        in_order = {section: data[section] for section in sections if section in data}
        DATA.write_text(json.dumps(in_order, indent=1) + "\n")
    print(f"{len(names) - len(failed)} of {len(names)} sections in {(time.monotonic() - started) / 60:.1f} minutes")
    return not failed


def why_no_lab() -> str:
    """Empty where the link lab can run."""
    try:
        require_tools()
    except UserError as error:
        return str(error)
    return ""


def measure(section: dict[str, Any], is_quick: bool) -> dict[str, Any]:
    """Run a section's commands; its rows, and how and when they were measured.

    Raises:
        UserError: a command failed.
    """
    import pandas as pd

    started, flags = time.monotonic(), f" {section['quick']}" if is_quick else ""
    with tempfile.TemporaryDirectory(prefix="publish-") as folder:
        for command in section["commands"]:
            run(command.format(folder=folder) + flags, Path(folder) / "log")
        paths = sorted(Path(folder).glob(section["tables"]), key=lambda path: path.stat().st_mtime)
        tables = [pd.read_csv(path) for path in paths]
    return {
        "commands": [command.format(folder="FOLDER") + flags for command in section["commands"]],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(time.monotonic() - started),
        "rows": [row for table in tables for row in rows_of(table, section["columns"])],
    }


def run(command: str, log: Path) -> None:
    """Run a command line in this Python's environment.

    Raises:
        UserError: it failed; carries its own error line, or the last line that it printed.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": path}
    with log.open("w") as output:
        answer = subprocess.run(shlex.split(command), cwd=ROOT, env=environment, stdout=output, stderr=output)
    if answer.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("error: ")), (lines or ["it printed nothing"])[-1])
        raise UserError(f"{reason.removeprefix('error: ')} ({command})")


def rows_of(table: "pd.DataFrame", columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The kept columns under their headings; None where there is no value."""
    kept = {heading: [scaled(value, *scale) for value in table[name]] for heading, (name, *scale) in columns.items()}
    return [dict(zip(kept, row, strict=True)) for row in zip(*kept.values(), strict=True)]


def scaled(value: Any, factor: float | None = None, digits: int = 0) -> Any:
    """A number times `factor` with so many digits after the point, a whole number if none; None for no value."""
    if value != value:  # pandas' nan
        return None
    return value if factor is None else round(float(value) * factor, digits or None)


def machine() -> str:
    """Hardware and torch of this machine, in words, without its name."""
    import torch

    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpus = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())) or "no GPU"
    return f"{os.cpu_count()} cores of {cpu}, {gibibytes:.0f} GiB, {gpus}, torch {torch.__version__}"


def commit() -> str:
    """What is measured; `-dirty` where files differ from the commit."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())

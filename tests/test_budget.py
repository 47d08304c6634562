"""The size of the project is frozen: tests/budget.toml says how much of each thing there may be.

Whoever needs more raises a number there, so that growth is a decision that shows in a diff; whoever takes something
away lowers it.
"""

import subprocess
import tomllib
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

import ddp
import sharding
import tensor_parallel
from ddp_lab.runtime.flags import build_parser

ROOT = Path(__file__).parents[1]
BUDGET = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())
ADVICE = "; if that much more is worth it, raise the number in tests/budget.toml"


def python_files() -> list[PurePosixPath]:
    """Of the repository, from its root: what git tracks, or where there is no git, what is there."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.strip("\0").split("\0")
    else:
        names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")]
    paths = map(PurePosixPath, names)
    return [path for path in paths if not path.parts[0].startswith(".") and (ROOT / path).exists()]


def lines_of(path: PurePosixPath | str) -> int:
    return (ROOT / path).read_bytes().count(b"\n")


def room_of(path: PurePosixPath) -> str:
    """`analysis` for `ddp_lab/analysis/files.py`, `ddp` for `ddp/simple_ddp.py`, `entrypoints` for `main_ddp.py`."""
    if path.parts[0] == "ddp_lab":
        return f"ddp_lab/{path.parts[1]}" if len(path.parts) > 2 else "ddp_lab"
    return path.parts[0] if len(path.parts) > 1 else "entrypoints"


def test_lines_of_each_room() -> None:
    found: Counter[str] = Counter()
    for path in python_files():
        found[room_of(path)] += lines_of(path)
    allowed = BUDGET["rooms"]
    assert not set(found) - set(allowed), f"rooms without a budget: {set(found) - set(allowed)}"
    too_large = {room: f"{lines} lines of {allowed[room]}" for room, lines in found.items() if lines > allowed[room]}
    assert not too_large, f"{too_large}{ADVICE}"
    total = found.total() - found["tests"]
    later = sum(found[room] for room in BUDGET["totals"]["besides"])
    assert total - later <= BUDGET["totals"]["without_tests"], f"{total - later} lines without tests{ADVICE}"


def test_strategies_are_short() -> None:
    registries = (ddp.REGISTRY, sharding.REGISTRY, tensor_parallel.REGISTRY)
    modules = {registry.location(name).split(":")[0] for registry in registries for name in registry.sentences}
    paths = {module.replace(".", "/") + ".py" for module in modules}
    longer = BUDGET["strategies"]["longer"]
    assert set(longer) <= paths, "an exception for a file that is no strategy"
    too_long = {
        path: lines_of(path) for path in paths if lines_of(path) > longer.get(path, BUDGET["strategies"]["lines"])
    }
    assert not too_long, f"{too_long}{ADVICE}"
    needless = {path for path in longer if lines_of(path) <= BUDGET["strategies"]["lines"]}
    assert not needless, f"short enough by now, take out their exceptions: {needless}"


def test_flags_pages_and_readme() -> None:
    found = {
        "flags": len(build_parser("", ddp.REGISTRY.sentences)._actions),
        "pages": len(list((ROOT / "docs").rglob("*.md"))),
        "readme_lines": len((ROOT / "README.md").read_text().splitlines()),
        "programs": sum("__main__" in (ROOT / path).read_text() for path in python_files() if is_program(path)),
    }
    too_many = {what: f"{count} of {BUDGET[what]}" for what, count in found.items() if count > BUDGET[what]}
    assert not too_many, f"{too_many}{ADVICE}"


def is_program(path: PurePosixPath) -> bool:
    return room_of(path) in ("scripts", "benchmarks", "entrypoints")


def test_default_cases(request: pytest.FixtureRequest) -> None:
    """Only where the whole default suite was collected can its cases be counted."""
    options = request.config.option
    if request.config.args != [str(ROOT / "tests")] and request.config.args != ["tests"]:
        pytest.skip("not the whole suite")
    if options.keyword or options.markexpr != "not slow and not exhaustive" or getattr(options, "lf", False):
        pytest.skip("not the default suite")
    cases = len(request.session.items)
    assert cases <= BUDGET["default_cases"], f"{cases} default cases of {BUDGET['default_cases']}{ADVICE}"

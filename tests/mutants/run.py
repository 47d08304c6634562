"""Plant faults one at a time, and see which test notices: `uv run python tests/mutants/run.py [NAMES]`.

Each mutant is planted in a copy of a revision, where the tests that its patch names run first, and then, if they pass,
the default suite. So it takes seconds for a fault that is noticed where it should be, and minutes for others.
"""

import argparse
import os
import queue
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.mutants.patches import ROOT, Mutant, all_mutants

IS_HERE = "import ddp, pathlib; assert pathlib.Path(ddp.__file__).is_relative_to(pathlib.Path.cwd()), ddp.__file__"
NOTHING, NO_TESTS = "nothing", 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of mutants; default: all")
    parser.add_argument("--rev", default="HEAD", help="the commit whose code and tests are used; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once; default: %(default)s")
    parser.add_argument("--tests", help="arguments of pytest, instead of the patch's tests and the default suite")
    parser.add_argument("--named-only", action="store_true", help="run the tests that the patch names, and no others")
    parser.add_argument("--without", action="store_true", help="plant nothing: all tests should pass")
    options = parser.parse_args()
    mutants = [m for m in all_mutants() if not options.names or any(name in m.name for name in options.names)]
    results: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            copy = Path(folder) / f"copy{number}"
            git("worktree", "add", "--detach", "--quiet", str(copy), options.rev)
            subprocess.run([sys.executable, "-c", IS_HERE], cwd=copy, env=environment(copy), check=True)
            copies.put(copy)

        def look(mutant: Mutant) -> None:
            copy, start = copies.get(), time.monotonic()
            result = caught_by(mutant, copy, options)
            copies.put(copy)
            results.append(result)
            print(f"{mutant.name:<36} | {result} | {time.monotonic() - start:.0f} s", flush=True)

        try:
            print(f"{'mutant':<36} | caught by | time")
            with ThreadPoolExecutor(options.jobs) as pool:
                list(pool.map(look, mutants))
        finally:
            for copy in Path(folder).iterdir():
                git("worktree", "remove", "--force", str(copy))
    return int(any(result.startswith("ERROR") or (result == NOTHING) != options.without for result in results))


def caught_by(mutant: Mutant, copy: Path, options: argparse.Namespace) -> str:
    """The first test that fails with the mutant planted, or `NOTHING`; an error if that cannot be found out."""
    file = copy / mutant.path
    source = file.read_text() if file.exists() else ""
    try:
        faulty = mutant.applied(source)
    except ValueError as error:
        return f"ERROR: {error}"
    try:
        if not options.without:
            file.write_text(faulty)
        if options.tests:
            return first_failure(copy, shlex.split(options.tests))
        failure = first_failure(copy, [*mutant.tests, "-n", "0"])
        return first_failure(copy, []) if failure == NOTHING and not options.named_only else failure
    finally:
        file.write_text(source)


def first_failure(copy: Path, arguments: Sequence[str]) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--ignore=tests/mutants", *arguments],
        cwd=copy, env=environment(copy), capture_output=True, text=True,
    )  # fmt: skip
    if run.returncode == 0:
        return NOTHING
    if run.returncode == NO_TESTS:
        return f"ERROR: no test is chosen by {' '.join(arguments)}"
    match = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    return match[1] if match else f"a crash: {(run.stdout + run.stderr).strip().splitlines()[-1]}"


def environment(copy: Path) -> dict[str, str]:
    """The packages in `copy` come before the installed ones."""
    return {**os.environ, "PYTHONPATH": str(copy)}


def git(*arguments: str) -> None:
    subprocess.run(["git", "-C", str(ROOT), *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())

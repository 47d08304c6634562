"""The same command over links of several rates, and one page on all of them."""

import sys
from pathlib import Path

from analysis.errors import TraceError
from analysis.report.pages.link_rates import write_link_page
from benchmarks.link_lab.run import Settings, run_at
from training.communication.rates import Rate
from training.errors import UserError

OUTPUT_FLAG = "--output-dir"
TABLE_FLAG = "--csv"


def sweep(rates: list[Rate], settings: Settings, command: list[str], output_dir: Path) -> int:
    """Run `command` at each rate, its results in `<output_dir>/<rate>/`; the exit code is 1 if any run failed.

    Raises:
        UserError: the folder cannot be made, or the command names a place for its results itself.
    """
    flag = TABLE_FLAG if Path(command[0]).name == "strategies.py" else OUTPUT_FLAG
    if any(given.split("=")[0] == flag for given in command):
        raise UserError(f"{flag} of the command: with several rates, give the lab's own {OUTPUT_FLAG} (before the --)")
    failed = []
    for rate in rates:
        folder = output_dir / str(rate)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{OUTPUT_FLAG} {output_dir}: cannot make {folder}: {error.strerror}") from error
        target = folder / "strategies.csv" if flag == TABLE_FLAG else folder
        try:
            run_at(rate, settings, [*command, flag, str(target)], folder)
        except UserError as error:
            print(f"error: {rate}: {error}", file=sys.stderr, flush=True)
            failed.append(str(rate))
    try:
        page = write_link_page(output_dir, {str(rate): rate.bits_per_s for rate in rates if str(rate) not in failed})
    except TraceError as error:
        raise UserError(str(error)) from error
    print(f"\nreport: {page}")
    if failed:
        print(f"error: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0

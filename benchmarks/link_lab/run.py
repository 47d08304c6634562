"""One job in one lab, and the same job over links of several rates."""

import csv
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TextIO

from benchmarks.link_lab.counters import COLUMNS, read_counters, write_sample
from benchmarks.link_lab.launch import run_job
from benchmarks.link_lab.namespaces import lab_network
from benchmarks.link_lab.state import Lab
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate

OUTPUT_FLAG = "--output-dir"
TABLE_FLAG = "--csv"


def sweep(options: Namespace) -> int:
    """Run the command at each rate, its results in `<output_dir>/<rate>/`; the exit code is 1 if any run failed.

    Raises:
        UserError: the folder cannot be made, or the command names a place for its results itself.
    """
    from ddp_lab.analysis.errors import TraceError
    from ddp_lab.analysis.report.pages.link_rates import write_link_page  # takes seconds to import

    rates, command, output_dir = options.rate, options.command, options.output_dir
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
            run_at(rate, options, [*command, flag, str(target)], folder)
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


def run_at(rate: Rate, options: Namespace, command: list[str], log_folder: Path) -> None:
    """Run `command` over links of this rate; print how the lab looks, and at the end what each node sent.

    Args:
        options: The lab's command line.
        log_folder: Where the ranks' standard error is kept if they gave no reason in a line of their own.

    Raises:
        UserError: the lab cannot be made, or the job failed.
    """
    rates = [options.node_rate.get(node, rate) for node in range(options.nodes)]
    with (
        open_csv(options.counters) if options.counters else nullcontext() as sample,
        lab_network(rates, options.mtu, options.delay, command) as lab,
    ):
        print(heading(lab, rate, options.nproc_per_node), flush=True)
        tell_changes = changes_of(lab)

        def tick() -> None:
            tell_changes()
            if sample:
                write_sample(sample, read_counters(lab))

        run_job(lab, command, options.nproc_per_node, tick, log_folder)
        counted = read_counters(lab)
    for node, each in enumerate(counted):
        print(f"link: node {node} sent {each.sent / 1e6:.2f} MB and received {each.received / 1e6:.2f} MB", flush=True)


@contextmanager
def open_csv(path: Path) -> Iterator[TextIO]:
    """Raises:
    UserError: it cannot be written.
    """
    try:
        file = path.open("w")
    except OSError as error:
        raise UserError(f"--counters {path}: cannot be written: {error.strerror}") from error
    with file:
        csv.writer(file).writerow(COLUMNS)
        yield file


def heading(lab: Lab, rate: Rate, ranks_per_node: int) -> str:
    """What the lab looks like; it names the nodes whose link differs from the others'."""
    others = ", ".join(f"node {node.number} {node.rate}" for node in lab.nodes if node.rate != str(rate))
    return (
        f"link lab {lab.number}: {len(lab.nodes)} nodes of {ranks_per_node} rank{'s' if ranks_per_node > 1 else ''}, "
        f"links {rate} each way{f' ({others})' if others else ''}, MTU {lab.mtu} bytes"
        f"{f', delay {lab.delay}' if lab.delay else ''}"
    )


def changes_of(lab: Lab) -> Callable[[], None]:
    """A function that prints what another terminal has changed on the lab's links since its last call."""
    known = {node.number: node for node in lab.nodes}

    def tell() -> None:
        for node in lab.reload().nodes:
            if node != known[node.number]:
                now = "is cut" if node.is_cut else f"now carries {node.rate}"
                print(f"link lab {lab.number}: the link of node {node.number} {now}", file=sys.stderr, flush=True)
                known[node.number] = node

    return tell

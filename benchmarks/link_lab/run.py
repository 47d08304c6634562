"""One job in one lab, from the first line on the terminal to the last."""

import csv
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from benchmarks.link_lab.counters import COLUMNS, LinkBytes, open_counters, write_sample
from benchmarks.link_lab.launch import run_job
from benchmarks.link_lab.namespaces import lab_network
from benchmarks.link_lab.state import Lab
from training.communication.rates import Rate
from training.errors import UserError


@dataclass(frozen=True)
class Settings:
    """What stays the same over all rates.

    Attributes:
        node_rates: Rates of nodes whose link is another than the others'.
        counters: A CSV file for the counters of every 100 ms.
    """

    nodes: int
    ranks_per_node: int
    mtu: int
    delay: str | None = None
    node_rates: Mapping[int, Rate] = field(default_factory=dict)
    counters: Path | None = None


def run_at(rate: Rate, settings: Settings, command: list[str], log_folder: Path) -> list[LinkBytes]:
    """Run `command` over links of this rate; print how the lab looks, and at the end what each node sent.

    Args:
        log_folder: Where the ranks' standard error is kept after a failure that nobody foresaw.

    Raises:
        UserError: the lab cannot be made, or the job failed.
    """
    rates = [settings.node_rates.get(node, rate) for node in range(settings.nodes)]
    with ExitStack() as stack:
        sample = stack.enter_context(open_csv(settings.counters)) if settings.counters else None
        lab = stack.enter_context(lab_network(rates, settings.mtu, settings.delay, command))
        print(heading(lab, rate, settings.ranks_per_node), flush=True)
        counters = stack.enter_context(open_counters(lab))
        tell_changes = changes_of(lab)

        def tick() -> None:
            tell_changes()
            if sample:
                write_sample(sample, counters.read())

        run_job(lab, command, settings.ranks_per_node, tick, log_folder)
        counted = counters.read()
    for node, each in enumerate(counted):
        print(f"link: node {node} sent {each.sent / 1e6:.2f} MB and received {each.received / 1e6:.2f} MB", flush=True)
    return counted


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
    """What the lab looks like; nodes whose link is another than the others' are named."""
    others = [f"node {node.number} {node.rate}" for node in lab.nodes if node.rate != str(rate)]
    parts = [
        f"link lab {lab.number}: {len(lab.nodes)} nodes of {ranks_per_node} rank{'s' if ranks_per_node > 1 else ''}",
        f"links {rate} each way" + "".join(f" ({', '.join(others)})" for _ in others[:1]),
        f"MTU {lab.mtu} bytes",
        *([f"delay {lab.delay}"] if lab.delay else []),
    ]
    return ", ".join(parts)


def changes_of(lab: Lab) -> Callable[[], None]:
    """A function that says what has changed on the lab's links, by another terminal, since it was last called."""
    known = {node.number: node for node in lab.nodes}

    def tell() -> None:
        for node in lab.reload().nodes:
            if node != known[node.number]:
                now = "is cut" if node.is_cut else f"now carries {node.rate}"
                print(f"link lab {lab.number}: the link of node {node.number} {now}", file=sys.stderr, flush=True)
                known[node.number] = node

    return tell

"""The byte counters of links: what really went over the wire, with headers and start-up traffic."""

import csv
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from benchmarks.link_lab.shaping import run_tool
from benchmarks.link_lab.state import INTERFACE, Lab

COLUMNS = ("time_s", "node", "sent_bytes", "received_bytes")
"""Of `--counters`: seconds since the epoch, and bytes since the lab was made."""


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a node has sent and received over its link since the lab was made."""

    sent: int
    received: int


def link_bytes() -> LinkBytes:
    """Of the node on which this process runs; for programs that the lab has started.

    Raises:
        OSError: the process does not run in a lab.
    """
    folder = Path("/sys/class/net", INTERFACE, "statistics")
    return LinkBytes(int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text()))


def read_counters(lab: Lab) -> list[LinkBytes]:
    """Of each node, in order. The switch's ports count them: what a port receives, its node has sent."""
    links = json.loads(run_tool("ip", "-json", "-statistics", "-n", lab.switch, "link", "show"))
    counted = {link["ifname"]: link["stats64"] for link in links if "stats64" in link}
    ports = [counted[node.port] for node in lab.nodes]
    return [LinkBytes(sent=port["rx"]["bytes"], received=port["tx"]["bytes"]) for port in ports]


def write_sample(file: TextIO, counted: list[LinkBytes]) -> None:
    """One row of `COLUMNS` for each node, now."""
    now = f"{time.time():.3f}"
    csv.writer(file).writerows((now, node, each.sent, each.received) for node, each in enumerate(counted))
    file.flush()

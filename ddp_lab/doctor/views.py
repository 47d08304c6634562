"""Tables for the terminal: ranks, the matrix of a topology, and what `--live` measured."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from ddp_lab.doctor.live.results import SIZE_BYTES, Live
from ddp_lab.doctor.reading.nccl_log import Process
from ddp_lab.doctor.reading.topology import Topology

COLOURS = {"X": "dim", "PIX": "green", "PXB": "green", "PHB": "yellow", "NODE": "yellow", "SYS": "red"}
MOST_ROWS = 64
WIDEST = 1000
"""Characters of a matrix's row, more than any has."""


def process_table(processes: Sequence[Process]) -> Table:
    """A row for each process in NCCL's log."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "host", "NCCL", "network", "interface", "transports", "GDR", "warnings"):
        table.add_column(name)
    for process in processes[:MOST_ROWS]:
        transports = sorted({name for names in process.transports.values() for name in names})
        cells = (
            "?" if process.rank is None else str(process.rank),
            process.host,
            process.version or "?",
            process.fabric or "?",
            process.interface or "?",
            " ".join(transports) or "?",
            {True: "yes", False: "no", None: "?"}[process.gdr],
            str(len(process.warnings)),
        )
        table.add_row(*map(Styled, cells))
    if len(processes) > MOST_ROWS:
        table.caption = f"and {len(processes) - MOST_ROWS} more"
    return table


def topology_table(topology: Topology) -> Table:
    """The matrix: near links in green, links across NUMA nodes in red."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for device in topology.devices:
        table.add_column(device, justify="center", no_wrap=True)
    has_numa = bool(topology.numa_affinity)
    if has_numa:
        table.add_column("NUMA", justify="center")
    for device, row in topology.links.items():
        cells = [
            Styled(row.get(peer, ""), style=COLOURS.get(row.get(peer, ""), "bold green")) for peer in topology.devices
        ]
        table.add_row(Styled(device), *cells, *([topology.numa_affinity.get(device, "")] if has_numa else []))
    return table


def in_words(topology: Topology) -> list[str]:
    """The nearest network card of each GPU, and the pairs of GPUs that meet over PCIe across NUMA nodes."""
    sentences = []
    for gpu in topology.gpus if topology.nics else []:
        best = topology.best_nics(gpu)
        also = f" ({', '.join(best[1:])} as near)" if len(best) > 1 else ""
        sentences.append(f"{gpu}: nearest network card {best[0]}{also}" if best else f"{gpu}: no card near")
    pairs = topology.pairs_across_numa()
    names = ", ".join(f"{a}-{b}" for a, b in pairs[:12])
    more = f" and {len(pairs) - 12} more" if len(pairs) > 12 else ""
    return [*sentences, f"pairs across NUMA nodes, over PCIe: {names or 'none'}{more}"]


def print_matrix(console: Console, table: Table) -> None:
    """Print every cell whole. In a narrow terminal, wrapped rows are better than cut cells."""
    width, console.width = console.width, WIDEST
    console.print(table)
    console.width = width


def write_live(console: Console, live: Live) -> None:
    """This machine, and the time of an all-reduce between every pair of ranks."""
    console.print(Styled("\nThis machine", style="bold"))
    for name, value in live.checks.items():
        console.print(Styled(f"  {name}: {value}"), soft_wrap=True)
    if not live.pairs:
        return
    title = f"\nAll-reduce of {SIZE_BYTES / 2**20:g} MiB between two ranks over {live.backend}, ms"
    console.print(Styled(title, style="bold"))
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("rank")
    ranks = range(1 + max(pair.ranks[1] for pair in live.pairs))
    for rank in ranks:
        table.add_column(str(rank), justify="right")
    pairs = {pair.ranks: pair for pair in live.pairs}
    for row_rank in ranks:
        row = [pairs.get((min(row_rank, peer), max(row_rank, peer))) for peer in ranks]
        cells = [Styled(f"{pair.time_ms:.2f}", style="red" * pair.is_slow) if pair else "" for pair in row]
        table.add_row(str(row_rank), *cells)
    print_matrix(console, table)

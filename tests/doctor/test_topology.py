"""`nvidia-smi topo -m` in every form: what is rendered is read back the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.inputs import read_inputs
from doctor.texts import to_text
from doctor.topology import Topology, TopologyError, find_topologies

LINKS = ["NV1", "NV4", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"]
NIC_NAMES = ["mlx5_0", "mlx5_1", "mlx5_bond_0", "ibp12s0", "bnxt_re0", "rdmap16s27", "mlx4_0"]
LEGEND = "\n\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    gpus = [f"GPU{index}" for index in range(draw(st.integers(1, 16)))]
    nics = draw(st.lists(st.sampled_from(NIC_NAMES), unique=True, max_size=5))
    devices = gpus + nics
    links: dict[str, dict[str, str]] = {one: {one: "X"} for one in devices}
    for index, one in enumerate(devices):
        for other in devices[:index]:
            links[one][other] = links[other][one] = draw(st.sampled_from(LINKS))
    columns = draw(st.integers(0, 3))
    return Topology(
        gpus,
        nics,
        links,
        {gpu: draw(st.sampled_from(["0-63", "0-31,64-95", "N/A"])) for gpu in gpus} if columns > 0 else {},
        {gpu: draw(st.sampled_from(["0", "1", "0-1", "N/A"])) for gpu in gpus} if columns > 1 else {},
        dict.fromkeys(gpus, "N/A") if columns > 2 else {},
    )


def render(topology: Topology, tabs: bool, numbered: bool, ansi: bool, around: bool) -> str:
    """As nvidia-smi prints it: tabs with double ones at some columns, an underlined header, `NIC<k>` and a legend."""
    names = {device: device for device in topology.gpus}
    names |= {nic: f"NIC{index}" if numbered else nic for index, nic in enumerate(topology.nics)}
    extras = [
        ("CPU Affinity", topology.cpu_affinity),
        ("NUMA Affinity", topology.numa_affinity),
        ("GPU NUMA ID", topology.gpu_numa_id),
    ]
    extras = [(name, values) for name, values in extras if values]
    header = [names[device] for device in topology.devices] + [name for name, _ in extras]
    rows = []
    for device in topology.devices:
        cells = [f" {link} " if link == "X" else link for link in (topology.links[device][o] for o in topology.devices)]
        extra = [values.get(device, "") for _, values in extras]
        rows.append([names[device], *cells, *(f"{cell}\t" if tabs and cell else cell for cell in extra)])
    start, end = ("\x1b[4m", "\x1b[0m") if ansi else ("", "")
    if tabs:
        lines = ["\t" + start + "\t".join(header) + end, *("\t".join(row) for row in rows)]
    else:
        widths = [max(len(row[i]) for row in [["", *header], *rows]) + 2 for i in range(len(header) + 1)]
        lines = ["".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        first = "".join(cell.ljust(width) for cell, width in zip(["", *header], widths, strict=True))
        lines.insert(0, start + first + end)
    legend = LEGEND
    if numbered and topology.nics:
        legend += "\nNIC Legend:\n\n" + "\n".join(f"  NIC{i}: {nic}" for i, nic in enumerate(topology.nics)) + "\n"
    text = "\n".join(lines) + legend
    return f"some log line\nGPU0 is warm\n{text}\nand another\n" if around else text


@given(topologies(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_read_back(topology: Topology, tabs: bool, numbered: bool, ansi: bool, around: bool) -> None:
    text = render(topology, tabs, numbered, ansi, around)
    assert find_topologies(to_text("topo", text.encode())) == [topology]


@given(topologies(), topologies())
def test_two_machines_in_one_text(one: Topology, other: Topology) -> None:
    text = render(one, True, True, True, False) + render(other, False, True, False, False)
    assert find_topologies(to_text("topo", text.encode())) == [one, other]


@given(st.binary(max_size=400), topologies(), st.integers(0, 2000))
def test_hostile_text_is_read_or_refused(noise: bytes, topology: Topology, cut: int) -> None:
    """Noise, and a matrix cut off anywhere: either whole rows of all GPUs, or one line that says what is missing."""
    text = render(topology, True, True, True, False)[:cut].encode()
    try:
        found = find_topologies(to_text("topo", noise + b"\n" + text))
    except TopologyError as error:
        assert str(error).startswith("topo:") and "\n" not in str(error)
    else:
        assert all(set(one.gpus) <= one.links.keys() for one in found)


DGX = """\
        GPU0    GPU1    GPU2    NIC0    NIC1    NIC2    CPU Affinity    NUMA Affinity   GPU NUMA ID
GPU0     X      NV18    SYS     PXB     PXB     SYS     0-31            0               N/A
GPU1    NV18     X      PHB     NODE    PXB     SYS     0-31            0               N/A
GPU2    SYS     PHB      X      SYS     SYS     SYS     32-63           1               N/A
NIC0    PXB     NODE    SYS      X      PIX     SYS
NIC1    PXB     PXB     SYS     PIX      X      SYS
NIC2    SYS     SYS     SYS     SYS     SYS      X

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_bond_0
  NIC2: mlx5_2
"""


def test_nearest_card_and_pairs_across_numa_nodes() -> None:
    (topology,) = find_topologies(to_text("topo", DGX.encode()))
    assert topology.best_nics("GPU0") == ["mlx5_bond_0", "mlx5_0"]  # as near, but bonded
    assert topology.best_nics("GPU1") == ["mlx5_bond_0"]
    assert topology.best_nics("GPU2") == ["mlx5_bond_0", "mlx5_0", "mlx5_2"]
    assert topology.pairs_across_numa() == [("GPU0", "GPU2"), ("GPU1", "GPU2")]


def test_peer_access_matrix_is_another_thing() -> None:
    text = " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tGNS\tX\t\n"
    assert find_topologies(to_text("p2p", text.encode())) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0\n", ":1: the header names GPU1, but no row of it follows"),
        ("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tSYS\n", ":2: GPU0 has no readable link to each of the 3 devices in line 1"),
        ("\tGPU0\tGPU1\nGPU0\t X \tSIX\nGPU1\tSYS\tX\n", ":2: GPU0 has no readable link"),
    ],
)
def test_a_matrix_that_cannot_be_read_is_one_line(text: str, expected: str, tmp_path: object) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    (problem,) = read_inputs([str(path)]).problems
    assert expected in problem and "paste the whole output of nvidia-smi topo -m" in problem

"""`nvidia-smi topo -m` in every form: what is rendered is read back the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_lab.doctor.reading.inputs import read_inputs
from ddp_lab.doctor.reading.texts import to_text
from ddp_lab.doctor.reading.topology import Topology, find_topologies
from tests.tables import each_row

LINKS = ["NV1", "NV4", "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"]
NIC_NAMES = ["mlx5_0", "mlx5_1", "mlx5_bond_0", "ibp12s0", "bnxt_re0", "rdmap16s27", "mlx4_0"]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    gpus = [f"GPU{index}" for index in range(draw(st.integers(1, 16)))]
    nics = draw(st.lists(st.sampled_from(NIC_NAMES), unique=True, max_size=5))
    devices = gpus + nics
    links: dict[str, dict[str, str]] = {one: {one: "X"} for one in devices}
    for index, one in enumerate(devices):
        for other in devices[:index]:
            links[one][other] = links[other][one] = draw(st.sampled_from(LINKS))
    has_numa = draw(st.booleans())
    numa = {gpu: draw(st.sampled_from(["0", "1", "0-1", "N/A"])) for gpu in gpus} if has_numa else {}
    return Topology(gpus, nics, links, numa)


def render(topology: Topology, tabs: bool = True, numbered: bool = True, ansi: bool = True) -> str:
    """As nvidia-smi prints it, with tabs or in columns; cards have their names, or `NIC<k>` and a legend."""
    names = {device: device for device in topology.gpus}
    names |= {nic: f"NIC{index}" if numbered else nic for index, nic in enumerate(topology.nics)}
    always = dict.fromkeys(topology.gpus, "0-31,64-95")
    extras = {"CPU Affinity": always}
    extras |= {"NUMA Affinity": topology.numa_affinity, "GPU NUMA ID": always} if topology.numa_affinity else {}
    rows = [["", *(names[device] for device in topology.devices), *extras]]
    for device in topology.devices:
        cells = [topology.links[device][other].center(3) for other in topology.devices]
        rows.append([names[device], *cells, *(values.get(device, "") for values in extras.values())])
    widths = [0 if tabs else max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]))]
    lines = [("\t" if tabs else "").join(map(str.ljust, row, widths)) for row in rows]
    if ansi:
        lines[0] = lines[0].replace("GPU0", "\x1b[4mGPU0", 1) + "\x1b[0m"
    lines += ["", "Legend:", "", "  X    = Self", "  SYS  = Connection traversing PCIe as well as the SMP interconnect"]
    if numbered and topology.nics:
        lines += ["", "NIC Legend:", "", *(f"  NIC{index}: {nic}" for index, nic in enumerate(topology.nics))]
    return "some log line\nGPU0 is warm\n" + "\n".join(lines) + "\nand another\n"


@settings(max_examples=50)
@given(topologies(), st.booleans(), st.booleans(), st.booleans())
def test_read_back(topology: Topology, tabs: bool, numbered: bool, ansi: bool) -> None:
    assert find_topologies(to_text("topo", render(topology, tabs, numbered, ansi).encode())) == [topology]


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


@each_row(
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

"""`nvidia-smi topo -m` in every form: what is rendered is read back the same."""

from ddp_lab.doctor.reading.texts import to_text
from ddp_lab.doctor.reading.topology import find_topologies

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


def test_nearest_card_and_pairs_across_numa_nodes():
    (topology,) = find_topologies(to_text("topo", DGX.encode()))
    assert topology.best_nics("GPU0") == ["mlx5_bond_0", "mlx5_0"]  # as near, but bonded
    assert topology.best_nics("GPU1") == ["mlx5_bond_0"]
    assert topology.best_nics("GPU2") == ["mlx5_bond_0", "mlx5_0", "mlx5_2"]
    assert topology.pairs_across_numa() == [("GPU0", "GPU2"), ("GPU1", "GPU2")]

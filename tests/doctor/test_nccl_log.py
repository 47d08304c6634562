"""NCCL's logs of all generations as facts."""

from pathlib import Path

from ddp_lab.doctor.reading.inputs import read_inputs
from ddp_lab.doctor.reading.nccl_log import differences, read_processes
from ddp_lab.doctor.reading.texts import to_text
from tests.tables import each_row

CLEAN = Path(__file__).parents[1] / "data" / "doctor" / "clean"


def read(*names):
    return read_inputs([str(CLEAN / name) for name in names]).facts.processes


def parse(*lines):
    return read_processes([to_text("log", "\n".join(lines).encode())])


def test_2_21():
    zero, first = read("nccl_2_21.log")
    assert (zero.version, zero.network, zero.fabric) == ("2.21.5", "Socket", "Socket")
    assert dict(zero.transports[0, 1]) == {"P2P/CUMEM": 1} and dict(first.transports[1, 0]) == {"SHM": 1}
    assert zero.devices == {0: "0", 1: "1"} and not zero.used("NET/") and zero.gdr is None


def test_2_30_with_time_stamps():
    (zero,) = read("nccl_2_30.log")
    assert (zero.host, zero.rank, zero.world_size, zero.version) == ("node-11", 0, 16, "2.30.7")
    assert (zero.fabric, zero.gdr) == ("RoCE", True)
    assert dict(zero.transports[0, 8]) == {"NET/IB": 1} and dict(zero.transports[0, 1]) == {"P2P/CUMEM": 1}


@each_row(
    ("line", "pair", "transport"),
    [
        ("Ring 00 : 3 -> 4 [receive] via NET/IB/0", (3, 4), "NET/IB"),
        ("Ring 00 : 0[1a000] -> 1[1b000] via direct shared memory", (0, 1), "SHM"),
        ("Channel 00 : 0[1b000] -> 1[1c000] via P2P/IPC", (0, 1), "P2P/IPC"),
        ("Channel 00 : 0[1b000] -> 1[1c000] via P2P/direct pointer", (0, 1), "P2P/direct"),
        ("Channel 01/0 : 0[0] -> 1[1] via SHM/direct/direct", (0, 1), "SHM"),
        ("Channel 13/0 : 9[1] -> 8[0] via P2P/CUMEM/read", (9, 8), "P2P/CUMEM"),
        ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/1", (0, 8), "NET/Socket"),
        ("Channel 00/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/1/GDRDMA", (0, 8), "NET/AWS"),
    ],
)
def test_transports(line, pair, transport):
    (process,) = parse(f"h:1:2 [0] NCCL INFO {line}")
    assert list(process.transports) == [pair] and list(process.transports[pair]) == [transport]
    assert process.rank == (pair[1] if "[receive]" in line else pair[0])


def test_which_ranks_differ():
    lines = []
    for rank, (version, network, interface) in enumerate([("2.21.5", "IB", "ib0"), ("2.27.3", "Socket", "eth0")] * 2):
        start = f"h{rank}:{rank + 1}:1 [0] NCCL INFO"
        lines += [f"{start} NCCL version {version}+cuda12.4", f"{start} Using network {network}"]
        lines += [f"{start} Bootstrap : Using {interface}:10.0.0.{rank + 1}<0>"]
        lines += [f"{start} comm 0x1 rank {rank} nranks 4 cudaDev 0 - Init START"]
    assert differences(parse(*lines)) == [
        "NCCL version differs: 2.21.5 (ranks 0, 2); 2.27.3 (ranks 1, 3)",
        "fabric differs: InfiniBand or RoCE (ranks 0, 2); Socket (ranks 1, 3)",
        "interface differs: ib0 (ranks 0, 2); eth0 (ranks 1, 3)",
    ]
    assert differences(parse(*lines[:4])) == []

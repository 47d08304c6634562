"""The output of `nvidia-smi topo -m` as a matrix: how each GPU reaches every other GPU and every network card.

Format: https://docs.nvidia.com/deploy/nvidia-smi/ (topo -m). It has tabs or spaces, and the columns `CPU Affinity`,
`NUMA Affinity` and `GPU NUMA ID` if the driver knows them. Network cards have their names, or `NIC<k>` and a legend.
"""

import re
from dataclasses import dataclass, field
from itertools import combinations

from ddp_lab.doctor.reading.texts import Line, Text
from ddp_lab.runtime.errors import UserError

DISTANCE = ["PIX", "PXB", "PHB", "NODE", "SYS"]
"""Nearest first: at most one PCIe bridge, several bridges, a host bridge (the CPU), several host bridges of one NUMA
node, the link between NUMA nodes. `NV<n>` is NVLink."""
EXTRA_COLUMNS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")

MOST_LINES = 200
"""Lines after a header in which its rows and legend are looked for."""

_LINK = re.compile(r"X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC|N/A")
_GPU = re.compile(r"GPU\d{1,3}")
_HEADER = re.compile(r"^[ \t]{0,200}GPU\d{1,3}\b", re.MULTILINE)
_NIC = re.compile(r"(?=[^\d]*\d)[A-Za-z][\w.-]{0,30}")  # has a digit, unlike words of a sentence
_PEER_ACCESS = {"OK", "CNS", "GNS", "TNS", "NS", "DR", "U"}
"""In rows of `nvidia-smi topo -p2p`, which has the same header."""
_LEGEND = re.compile(r"^\s*(NIC\d{1,3})\s*:\s+(\S{1,40})\s*$")


@dataclass(frozen=True)
class Topology:
    """A machine's matrix. `links[a][b]` is how device a reaches b. Network cards have their own names."""

    gpus: list[str]
    nics: list[str]
    links: dict[str, dict[str, str]]
    numa_affinity: dict[str, str] = field(default_factory=dict)
    path: str = field(default="", compare=False)

    @property
    def devices(self) -> list[str]:
        return self.gpus + self.nics

    def best_nics(self, gpu: str) -> list[str]:
        """The nearest network cards of a GPU. Bonded cards come first."""
        reach = {nic: DISTANCE.index(link) for nic in self.nics if (link := self.links[gpu].get(nic)) in DISTANCE}
        nearest = [nic for nic, distance in reach.items() if distance == min(reach.values())]
        return sorted(nearest, key=lambda nic: ("bond" not in nic, self.nics.index(nic)))

    def crosses_numa(self, gpu: str, peer: str) -> bool:
        """Whether two GPUs reach each other over PCIe and the link between NUMA nodes (NVLink does not pass it)."""
        link = self.links[gpu].get(peer, "")
        homes = {home for device in (gpu, peer) if (home := self.numa_affinity.get(device, "")).isdecimal()}
        return link == "SYS" or (len(homes) == 2 and not link.startswith("NV"))

    def pairs_across_numa(self) -> list[tuple[str, str]]:
        return [pair for pair in combinations(self.gpus, 2) if self.crosses_numa(*pair)]


def find_topologies(text: Text) -> list[Topology]:
    """All matrices in a text, which may have other lines as well.

    Raises:
        UserError: a header without its rows, or a row that does not fit it.
    """
    topologies = []
    lines = text.lines
    for index, _ in text.find(_HEADER):
        header = _read_header(lines[index].text)
        if header and not any(_PEER_ACCESS & set(row.text.split()) for row in lines[index + 1 : index + 3]):
            topologies.append(_read_matrix(header, lines[index], lines[index + 1 : index + 1 + MOST_LINES]))
    return topologies


def _read_header(text: str) -> tuple[list[str], list[str]] | None:
    """The devices of a header line and the names of the columns after them; None for other lines."""
    tokens = text.split()
    if not tokens or not _GPU.fullmatch(tokens[0]) or (len(tokens) > 1 and _LINK.fullmatch(tokens[1])):
        return None
    if len(tokens) == 1 and text.startswith("GPU"):
        return None  # a sentence that begins with a GPU's name: nvidia-smi indents the header
    devices: list[str] = []
    for token in tokens:
        if token in ("CPU", "NUMA", "GPU"):
            break
        devices.append(token)
    extra = " ".join(tokens[len(devices) :])
    columns = [name for name in EXTRA_COLUMNS if name in extra]
    if extra.split() != " ".join(columns).split() or not all(_NIC.fullmatch(device) for device in devices):
        return None
    return devices, columns


def _read_matrix(header: tuple[list[str], list[str]], line: Line, below: list[Line]) -> Topology:
    devices, columns = header
    rows: dict[str, dict[str, str]] = {}
    numa: dict[str, str] = {}
    legend: dict[str, str] = {}
    for row in below:
        tokens = row.text.split()
        if (match := _LEGEND.match(row.text)) and match[1] in devices:
            legend[match[1]] = match[2]
        elif _read_header(row.text):
            break  # the next matrix
        elif tokens and tokens[0] in devices and tokens[0] not in rows:
            links = tokens[1 : 1 + len(devices)]
            if len(links) < len(devices) or not all(_LINK.fullmatch(link) for link in links):
                raise UserError(
                    f"{row.place}: {tokens[0]} has no readable link to each of the {len(devices)} devices in line "
                    f"{line.number}; paste the whole output of nvidia-smi topo -m"
                )
            rows[tokens[0]] = {device: link.replace("SOC", "SYS") for device, link in zip(devices, links, strict=True)}
            extras = dict(zip(columns, tokens[1 + len(devices) :], strict=False))
            if "NUMA Affinity" in extras:
                numa[tokens[0]] = extras["NUMA Affinity"]
    missing = [device for device in devices if _GPU.fullmatch(device) and device not in rows]
    if missing:
        raise UserError(
            f"{line.place}: the header names {', '.join(missing[:4])}{' and more' if len(missing) > 4 else ''}, but no "
            "row of it follows; paste the whole output of nvidia-smi topo -m"
        )
    names = {device: legend.get(device, device) for device in devices}
    return Topology(
        gpus=[device for device in devices if _GPU.fullmatch(device)],
        nics=[names[device] for device in devices if not _GPU.fullmatch(device)],
        links={names[a]: {names[b]: link for b, link in row.items()} for a, row in rows.items()},
        numa_affinity=numa,
        path=line.path,
    )

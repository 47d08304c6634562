"""Inside one node: P2P between GPUs, shared and locked memory, and pairs of ranks that were measured."""

import re
from collections import Counter

from ddp_lab.doctor.facts import Facts, Match
from ddp_lab.doctor.rulebook import all_rules, compiled
from ddp_lab.machine import SMALL_MEMLOCK_BYTES, SMALL_SHM_BYTES

_ACS = re.compile(r"ACSCtl:\s{0,8}SrcValid\+|ACSCtl:.{0,80}(?:ReqRedir|CmpltRedir|UpstreamFwd)\+")
_IOMMU = re.compile(r"DMAR: IOMMU enabled|AMD-Vi: AMD IOMMUv2|(?:intel|amd)_iommu=on")
_PROCESS = re.compile(r"([\w.-]{1,255}:\d{1,10}):\d{1,10} \[")
_NO_CUMEM = re.compile("cuMem host allocations do not appear to be working")
_CUMEM_FAILURE = re.compile(
    r"(?:cudawrap|shmutils|transport/shm|alloc\.h|allocator|os/linux)\S{0,12} (?:\(\w{1,60}\) )?NCCL WARN Cuda failure "
    r"(?:\d{1,4} )?'(?:invalid argument|operation not (?:supported|permitted)|invalid resource handle|OS call failed\b)"
    r"|transport/shm\.cc:\d{1,5} (?:\(\w{1,60}\) )?NCCL WARN Cuda failure 217\b"
    r"|^(?:\[rank\d{1,6}\]: )?Cuda failure 217 'peer access is not supported"
)
CUMEM_HOST_SINCE = (2, 24)
"""The first version of NCCL that shares host memory by cuMem on its own."""


def acs_or_iommu(facts: Facts) -> Match | None:
    """ACS is reported whenever lspci shows it; the IOMMU only beside a first collective that never ended."""
    acs = facts.search(_ACS)
    iommu = [line for line in facts.search(_IOMMU) if "iommu=pt" not in line.text]
    if facts.hung_early:
        return Match(acs + iommu + facts.hung_early) if acs or iommu else None
    return Match(acs) if acs else None


def cumem_host(facts: Facts) -> Match | None:
    """Some processes of a host fell back to /dev/shm and others did not, or cuMem itself failed."""
    lines = facts.search(_NO_CUMEM)
    pids = {f"{p.host}:{p.pid}": p.host for p in facts.processes}
    fell = {name for line in lines for name in _PROCESS.findall(line.text)}
    fallen, not_fallen = (Counter(pids[name] for name in names) for names in (pids.keys() & fell, pids.keys() - fell))
    for host in sorted(fallen.keys() & not_fallen.keys()):
        sentence = f"On {host}, {fallen[host]} processes fell back to /dev/shm and {not_fallen[host]} did not."
        return Match(lines, [sentence])
    versions = [_numbers(process.version) for process in facts.processes if process.version]
    failed = facts.search(_CUMEM_FAILURE)
    return Match(failed) if failed and (not versions or max(versions) >= CUMEM_HOST_SINCE) else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def rdma_no_memory_though_unlimited(facts: Facts) -> Match | None:
    """What the rule `memlock` finds, beside what excludes it: the limit on locked memory is not the reason."""
    rule = next(rule for rule in all_rules() if rule.name == "memlock")
    lines, unlimited = (
        [line for pattern in compiled(tuple(patterns)) for line in facts.search(pattern)]
        for patterns in (rule.patterns, rule.unless)
    )
    return Match(lines + unlimited[:1]) if lines and unlimited else None


def p2p_across_numa(facts: Facts) -> Match | None:
    """P2P/CUMEM between GPUs of different NUMA nodes, and one of the first collectives never ended.

    Topology alone is not enough: this path works on many machines, and some hang on PIX and work on SYS.
    """
    if not facts.hung_early:
        return None
    for process in facts.processes:
        for pair, transports in process.transports.items():
            gpus = [f"GPU{process.devices.get(rank, '')}" for rank in pair]
            for topology in facts.topologies:
                in_topology = all(gpu in topology.gpus for gpu in gpus) and gpus[0] != gpus[1]
                if in_topology and "P2P/CUMEM" in transports and topology.crosses_numa(*gpus):
                    link = topology.links[gpus[0]][gpus[1]]
                    sentence = f"{gpus[0]} and {gpus[1]} are linked by {link} and use P2P/CUMEM."
                    return Match([process.lines["P2P/CUMEM"], *facts.hung_early], [sentence])
    return None


def p2p_no_progress(facts: Facts) -> Match | None:
    """P2P channels were set up, and one of the first collectives never ended, for no other known reason."""
    lines = [line for p in facts.processes for name, line in p.lines.items() if name.startswith("P2P/")]
    if not lines or not facts.hung_early or acs_or_iommu(facts) or p2p_across_numa(facts):
        return None
    return Match([lines[0], *facts.hung_early])


def small_shm(facts: Facts) -> Match | None:
    if not facts.machine or facts.machine.shm_bytes is None:
        return None
    size, free = facts.machine.shm_bytes, facts.machine.shm_free_bytes or 0
    if size >= SMALL_SHM_BYTES and free >= SMALL_SHM_BYTES // 4:
        return None
    return Match([], [f"/dev/shm holds {size / 2**20:,.0f} MiB, of which {free / 2**20:,.0f} MiB are free."])


def small_memlock(facts: Facts) -> Match | None:
    machine = facts.machine
    if not machine or not machine.infiniband or machine.memlock_bytes is None:
        return None
    if machine.memlock_bytes >= SMALL_MEMLOCK_BYTES:
        return None
    return Match([], [f"This process may lock {machine.memlock_bytes / 1024:,.0f} KiB, and there are RDMA cards."])


def slow_pairs(facts: Facts) -> Match | None:
    """Pairs that `doctor --live` measured to be slow."""
    return Match([], facts.slow_pairs) if facts.slow_pairs else None

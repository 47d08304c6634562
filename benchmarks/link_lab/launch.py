"""Run a command under a real multi-node `torchrun`: an agent in each node's namespace, rendezvous over the link."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.link_lab.rates import Rate
from benchmarks.link_lab.shaping import unreachable
from benchmarks.link_lab.state import INTERFACE, Lab, Node
from training.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
PORT = 29500
"""Of the rendezvous; nothing else listens in node 0's namespace."""
GRACE_S = 10.0
"""How long other nodes get to end by themselves once one has failed."""
POLL_S = 0.1
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Failure:
    """A rank that ended otherwise than well, by itself."""

    node: Node
    rank: int
    exitcode: int
    time: float

    def __str__(self) -> str:
        how = f"exit code {self.exitcode}"
        if self.exitcode < 0:
            how = f"killed by {signal.Signals(-self.exitcode).name}"
        return f"rank {self.rank} on node {self.node.number} ({self.node.address}) failed: {how}"


def run_job(lab: Lab, command: list[str], ranks_per_node: int, logs: Path, tick: Callable[[], None]) -> None:
    """Run `command` on all nodes to its end. What rank 0 prints goes to standard output as it comes.

    Args:
        command: A Python script and its arguments.
        logs: An empty folder, in which each rank's standard error is kept.
        tick: Called about every `POLL_S` seconds.

    Raises:
        UserError: a node cannot be reached any more, or a rank failed; names the node.
    """
    agents = [start_agent(lab, node, command, ranks_per_node, logs) for node in lab.nodes]
    failed_at: float | None = None
    while any(agent.poll() is None for agent in agents):
        tick()
        if failed_at is None and any(agent.poll() for agent in agents):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + GRACE_S:
            break
        time.sleep(POLL_S)
    if any(agent.poll() != 0 for agent in agents):
        raise UserError(why_failed(lab, agents, logs))


def start_agent(lab: Lab, node: Node, command: list[str], ranks_per_node: int, logs: Path) -> subprocess.Popen:
    """`torchrun` on one node.

    Lost heartbeats of a node whose link is cut are no reason to give up: how long a job waits for the link is for the
    job's own timeout to say, and whether an agent lives, the lab sees itself.
    """
    is_host = int(node.number == 0)
    torchrun = (
        f"--nnodes={len(lab.nodes)}",
        f"--nproc-per-node={ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={lab.nodes[0].address}:{PORT}",
        f"--rdzv-id=lab{lab.number}",
        f"--rdzv-conf=is_host={is_host},read_timeout=86400,keep_alive_max_attempt=100000",
        f"--local-addr={node.address}",
        f"--log-dir={logs / node.port}",
        "--redirects=2",
    )
    failures = str(logs / f"{node.port}.failures.json")
    agent = (sys.executable, "-m", "benchmarks.link_lab.agent", failures, *torchrun, *command)
    with (logs / f"{node.port}.agent.log").open("w") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", node.namespace, *agent],
            env=environment(lab, node),
            stdin=subprocess.DEVNULL,
            stdout=None if is_host else subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the lab, which then ends its agents
            preexec_fn=end_with_parent,
        )


def end_with_parent() -> None:
    """In the child: `torchrun` ends its ranks on SIGTERM, which it gets if the lab is killed."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def environment(lab: Lab, node: Node) -> dict[str, str]:
    """What ranks see. On one machine NCCL would go past the link through shared memory, unless hosts have names."""
    rates = [bits for node in lab.nodes if (bits := Rate.parse(node.rate).bits_per_s)]
    own = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": node.namespace,
        "NCCL_IB_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    if rates:
        own["LINK_BITS_PER_S"] = str(min(rates))
    inherited = {name: value for name, value in os.environ.items() if name != "LINK_BITS_PER_S"}
    return {"OMP_NUM_THREADS": "1", **inherited, **own}


def why_failed(lab: Lab, agents: list[subprocess.Popen], logs: Path) -> str:
    """The reason in a line: a node out of reach before any rank that gave up on it, a killed rank before its victims."""
    lines = own_lines(logs)
    said = next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "").removeprefix(
        "error: "
    )
    found = failures(lab, logs)
    first = min(found, key=lambda failure: (failure.exitcode != -signal.SIGKILL, failure.time), default=None)
    parts = [
        f"node {node.number} ({node.address}) cannot be reached over its link, which is cut"
        for node in unreachable(lab)
    ]
    if first:
        parts.append(str(first))
    elif not parts:
        ended = next(node for node, agent in zip(lab.nodes, agents, strict=True) if agent.poll() != 0)
        parts.append(f"torchrun on node {ended.number} ({ended.address}) failed")
    if said and not (first and first.exitcode < 0):
        parts.append(said)
    return "; ".join(parts)


def failures(lab: Lab, logs: Path) -> list[Failure]:
    found = []
    for node in lab.nodes:
        path = logs / f"{node.port}.failures.json"
        if path.exists():
            found += [Failure(node, **entry) for entry in json.loads(path.read_text())]
    return found


def own_lines(logs: Path) -> list[str]:
    """What ranks wrote to standard error, and then the agents, without what is said twice."""
    paths = [*sorted(logs.rglob("stderr.log")), *sorted(logs.glob("*.agent.log"))]
    lines = [line for path in paths for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return list(dict.fromkeys(lines))

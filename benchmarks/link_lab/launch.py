"""Run a command under a real multi-node `torchrun`: one agent in each node's namespace, rendezvous over the link.

The agent is this file too: `python -m benchmarks.link_lab.launch FAILURES.json [arguments of torchrun]` writes which
ranks failed, and how, to a file instead of a long report.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.link_lab.failures import why_failed
from benchmarks.link_lab.shaping import unreachable
from benchmarks.link_lab.state import INTERFACE, Lab, Node
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate

ROOT = Path(__file__).resolve().parent.parent.parent
PORT = 29500
"""Of the rendezvous; nothing else listens in node 0's namespace."""
GRACE_S = 10.0
"""How long other nodes get to end by themselves once one has failed."""
POLL_S = 0.1
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


def run_job(lab: Lab, command: list[str], ranks_per_node: int, tick: Callable[[], None], log_folder: Path) -> None:
    """Run `command` on all nodes to its end. What ranks of node 0 print goes to standard output as it comes.

    Args:
        command: A Python script and its arguments.
        tick: Called about every `POLL_S` seconds.
        log_folder: Where standard error is kept if the ranks gave no reason in a line of their own.

    Raises:
        UserError: a node cannot be reached any more, or a rank failed; names the node.
    """
    agents = [start_agent(lab, node, command, ranks_per_node) for node in lab.nodes]
    give_up_at: float | None = None
    while any(agent.poll() is None for agent in agents):
        tick()
        if give_up_at is None and any(agent.poll() for agent in agents):
            give_up_at = time.monotonic() + (0 if unreachable(lab) else GRACE_S)
        if give_up_at is not None and time.monotonic() >= give_up_at:
            break
        time.sleep(POLL_S)
    codes = [agent.poll() for agent in agents]
    if any(codes) or None in codes:
        raise UserError(why_failed(lab, codes, log_folder))


def start_agent(lab: Lab, node: Node, command: list[str], ranks_per_node: int) -> subprocess.Popen:
    """`torchrun` on one node.

    It does not give up when heartbeats are lost, as they are while a link is cut. The job's own timeout decides how
    long to wait for a link, and the lab itself sees whether an agent lives.
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
        f"--log-dir={lab.logs / node.port}",
        "--redirects=2",
    )
    agent = (sys.executable, "-m", "benchmarks.link_lab.launch", str(lab.logs / f"{node.port}.json"))
    with (lab.logs / f"{node.port}.agent.log").open("w") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", node.namespace, *agent, *torchrun, *command],
            env=environment(lab, node),
            stdin=subprocess.DEVNULL,
            stdout=None if is_host else subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the lab, which then ends its agents
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),  # it ends when the lab is killed
        )


def environment(lab: Lab, node: Node) -> dict[str, str]:
    """What ranks see. NCCL_HOSTID differs by node, so that NCCL does not use shared memory instead of the link."""
    path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NCCL_HOSTID": node.namespace,
        "NCCL_IB_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
    }
    inherited = {name: value for name, value in os.environ.items() if name != "LINK_BITS_PER_S"}
    rates = [rate for each in lab.nodes if (rate := Rate.parse(each.rate).bits_per_s) is not None]
    slowest = {"LINK_BITS_PER_S": str(min(rates))} if rates else {}
    return {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **inherited, **own, **slowest}


def run_agent(failures_path: Path, arguments: list[str]) -> int:
    """`torchrun` in this process; the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)
    try:
        torchrun(arguments)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "exitcode": failure.exitcode, "time": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        failures_path.write_text(json.dumps(failures))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_agent(Path(sys.argv[1]), sys.argv[2:]))

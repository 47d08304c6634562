"""A real SLURM cluster on this machine: slurmctld, two slurmd and munged, each node in a network namespace of its own.

The nodes (`benchmarks.slurm_nodes`) have addresses and host names of their own, and whatever runs in them is ended when
the cluster is. GPUs are pretended: SLURM counts and hands out `GPUS` a node.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.slurm_nodes import PREFIX, nodes, why_no_nodes
from ddp_lab.runtime.errors import UserError

NODES = ("head", "n1", "n2")
"""The first one has slurmctld and no jobs."""
GPUS = 2
DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SBIN = "/usr/sbin"
START_S = 30.0

CONF = """
ClusterName=try
SlurmctldHost=head({address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
InactiveLimit=0
GresTypes=gpu
NodeName=n1 NodeAddr={n1} CPUs=8 RealMemory=4000 Gres=gpu:{gpus}
NodeName=n2 NodeAddr={n2} CPUs=8 RealMemory=4000 Gres=gpu:{gpus}
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n1,n2 PriorityTier=10
"""
"""`cred_expire` also delays the start of a requeued job, by default for two minutes."""


def why_no_cluster() -> str:
    """Why this machine cannot have one; empty if it can."""
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}") is None]
    if missing:
        return f"{', '.join(missing)} not found; install them, e.g. apt-get install slurm-wlm munge"
    return why_no_nodes()


@dataclass
class Cluster:
    """Commands run on the head node, in the folder of the project."""

    folder: Path

    def command(self, node: str, *command: str) -> list[str]:
        """What runs `command` on a node, under its host name and with names of all nodes."""
        setup = f'hostname {node} && mount --bind {self.folder}/hosts /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", PREFIX + node, "unshare", "--uts", "--mount", "sh", "-c", setup, "sh", *command]

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{SBIN}"
        return {**inherited, "SLURM_CONF": f"{self.folder}/slurm.conf", "PATH": path, "OMP_NUM_THREADS": "1"}

    def start(self, node: str, *command: str) -> None:
        """Start a daemon. It runs until the cluster is removed."""
        with (self.folder / f"{command[0]}-{node}.out").open("ab") as output:
            subprocess.Popen(
                self.command(node, *command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def run(self, *command: str, node: str = "head") -> str:
        """What a command prints.

        Raises:
            UserError: it failed.
        """
        answer = subprocess.run(
            self.command(node, *command), env=self.environment, capture_output=True, text=True, timeout=120
        )
        if answer.returncode:
            raise UserError(f"{' '.join(command)}: {answer.stderr.strip() or answer.stdout.strip()}")
        return answer.stdout


@contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Within this context the cluster is up. However it ends, no daemon and no job is left.

    Raises:
        UserError: it cannot be made.
    """
    if reason := why_no_cluster():
        raise UserError(f"no SLURM cluster here: {reason}")
    with (
        tempfile.TemporaryDirectory(prefix="ddp-lab-slurm-", ignore_cleanup_errors=True) as folder,
        nodes(NODES) as addresses,
    ):
        cluster = Cluster(Path(folder))
        configure(cluster, addresses)
        munge = [f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key", f"--pid-file={folder}/munge.pid"]
        munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", "--force", "--foreground"]
        cluster.start("head", "munged", *munge)
        wait_for(lambda: Path(folder, "munge.socket").exists(), START_S, "munged does not start")
        cluster.start("head", "slurmctld", "-D")
        for node in NODES[1:]:
            cluster.start(node, "slurmd", "-D", "-N", node)
        wait_for(
            lambda: cluster.run("sinfo", "--noheader", "--format=%D %t", "--partition=low").split() == ["2", "idle"],
            START_S,
            "the nodes of SLURM do not come up",
        )
        yield cluster


def configure(cluster: Cluster, addresses: dict[str, str]) -> None:
    folder = cluster.folder
    folder.chmod(0o755)
    hosts = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "state").mkdir()
    for node in NODES[1:]:
        (folder / f"spool-{node}").mkdir()
    conf = CONF.format(folder=folder, address=addresses["head"], n1=addresses["n1"], n2=addresses["n2"], gpus=GPUS)
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def wait_for(holds, limit_s: float, problem: str) -> None:
    """Raises:
    UserError: it does not hold in time.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            if holds():
                return
        except UserError as error:
            problem_now = f"{problem}: {error}"
        else:
            problem_now = problem
        if time.monotonic() > deadline:
            raise UserError(problem_now)
        time.sleep(0.3)

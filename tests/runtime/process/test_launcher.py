"""Which rank a process is, by the variables that each launcher really sets."""

from ddp_lab.runtime.process.launcher import adopt_launcher, first_host, port_of
from tests.tables import each_row

SBATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "3"}
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu-[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",  # that of the login node
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1883242497",
}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}


def adopted(environ):
    """What is added to the variables."""
    after = dict(environ)
    adopt_launcher(after)
    assert environ.items() <= after.items()
    return {name: value for name, value in after.items() if name not in environ}


def test_a_task_of_srun():
    assert adopted(STEP) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu-01",
        "MASTER_PORT": str(port_of("7.0")),
    }
    assert port_of("7.0") != port_of("7.1") and 15000 <= port_of("7.0") < 31000


@each_row(
    "environ",
    [
        {},
        SBATCH,
        {**STEP, "SLURM_PTY_PORT": "4000", "SLURM_STEP_NUM_TASKS": "1"},  # a shell by `srun --pty`
        {**STEP, "SLURM_STEP_ID": "4294967290"},  # a shell by `salloc`
        {**STEP, **TORCHRUN},
        {**MPIRUN, **TORCHRUN},
    ],
)
def test_what_is_no_rank_of_slurm_or_mpirun(environ):
    assert adopted(environ) == {}


def test_a_process_of_mpirun():
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    assert adopted(MPIRUN) == {**expected, "MASTER_PORT": str(port_of("1883242497"))}
    assert "MASTER_ADDR" not in adopted({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "4"})  # where rank 0 is, nobody tells


@each_row(
    "hosts, first",
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("gpu-[007-012,020],login", "gpu-007"),
        ("a[3,5-6]b,c[1-2]", "a3b"),
        ("rack[1-2]-node[03-04].cluster", "rack1-node03.cluster"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first

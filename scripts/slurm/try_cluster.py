"""Try the batch scripts on a real SLURM cluster of this machine:  sudo python scripts/slurm/try_cluster.py

It makes a slurmctld and two slurmd (`benchmarks.slurm_cluster`), submits every script to them, and checks what comes
out. It takes about three minutes on two cores. Nothing is left behind.

Exit code 0: all is right. 1: something is not; one line on standard error says what. 77: skipped, since this machine
cannot have such a cluster; one line says why.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.slurm_cluster import Cluster, slurm_cluster, wait_for, why_no_cluster
from training.cli import OneLineParser
from training.errors import UserError

SKIPPED = 77
LIMIT_S = 150.0
CHOICE, STEPS = "zero2", 3000
TRAINING = ["main_shard.py", "--ddp-choice", CHOICE, "--workload", "mlp", "--depth", "3", "--width", "64"]
TRAINING += ["--train-samples", str(8 * STEPS), "--eval-samples", "4", "--no-profile"]


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, help="keep results and logs there (default: remove them)")
    options = parser.parse_args()
    if reason := why_no_cluster():
        print(f"skipped: no SLURM cluster here: {reason}")
        return SKIPPED
    try:
        with tempfile.TemporaryDirectory(prefix="ddp-lab-slurm-jobs-") as folder, slurm_cluster() as cluster:
            jobs = Jobs(cluster, (options.output_dir or Path(folder)).absolute())
            time_limit_and_drained_node(jobs)
            preemption(jobs)
            sweep(jobs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class Jobs:
    """Submits the scripts, and looks at what becomes of the jobs. Each has a folder of results by its name."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self._began = cluster, folder, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)

    def submit(self, name: str, script: str, *flags: str, training: list[str] = TRAINING) -> str:
        """The id of the job."""
        variables = f"--export=ALL,RESULTS={self.folder / name}"
        output = f"--output={self.folder / name}.log"
        path = f"scripts/slurm/{script}.sbatch"
        return self.cluster.run(
            "sbatch", "--parsable", "--cpus-per-task=1", variables, output, *flags, path, *training
        ).strip()

    def of(self, job: str) -> dict[str, str]:
        """What SLURM knows of a job, by its own names."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.run("scontrol", "show", "job", "--oneliner", job)))

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def await_log(self, name: str, text: str) -> None:
        wait_for(lambda: text in self.log(name), LIMIT_S, f"'{text}' is not in the log of job {name}")

    def await_end(self, name: str, job: str) -> None:
        """Wait until it is completed.

        Raises:
            UserError: it failed, or takes too long.
        """
        ended = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_for(lambda: self.of(job)["JobState"] in ended, LIMIT_S, f"job {name} does not end: {self.log(name)[-2000:]}")
        state = self.of(job)["JobState"]
        require(state == "COMPLETED", f"job {name} is {state}: {self.log(name)[-2000:]}")

    def records(self, name: str) -> list[dict[str, Any]]:
        """Of all its runs, the earliest first."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{name}/profile/{CHOICE}/*.run.json"))]

    def last_checkpoint(self, name: str) -> list[bytes]:
        """All tensors and random states of its ranks after the last step, as files."""
        folder = self.folder / name / "checkpoints" / CHOICE / f"step_{STEPS:08d}"
        return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def require(holds: bool, problem: str) -> None:
    """Raises:
    UserError: it does not hold.
    """
    if not holds:
        raise UserError(problem)


def require_same_as_straight(jobs: Jobs, name: str, host: str | None = None) -> None:
    """Check that a job that was stopped once has ended as the one that was not, to the last bit."""
    (expected,), runs = jobs.records("straight"), jobs.records(name)
    require([run["ended"]["how"] for run in runs] == ["stopped", "completed"], f"{name}: not stopped exactly once")
    require(runs[1]["resumed_from"]["step"] == runs[0]["ended"]["step"], f"{name}: did not resume where it stopped")
    for field in ("train_loss", "eval"):
        require(runs[1][field] == expected[field], f"{name}: {field} differs from the run that was not stopped")
    require(jobs.last_checkpoint(name) == jobs.last_checkpoint("straight"), f"{name}: the last checkpoint differs")
    jobs.say(f"{name}: stopped after step {runs[0]['ended']['step']}, resumed, and equal to the last bit")


def time_limit_and_drained_node(jobs: Jobs) -> None:
    """Two jobs on a node each. One comes to its time limit on a node that is drained, and goes on on the other."""
    straight = jobs.submit("straight", "one_node", "--nodelist=n1")
    limited = jobs.submit("time-limit", "one_node", "--time=1", "--signal=B:USR1@20")
    jobs.await_log("time-limit", "step 1/")
    require(jobs.of(limited)["BatchHost"] == "n2", "the second job is not on the second node")
    jobs.cluster.run("scontrol", "update", "nodename=n2", "state=drain", "reason=try")
    jobs.say("time-limit: trains on n2, which is now drained")
    wait_for(lambda: jobs.of(limited)["Restarts"] == "1", LIMIT_S, "time-limit: the job is not requeued")
    jobs.cluster.run("scontrol", "update", f"jobid={limited}", "timelimit=30")
    jobs.say("time-limit: got SIGUSR1 ahead of its time limit, and is requeued")
    jobs.await_end("straight", straight)
    jobs.say(f"straight: done on n1 with {jobs.records('straight')[0]['world_size']} ranks, one for each GPU")
    jobs.await_end("time-limit", limited)
    require(jobs.of(limited)["BatchHost"] == "n1", "time-limit: ran on the drained node again")
    jobs.cluster.run("scontrol", "update", "nodename=n2", "state=resume")
    require_same_as_straight(jobs, "time-limit")


def preemption(jobs: Jobs) -> None:
    """A job of plain `srun` on both nodes gives way to one of `srun torchrun`, and goes on afterwards."""
    on_both = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1")
    low = jobs.submit("preempted", "srun", *on_both)
    rank_log = "preempted/logs/rank-0"
    jobs.await_log(rank_log, "step 1/")
    high = jobs.submit(
        "urgent", "nodes", *on_both, "--partition=high", "--exclusive", training=[*TRAINING, "--max-steps", "20"]
    )
    jobs.await_end("urgent", high)
    require(jobs.records("urgent")[0]["world_size"] == 2, "urgent: not on both nodes")
    jobs.say("urgent: done with a rank on each node")
    require(jobs.of(low)["Restarts"] == "1", "preempted: the job is not requeued")
    jobs.await_end("preempted", low)
    require_same_as_straight(jobs, "preempted")


def sweep(jobs: Jobs) -> None:
    """A job for each choice, and one that reports."""
    results, choices = jobs.folder / "sweep", ("flat_ddp", "pytorch_ddp")
    variables = f"CHOICES={' '.join(choices)}", "SBATCH_EXCLUSIVE=no", f"SBATCH_OUTPUT={results}-%j.log"
    command = ("scripts/slurm/sweep.sh", "ddp", str(results), "--workload", "mlp", "--depth", "3", "--width", "64")
    said = jobs.cluster.run("env", *variables, *command)
    report = re.findall(r"report: job (\d+)", said)[0]
    jobs.await_end("sweep", report)
    rows = (results / "reports" / "compare.csv").read_text()
    require(all(choice in rows for choice in choices), f"sweep: a choice is not in the report: {rows}")
    jobs.say(f"sweep: {len(choices)} choices as an array, and the report on them")


if __name__ == "__main__":
    sys.exit(main())

"""Try the batch scripts on a real SLURM cluster of this machine:  sudo python scripts/slurm/try_cluster.py

It makes a slurmctld and two slurmd (`benchmarks.slurm_cluster`), submits every script to them, and checks what comes
out. It takes about three minutes on two cores. Nothing is left behind.

Exit code 0: all is right. 1: something is not; one line on standard error says what. 77: skipped, since this machine
cannot have such a cluster; one line says why. 130 or 143: stopped by Ctrl-C or SIGTERM.
"""

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

from safetensors.numpy import load_file

from benchmarks.slurm_cluster import GPUS, Cluster, slurm_cluster, wait_for, why_no_cluster
from ddp_lab.runtime.cli import OneLineParser
from ddp_lab.runtime.errors import UserError

SKIPPED = 77
LIMIT_S = 150.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHOICE, ENDLESS, STEPS_AFTER = "zero2", 1_000_000, 200
"""A training is stopped at some step, and ends so many steps later."""
EVERY, ALL = 100, ("--keep-last", "1000")
"""The run that is not stopped saves so often, so that shorter ones can be compared with it."""
TRAINING = ["main_shard.py", "--ddp-choice", CHOICE, "--workload", "mlp", "--depth", "3", "--width", "64"]
TRAINING += ["--train-samples", "800", "--epochs", str(ENDLESS // 100), "--eval-samples", "4", "--no-profile"]


def main() -> int:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, help="keep results and logs there (default: remove them)")
    options = parser.parse_args()
    for number in ENDING:
        signal.signal(number, end)
    if reason := why_no_cluster():
        print(f"skipped: no SLURM cluster here: {reason}")
        return SKIPPED
    try:
        with tempfile.TemporaryDirectory(prefix="ddp-lab-slurm-jobs-") as folder, slurm_cluster() as cluster:
            jobs = Jobs(cluster, (options.output_dir or Path(folder)).absolute())
            time_limit_and_drained_node(jobs)
            preemption(jobs)
            elastic(jobs)
            sweep(jobs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def end(number: int, frame: object) -> None:
    """The handler of `ENDING`. A second signal would interrupt the removal of the cluster."""
    for one in ENDING:
        signal.signal(one, signal.SIG_IGN)
    sys.exit(128 + number)


class Jobs:
    """Submits the scripts, and looks at what becomes of the jobs. Each has a folder of results by its name."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder, self._began = cluster, folder, time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        require(not any(folder.iterdir()), f"--output-dir {folder} is not empty; give another")
        self._config = folder / "steps.toml"

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)

    def submit(
        self, name: str, script: str, *flags: str, training: list[str] = TRAINING, has_signal: bool = True
    ) -> str:
        """The id of the job. Without `has_signal`, the script does not ask SLURM for SIGUSR1."""
        variables = f"--export=ALL,RESULTS={self.folder / name}"
        output = f"--output={self.folder / name}.log"
        command = ["sbatch", "--parsable", "--cpus-per-task=1", variables, output, *flags]
        path = ROOT / "scripts" / "slurm" / f"{script}.sbatch"
        if not has_signal:
            lines = path.read_text().splitlines(keepends=True)
            path = self.folder / f"{name}.sbatch"
            path.write_text("".join(line for line in lines if not line.startswith("#SBATCH --signal")))
        command += [str(path), *training]
        if "--max-steps" not in training:
            command += ["--config", str(self._config)]
        return self.cluster.run(*command).strip()

    def set_steps(self, steps: int) -> None:
        """Change the length of the trainings that start from now on."""
        self.steps = steps
        self._config.write_text(f"max-steps = {steps}\n")

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
        wait_for(
            lambda: self.of(job)["JobState"] in ended, LIMIT_S, f"job {name} does not end: {self.log(name)[-2000:]}"
        )
        state = self.of(job)["JobState"]
        require(state == "COMPLETED", f"job {name} is {state}: {self.log(name)[-2000:]}")

    def records(self, name: str) -> list[dict[str, Any]]:
        """Of all its runs, the earliest first."""
        return [
            json.loads(path.read_text()) for path in sorted(self.folder.glob(f"{name}/profile/{CHOICE}/*.run.json"))
        ]

    def last_checkpoint(self, name: str) -> dict[tuple[str, str], bytes]:
        """By rank and name, all tensors that its ranks hold after the last step: parameters, states of the optimizer
        and of torch's random numbers."""
        folder = self.folder / name / "checkpoints" / CHOICE / f"step_{self.steps:08d}"
        files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
        return {(rank, tensor): value.tobytes() for rank, file in files.items() for tensor, value in file.items()}


def require(holds: bool, problem: str) -> None:
    """Raises:
    UserError: it does not hold.
    """
    if not holds:
        raise UserError(problem)


def require_same_as_straight(jobs: Jobs, name: str, how: str = "stopped") -> None:
    """Check that a job whose first run ended early, and `how`, has ended as the one that ran to its end at once."""
    (expected,), runs = jobs.records("straight"), jobs.records(name)
    require([run["ended"]["how"] for run in runs] == [how, "completed"], f"{name}: not {how} exactly once")
    ended, resumed = runs[0]["ended"]["step"], runs[1]["resumed_from"]["step"]
    # One that is killed may do steps, and save, while its end is being recorded. What counts is how it goes on.
    require(resumed > 0, f"{name}: ended in step {ended} and began anew")
    require(resumed == ended or how != "stopped", f"{name}: the steps from {resumed} to {ended} are lost")
    losses = expected["train_loss"][: jobs.steps]
    require(len(losses) == jobs.steps, f"{name}: the run that was not stopped has fewer steps")
    require(runs[1]["train_loss"] == losses, f"{name}: losses differ from those of the run that was not stopped")
    require(jobs.last_checkpoint(name) == jobs.last_checkpoint("straight"), f"{name}: the last checkpoint differs")
    jobs.say(f"{name}: {how} after step {ended}, resumed after step {resumed}, equal to the last bit")


def time_limit_and_drained_node(jobs: Jobs) -> None:
    """A job comes to its time limit on a node that is drained, and goes on on the other one."""
    jobs.set_steps(ENDLESS)
    job = jobs.submit("time-limit", "one_node", "--time=1", "--signal=B:USR1@20")
    jobs.await_log("time-limit", "step 1/")
    first = jobs.of(job)["BatchHost"]
    jobs.cluster.run("scontrol", "update", f"nodename={first}", "state=drain", "reason=try")
    jobs.say(f"time-limit: trains on {first}, which is now drained")
    wait_for(lambda: bool(jobs.records("time-limit")), LIMIT_S, "time-limit: the training is not stopped")
    jobs.set_steps(jobs.records("time-limit")[0]["ended"]["step"] + STEPS_AFTER)
    wait_for(lambda: jobs.of(job)["Restarts"] == "1", LIMIT_S, "time-limit: the job is not requeued")
    jobs.cluster.run("scontrol", "update", f"jobid={job}", "timelimit=30")
    jobs.say("time-limit: SIGUSR1 came ahead of the time limit; the training saved, and the job is requeued")
    wait_for(lambda: jobs.of(job)["JobState"] == "RUNNING", LIMIT_S, "time-limit: the job does not run again")
    require(jobs.of(job)["BatchHost"] != first, "time-limit: runs on the drained node again")
    jobs.cluster.run("scontrol", "update", f"nodename={first}", "state=resume")
    straight = jobs.submit("straight", "one_node", training=[*TRAINING, *f"--checkpoint-every {EVERY}".split(), *ALL])
    jobs.await_end("time-limit", job)
    jobs.await_end("straight", straight)
    require(jobs.records("straight")[0]["world_size"] == GPUS, "straight: not a rank for each GPU")
    require_same_as_straight(jobs, "time-limit")


def preemption(jobs: Jobs) -> None:
    """Two jobs on both nodes, one of plain `srun`, give way to a third one, and go on afterwards.

    The first gets SIGUSR1, and the other SIGTERM, as on a cluster without `preempt_send_user_signal`.
    """
    jobs.set_steps(ENDLESS)
    low = jobs.submit("preempted", "srun", "--ntasks-per-node=1", "--gpus-per-node=1")
    often = [*TRAINING, "--checkpoint-every", "20"]
    terminated = jobs.submit("terminated", "nodes", "--gpus-per-node=1", training=often, has_signal=False)
    jobs.await_log("preempted/logs/rank-0", "step 1/")
    wait_for(lambda: any(jobs.folder.glob("terminated/checkpoints/*/step_*")), LIMIT_S, "terminated: no checkpoint")
    high = jobs.submit("urgent", "nodes", "--partition=high", "--exclusive", training=[*TRAINING, "--max-steps", "20"])
    both = ("preempted", "terminated")
    wait_for(lambda: all(map(jobs.records, both)), LIMIT_S, "preempted, terminated: a training does not end")
    jobs.set_steps((max(jobs.records(name)[0]["ended"]["step"] for name in both) // EVERY + 1) * EVERY)
    jobs.await_end("urgent", high)
    require(jobs.records("urgent")[0]["world_size"] == 2 * GPUS, "urgent: not a rank for each GPU of both nodes")
    require([jobs.of(job)["Restarts"] for job in (low, terminated)] == ["1", "1"], "a preempted job is not requeued")
    jobs.say(f"urgent: preempted both other jobs, and is done with {GPUS} ranks on each node")
    jobs.await_end("preempted", low)
    jobs.await_end("terminated", terminated)
    require_same_as_straight(jobs, "preempted")
    require_same_as_straight(jobs, "terminated", "interrupted")


def elastic(jobs: Jobs) -> None:
    """Of two nodes, one is lost and joins again. The other one trains on alone meanwhile."""
    jobs.set_steps(ENDLESS)
    often = [*TRAINING, "--checkpoint-every", "20"]
    array = jobs.submit("elastic", "elastic", "--gpus-per-node=1", "--open-mode=append", training=often)

    def await_resumed(times: int) -> None:
        wait_for(lambda: jobs.log("elastic").count("resumes after step") == times, LIMIT_S, "elastic: does not resume")

    wait_for(lambda: any(jobs.folder.glob("elastic/checkpoints/*/step_*")), LIMIT_S, "elastic: no checkpoint")
    jobs.cluster.run("scontrol", "requeuehold", f"{array}_1")
    await_resumed(1)
    jobs.cluster.run("scontrol", "release", f"{array}_1")
    await_resumed(2)
    jobs.cluster.run("scancel", "--batch", "--signal=USR1", array)
    wait_for(lambda: len(jobs.records("elastic")) == 3, LIMIT_S, "elastic: the training is not stopped")
    jobs.cluster.run("scancel", array)
    runs = jobs.records("elastic")
    require([run["world_size"] for run in runs] == [2, 1, 2], "elastic: not with 2 ranks, 1 and 2")
    require(set(runs[-1]["step_samples"]) == {8}, "elastic: the global batch has changed")
    jobs.say("elastic: went on with 1 rank when a node was lost, and with 2 when it joined again")


def sweep(jobs: Jobs) -> None:
    """A job for each choice, and one that reports."""
    results, choices = jobs.folder / "sweep", ("flat_ddp", "pytorch_ddp")
    variables = f"CHOICES={' '.join(choices)}", f"SBATCH_OUTPUT={results}-%j.log"
    command = ("scripts/slurm/sweep.sh", "ddp", str(results), "--workload", "mlp", "--depth", "3", "--width", "64")
    said = jobs.cluster.run("env", *variables, *command)
    report = re.findall(r"report: job (\d+)", said)[0]
    jobs.await_end("sweep", report)
    rows = (results / "reports" / "compare.csv").read_text()
    require(all(choice in rows for choice in choices), f"sweep: a choice is not in the report: {rows}")
    jobs.say(f"sweep: {len(choices)} choices as an array, and the report on them")


if __name__ == "__main__":
    sys.exit(main())

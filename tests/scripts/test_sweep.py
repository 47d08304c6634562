"""An interrupted sweep continues, also within a choice; which flags its runs get; how its ranks fail."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import ddp
import tensor_parallel
from ddp_lab.commands.compare import LABEL
from ddp_lab.record_format import SWEEP_VARIABLE
from ddp_lab.runtime.checkpoint.manifest import folder_name
from ddp_lab.runtime.flags import parse_config
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.runtime.process.launcher import STOPPING
from ddp_lab.sweep import command as script
from ddp_lab.sweep import passes
from ddp_lab.sweep.done import latest_sweep, unfinished
from ddp_lab.sweep.meshes import mesh_flags, mesh_labels, mesh_setting, sort_key
from tests.in_process import run_in_process
from tests.tables import each_row
from tests.traces import write

ROOT = Path(__file__).parents[2]
CHOICES = [name for name in ddp.CHOICES if name != "pytorch_ddp_plain"]  # a variant, which no sweep runs
NUMBERS = itertools.count()
Train = Callable[[str, list[str]], bool]


class Sweep:
    """`ddp-lab sweep ddp 2` in `folder`, in this process; or of another family, on other ranks.

    Attributes:
        runs: The settings of each run that it starts, by label; of several passes, those of the last.
        ignored: The signals that it takes no more when it ends.
    """

    def __init__(self, folder):
        self.folder = folder
        self.of = ["ddp", "2"]
        self.runs = {}
        self.report_problem = None

    def run(self, *arguments, train=lambda *_: True):
        self.runs = {}

        def started(config, ranks, registry):
            self.runs[config.label] = config
            how = "interrupted"
            try:
                how = "completed" if train(config.label, config) else "failed"
            finally:
                self.leave_record(config.label, how)
            return how == "completed"

        def reported(*_, passes):
            if self.report_problem:
                raise self.report_problem
            return self.folder / "compare.html"

        handlers = {number: signal.getsignal(number) for number in STOPPING}
        with (
            mock.patch.object(passes, "start_ranks", started),
            mock.patch("ddp_lab.analysis.comparison.choices.report_on_choices", reported),
        ):
            try:
                command = [*self.of, "--passes", "1", "--output-dir", str(self.folder), *arguments]
                return run_in_process(script, *command)
            finally:
                self.ignored = [number for number in handlers if signal.getsignal(number) == signal.SIG_IGN]
                for number, handler in handlers.items():
                    signal.signal(number, handler)

    def leave_record(self, label, how):
        run_id = f"20261121-093000-{next(NUMBERS):04}"
        content = {"choice": label.split("@")[0], "run_id": run_id, "ended": {"how": how}}
        content["sweep"] = json.loads(os.environ.pop(SWEEP_VARIABLE))
        write(self.folder / "profile" / label / f"{run_id}.run.json", content)


@pytest.fixture
def sweep(tmp_path):
    return Sweep(tmp_path)


def stopped_in(last):
    def train(choice, config):
        if choice == last:
            raise KeyboardInterrupt
        return True

    return train


@pytest.mark.parametrize("last", [0, 2])
def test_a_sweep_goes_on_wherever_it_was_stopped(sweep, last):
    """Also in its first choice; what an earlier sweep finished does not count. A finished one trains nothing."""
    sweep.run(train=stopped_in(CHOICES[3]))
    answer = sweep.run(train=stopped_in(CHOICES[last]))
    assert answer.returncode == 130 and "the same command with --resume continues" in answer.stderr
    assert sweep.ignored == STOPPING, "a second Ctrl-C shows no traceback"
    answer = sweep.run("--resume")
    assert answer.returncode == 0 and list(sweep.runs) == CHOICES[last:]
    again = sweep.run("--resume")
    assert again.returncode == 0 and not sweep.runs


def test_passes_go_on_in_their_middle(sweep):
    """Each later pass has an order of its own, which stays when the sweep resumes, and leaves out what is done once."""
    flags = ["--passes", "3", "--checkpoint-every", "2", "--generate=3", "--lr", "0.1"]
    trained = []

    def train(choice, config):
        once = (config.checkpoint_every, config.generate) == (2, 3)
        assert once != config.no_eval
        trained.append((choice, once))
        assert (config.max_steps, config.lr) == (20, 0.1)
        if len(trained) == len(CHOICES) + 3:
            raise KeyboardInterrupt
        return True

    answer = sweep.run(*flags, train=train)
    assert f"{trained[-1][0]}: 10 of 21 (pass 2 of 3), about 0 s to go" in answer.stdout
    assert "9 of 21 runs are kept" in answer.stderr and answer.stderr.count("\n") == 1
    line = unfinished(*latest_sweep(sweep.folder, "ddp"))
    assert "9 of 21 runs, pass 2 of 3" in line and line.endswith(" --lr 0.1 --resume")
    answer = sweep.run(*flags, "--resume", train=train)
    assert (
        answer.returncode == 0
        and answer.stdout.startswith("7 strategies x 3 passes")
        and unfinished(*latest_sweep(sweep.folder, "ddp")) == ""
    )
    assert trained.pop(len(CHOICES) + 2) == trained[len(CHOICES) + 2], "the run that was stopped is done again"
    assert trained == [(label, number == 1) for label, number in passes.planned(CHOICES, 3, seed=0)]
    orders = [trained[start : start + len(CHOICES)] for start in range(0, 21, len(CHOICES))]
    assert [choice for choice, _ in orders[0]] == CHOICES and orders[1] != orders[2]
    assert all(sorted(choice for choice, _ in order) == sorted(CHOICES) for order in orders)


def test_what_runs_and_what_does_not(sweep):
    """What failed is trained again; three ranks take the nearest batch; what refuses a flag is left out."""
    assert sweep.run(train=lambda choice, _: choice != CHOICES[1]).returncode == 1
    assert sweep.run("--resume").returncode == 0 and list(sweep.runs) == [CHOICES[1]]
    sweep.of = ["ddp", "3"]
    assert sweep.run("--max-steps", "4").returncode == 0 and list(sweep.runs) == CHOICES
    assert {config.global_batch_size for config in sweep.runs.values()} == {6}
    sweep.of = ["sharding", "2"]
    ended = sweep.run("--offload", "optimizer")
    assert ended.returncode == 0 and list(sweep.runs) == ["zero1", "zero2", "zero3"]
    assert "baseline: left out: --offload optimizer: zero1, zero2 and zero3 take" in ended.stdout
    sweep.of = ["ddp", "2"]
    ended = sweep.run("--param-dtype", "bf16")
    assert ended.returncode == 1 and not sweep.runs
    assert ended.stderr == "error: no strategy can do what these flags ask for\n"


def test_a_link_is_not_added_where_it_cannot_pace_a_mesh(sweep):
    sweep.of = ["parallel", "2"]
    for mesh, workload, link in (("ep=2", "sample-moe", "none"), ("cp=2", "sample-lm", "2.5gbit")):
        assert sweep.run("--mesh", mesh, "--workload", workload).returncode == 0 and sweep.runs
        assert {config.link for config in sweep.runs.values()} == {link}


def test_a_stopped_choice_goes_on_from_its_own_checkpoint(sweep):
    sweep.run("--checkpoint-every", "2", train=stopped_in(CHOICES[1]))
    for choice in CHOICES[:2]:
        (sweep.folder / "checkpoints" / choice / folder_name(2)).mkdir(parents=True)
    assert sweep.run("--checkpoint-every", "2", "--resume").returncode == 0
    assert [choice for choice, config in sweep.runs.items() if config.resume == "latest"] == [CHOICES[1]]


@each_row(
    ("gpus", "flags", "link"),
    [
        (False, [], "2.5gbit"),
        (False, ["--link", "250mbit,1ms"], "250mbit,1ms"),
        (False, ["--link=none"], "none"),
        (True, [], "none"),
        (True, ["--device", "cpu"], "2.5gbit"),
    ],
)
def test_without_a_gpu_a_sweep_shows_the_physics(tmp_path, monkeypatch, gpus, flags, link):
    sweep = Sweep(tmp_path)
    monkeypatch.setattr(script, "sees_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0, 0))
    answer = sweep.run(*flags)
    first, *lines = answer.stdout.splitlines()
    assert answer.returncode == 0 and ("links: as this" if link == "none" else f"links: {link} for each rank") in first
    assert first.startswith(f"{len(sweep.runs)} strategies x 1 pass = {len(sweep.runs)} runs of 40 steps, workload ")
    assert (gpus and not flags) or lines[0].startswith("warning: this machine is busy: 1000.0 threads")
    assert {config.link for config in sweep.runs.values()} == {link}


def test_the_file_that_a_run_left_sets_the_flags_of_a_sweep(sweep):
    """But for the choice; flags on the command line win, also those that the sweep would set itself."""
    path = sweep.folder / "run.toml"
    path.write_text('ddp-choice = "zero3"\nmax-steps = 20\nlr = 0.5\nseed = 3\n')
    assert sweep.run("--config", str(path), "--seed", "4").returncode == 0
    (config,) = {replace(config, choice="") for config in sweep.runs.values()}
    assert (config.max_steps, config.lr, config.seed, config.output_dir) == (20, 0.5, 4, str(sweep.folder))
    assert list(sweep.runs) == CHOICES


# Over meshes ---------------------------------------------------------------------------------------------------------

ONLY = {"pytorch_pp": "pytorch_pp has stages and no", "transformers_ep": "transformers_ep: must be with --mesh"}
ON_FOUR = [
    "tp@tp4",
    "tp@tp4-sp",
    "pytorch_tp@tp4",
    "tp@dp2-tp2",
    "zero1@dp2-tp2",
    "zero1@dp2-tp2-sp",
]
ON_FOUR += ["zero3@dp2-tp2", "zero3@dp2-tp2-sp", "pytorch_fsdp_tp@dp2-tp2", "zero3@dp4", "zero3@replicate2-shard2"]


@pytest.fixture
def mesh_sweep(sweep):
    sweep.of = ["parallel", "4"]
    return sweep


def test_a_sweep_over_meshes_has_a_short_list(mesh_sweep):
    """Each run in folders of its own, on the language model that ships with the project."""
    answer = mesh_sweep.run("--lr", "0.1", train=stopped_in("zero3@dp2-tp2-sp"))
    assert answer.returncode == 130
    assert mesh_sweep.run("--lr", "0.1", "--resume").returncode == 0
    assert list(mesh_sweep.runs) == ON_FOUR[ON_FOUR.index("zero3@dp2-tp2-sp") :]
    assert mesh_sweep.run("--lr", "0.1").returncode == 0 and list(mesh_sweep.runs) == ON_FOUR
    for config in mesh_sweep.runs.values():
        assert (config.workload, config.lr) == ("sample-lm", 0.1)
    hub_flags = ["--task", "causal-lm", "--model", "M", "--dataset", "D"]
    for flags, workload in ((["--workload", "mlp"], "mlp"), (hub_flags, "auto")):
        mesh_sweep.run(*flags, train=stopped_in(ON_FOUR[0]))
        assert mesh_sweep.runs[ON_FOUR[0]].workload == workload


def test_a_sweep_on_a_shared_gpu_leaves_out_meshes_that_hang(mesh_sweep):
    for flags, gpus, hang in ([], 1, True), (["--backend", "gloo"], 1, False), ([], 4, False):
        with mock.patch("torch.cuda.device_count", return_value=gpus):
            answer = mesh_sweep.run("--share-gpu", *flags)
        labels = [label for label in ON_FOUR if not (hang and Mesh.of_label(mesh_setting(label)).has_parts)]
        assert answer.returncode == 0 and list(mesh_sweep.runs) == labels
        assert answer.stdout.count("left out: --share-gpu: over NCCL") == len(ON_FOUR) - len(labels)


@each_row("ranks", [2, 3, 6, 8, 12, 64])
def test_meshes_of_the_short_list_fit(ranks):
    labels = mesh_labels(ranks)
    assert labels == sorted(set(labels), key=lambda label: sort_key(label, tensor_parallel.CHOICES))
    for label in labels:
        flags = ["--ddp-choice", label.split("@")[0], *mesh_flags(mesh_setting(label))]
        config = parse_config("", tensor_parallel.REGISTRY, (), flags)
        mesh = Mesh.parse(config.mesh or "")
        assert config.label == label and mesh.size == ranks and mesh.degree("tp") <= 4
        tensor_parallel.load(config.choice).supports.require_mesh(mesh)


@each_row(
    ("mesh", "left_out"),
    [
        ("dp=2,tp=2", {"pytorch_tp": "pytorch_tp has no data-parallel dimension"}),
        ("tp=4", {}),
        ("dp=4", dict.fromkeys(["pytorch_tp", "pytorch_fsdp_tp"], "--mesh without tp: parallelize_module has nothing")),
        (
            "replicate=2,shard=2",
            dict.fromkeys(
                ["tp", "simple_ddp", "pytorch_tp", "pytorch_fsdp_tp", *ONLY], "--mesh with replicate and shard"
            ),
        ),
        ("shard=2,tp=2", {"pytorch_tp": "pytorch_tp has no", "pytorch_fsdp_tp": "--mesh with shard: "}),
    ],
)
def test_a_sweep_over_one_mesh_runs_every_choice(tmp_path, mesh, left_out):
    """But for those that cannot train over it, which it names with the reason."""
    sweep, left_out = Sweep(tmp_path), ONLY | left_out
    sweep.of = ["parallel", "4"]
    answer = sweep.run("--mesh", mesh)
    behind = Mesh.parse(mesh).label
    assert answer.returncode == 0 and answer.stdout.count("left out") == len(left_out)
    assert list(sweep.runs) == [f"{choice}@{behind}" for choice in tensor_parallel.CHOICES if choice not in left_out]
    for choice, reason in left_out.items():
        assert f"{choice}@{behind}: left out: {reason}" in answer.stdout


# Ranks under torchrun ------------------------------------------------------------------------------------------------

SWEEP = """
import os, signal, socket, sys, time
from torch import distributed
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import tell_torchrun
from ddp_lab.runtime.process import torchrun

def rank(config, registry):
    how = config.dataset
    if how == "is killed" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is blamed":
        if os.environ["RANK"] == "1":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        tell_torchrun("error: rank 0 knows why")
        print("error: rank 0 knows why", file=sys.stderr, flush=True)
    if how == "exits":
        sys.exit(3)
    if how == "says why":
        from ddp_lab.runtime.cli import exit_with_error
        exit_with_error("a mistake")
    if how == "can be reached from elsewhere":
        port = int(os.environ["MASTER_PORT"])
        socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5)
        try:
            socket.create_connection(("127.0.0.2", port), timeout=5)
        except ConnectionRefusedError:
            return
        sys.exit("reached")

torchrun.sees_gpu = lambda: False
torchrun.forked_rank = rank
for how in sys.argv[1:]:
    print(how, torchrun.start_ranks(RunConfig(choice="flat_ddp", dataset=how), 2, None), file=sys.stderr, flush=True)
assert distributed.TCPStore.__name__ == "TCPStore"
"""


FAILURES = {
    "says why": ["error: a mistake", "says why False"],
    "is killed": ["error: flat_ddp: ... failed: Signal 9 (SIGKILL) received by ...", "is killed False"],
    "can be reached from elsewhere": ["can be reached from elsewhere True"],
    "exits": ["error: flat_ddp: ... failed: exit code 3", "exits False"],
    "is blamed": ["error: ... knows why", "is blamed False"],
}


@pytest.mark.parametrize("kinds", [[*FAILURES][:3], pytest.param([*FAILURES], marks=pytest.mark.slow)])
def test_each_failure_is_one_line_and_nobody_else_can_join(kinds):
    """What `torchrun` prints of a failure is not shown, but all that ranks print is."""
    command = [sys.executable, "-c", SWEEP, *kinds]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0 and answer.stdout == ""
    lines = re.sub(r"PID \d+|rank \d", "...", answer.stderr).splitlines()
    assert lines == [line for kind in kinds for line in FAILURES[kind]]


def test_sweeps_over_one_mesh_in_each_schedule_never_share_a_folder(mesh_sweep):
    """The schedule is in the label, and the label alone says how its run is started."""
    for schedule, stages, behind in (
        ("1f1b", "1", ""), ("gpipe", "1", "-gpipe"), ("interleaved", "2", "-interleaved2"), ("zb-h1", "1", "-zb-h1")
    ):  # fmt: skip
        mesh_sweep.run("--mesh", "pp=4", "--link", "none", "--pipeline-schedule", schedule, "--stages-per-rank", stages)
        assert f"zero3@pp4{behind}" in mesh_sweep.runs
        for label, config in mesh_sweep.runs.items():
            assert LABEL.fullmatch(label) and mesh_setting(label) == f"pp4{behind}"
            by_label = parse_config(
                "", tensor_parallel.REGISTRY, (), ["--ddp-choice", "tp", *mesh_flags(mesh_setting(label))]
            )
            for run in (config, by_label):
                assert (run.mesh, run.pipeline_schedule, run.stages_per_rank) == ("pp=4", schedule, int(stages))

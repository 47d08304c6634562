"""Nothing in a log is hidden: what no rule explains is quoted, like lines together, with ranks, times and places."""

import json
from pathlib import Path

from ddp_lab.doctor import command as script
from ddp_lab.doctor.complaints import unexplained
from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.reading.inputs import read_inputs
from tests.doctor.test_look_alikes import facts_of
from tests.in_process import run_in_process
from tests.tables import each_row

CLEAN = Path(__file__).parents[1] / "data" / "doctor" / "clean"
HARMLESS = {"NET/OFI OFI fi_getinfo() call failed: No data available", "Failed to open libibverbs.so[.1]"}


def complaints_of(log, with_rules=False):
    facts = facts_of(log)
    return unexplained(facts, diagnose(facts) if with_rules else [])


@each_row(
    ("line", "kind", "text"),
    [
        ("node1:11:12 [0] misc/x.cc:61 NCCL WARN Lost its way", "NCCL warning", "Lost its way"),
        ("Last error:\nNo way out", "last error of NCCL", "No way out"),
        ("[rank3]: RuntimeError: CUDA error: an odd one", "exception", "RuntimeError: CUDA error: an odd one"),
        ("(Worker pid=77, ip=10.0.0.1) torch.cuda.DeferredError: late", "exception", "torch.cuda.DeferredError: late"),
        ("[rank1]:[E123 a.cpp:9] Something is odd", "error in torch's log", "Something is odd"),
        (
            "[W516 socket.cpp:489] [c10d] socket timed out after 1800000ms",
            "error in torch's log",
            "timed out after 1800000ms",
        ),
        (
            "srun: error: plugin_load_from_file: dlopen(switch.so): libjson-c.so.3: cannot open shared object file",
            "error of the launcher",
            "error: plugin_load_from_file: dlopen(switch.so): libjson-c.so.3: cannot open shared object file",
        ),
        ("  exitcode  : 7 (pid: 20)", "end of a process", "exitcode  : 7"),
        ("Segmentation fault (core dumped)", "end of a process", "Segmentation fault"),
    ],
)
def test_every_wording_is_heard(line, kind, text):
    (complaint,) = complaints_of(f"step 1\n{line}\nstep 2")
    assert (complaint.kind, complaint.text) == (kind, text)
    assert complaint.lines[0].number == 2


def test_a_traceback_says_where_it_was_raised():
    log = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]:     main()
[rank1]:   File "lib/data.py", line 41, in load
[rank1]:     raise KeyError(name)
[rank1]: KeyError: 'labels'
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"""
    (complaint,) = complaints_of(log)
    assert complaint.summary == "rank 1, train.log:6, raised in lib/data.py:41 (load)"


@each_row(
    "line",
    [
        "UserWarning: this is deprecated",
        "no errors: 0",
        "exited with exit code 0",
        "def handle(error: ValueError):",
        "val_error: 0.3",
        "[Epoch 1] loss 0.5",
        "[ETA 3:20:10] step 5",
        "Last error: 0.0013",
    ],
)
def test_what_is_no_complaint(line):
    assert complaints_of(line) == []


@each_row("path", sorted(CLEAN.iterdir()))
def test_clean_inputs_have_only_harmless_warnings(path):
    facts = read_inputs([str(path)]).facts
    assert {complaint.text for complaint in unexplained(facts, [])} <= HARMLESS


def test_the_report_begins_with_them(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("".join(f"a:1:2 [0] x.cc:1 NCCL WARN Odd {c}\n" for c in "abcdefghijk"))
    answer = run_in_process(script, str(log))
    assert answer.returncode == 4
    lines = answer.stdout.splitlines()
    assert lines[:3] == ["The log says, and no rule explains:", "  Odd a", f"    NCCL warning; {log}:1"]
    assert "  and 6 other complaints" in lines and "Verdict: unknown." in lines and "wrong" not in answer.stdout
    assert "Odd k" in run_in_process(script, "--all", str(log)).stdout
    assert len(json.loads(run_in_process(script, str(log), "--json").stdout)["unexplained"]) == 11


@each_row("line", ["[0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]", "[0] NCCL WARN Lost its way"])
def test_what_healthy_machines_say_ends_with_0(line, tmp_path):
    """It is quoted all the same."""
    log = tmp_path / "nccl.log"
    log.write_text(f"node1:11:12 {line}\n")
    answer = run_in_process(script, str(log))
    assert answer.returncode == (0 if "libibverbs" in line else 4) and line.split("WARN ")[1][:18] in answer.stdout

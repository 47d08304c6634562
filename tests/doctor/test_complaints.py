"""Nothing in a log is hidden: what no rule explains is quoted, like lines together, with ranks, times and places."""

import json
from pathlib import Path

import pytest

from ddp_lab.doctor.complaints import Complaint, unexplained
from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.reading.inputs import read_inputs
from ddp_lab.doctor.reading.texts import to_text
from scripts import doctor as script
from tests.in_process import run_in_process

CLEAN = Path(__file__).parents[1] / "data" / "doctor" / "clean"
HARMLESS = {"NET/OFI OFI fi_getinfo() call failed: No data available", "Failed to open libibverbs.so[.1]"}
OUT_OF_MEMORY = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def complaints_of(log: str, with_rules: bool = False) -> list[Complaint]:
    facts = Facts([to_text("train.log", log.encode())])
    return unexplained(facts, diagnose(facts) if with_rules else [])


@pytest.mark.parametrize(
    ("line", "kind", "text"),
    [
        ("node1:11:12 [0] misc/x.cc:61 NCCL WARN Lost its way", "NCCL warning", "Lost its way"),
        ("node1:11:12 [0] include/socket.h:311 WARN Nothing here", "NCCL warning", "Nothing here"),
        ("misc/ibvwrap.cu:61 WARN Nothing there", "NCCL warning", "Nothing there"),
        (
            "NCCL WARN hipIpcGetMemHandle failed : invalid argument",
            "NCCL warning",
            "hipIpcGetMemHandle failed : invalid argument",
        ),
        ("Last error:\nNo way out", "last error of NCCL", "No way out"),
        ("[rank3]: RuntimeError: CUDA error: an odd one", "exception", "RuntimeError: CUDA error: an odd one"),
        ("(Worker pid=77, ip=10.0.0.1) torch.cuda.DeferredError: late", "exception", "torch.cuda.DeferredError: late"),
        ("[default0]:KeyError: 'labels'", "exception", "KeyError: 'labels'"),
        (
            "terminate called after throwing an instance of 'std::bad_function_call'",
            "exception",
            "'std::bad_function_call'",
        ),
        (
            "Cuda failure common.cu:891 'driver is insufficient'",
            "exception",
            "Cuda failure common.cu:891 'driver is insufficient'",
        ),
        ("train.py: error: unrecognized arguments: --x", "exception", "train.py: error: unrecognized arguments: --x"),
        ("[rank1]:[E123 a.cpp:9] Something is odd", "error in torch's log", "Something is odd"),
        (
            "[W516 socket.cpp:489] [c10d] socket timed out after 1800000ms",
            "error in torch's log",
            "timed out after 1800000ms",
        ),
        (
            "W0720 api.py:858] Sending process 20360 closing signal SIGTERM",
            "end of a process",
            "Sending process 20360 closing signal SIGTERM",
        ),
        (
            "srun: error: plugin_load_from_file: dlopen(switch.so): libjson-c.so.3: cannot open shared object file",
            "error of the launcher",
            "error: plugin_load_from_file: dlopen(switch.so): libjson-c.so.3: cannot open shared object file",
        ),
        ("MPICH ERROR: Unable to use NUMA", "error of the launcher", "Unable to use NUMA"),
        ("  exitcode  : 7 (pid: 20)", "end of a process", "exitcode  : 7"),
        ("Segmentation fault (core dumped)", "end of a process", "Segmentation fault"),
    ],
)
def test_every_wording_is_heard(line: str, kind: str, text: str) -> None:
    (complaint,) = complaints_of(f"step 1\n{line}\nstep 2")
    assert (complaint.kind, complaint.text) == (kind, text)
    assert complaint.lines[0].number == 2


def test_lines_that_differ_in_numbers_are_one() -> None:
    lines = [f"[rank{rank}]: ValueError: batch {rank} of {7 * rank} at 0x{rank:x}" for rank in (2, 0, 5)]
    (complaint,) = complaints_of("\n".join(lines))
    assert complaint.summary == "3 times, ranks 0, 2, 5, first at train.log:1"


def test_codes_that_differ_are_not_one() -> None:
    said = {complaint.text for complaint in complaints_of("exitcode  : 1\nexitcode  : 77\nexitcode  : 1")}
    assert said == {"exitcode  : 1", "exitcode  : 77"}
    (left,) = complaints_of("[rank3]: ValueError: batch 3\nexitcode  : 77 (pid: 20)", with_rules=True)
    assert left.text == "exitcode  : 77"


@pytest.mark.parametrize(
    "name", ["requests.exceptions.ReadTimeout", "zipfile.BadZipFile", "torch._dynamo.exc.Unsupported"]
)
@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "[1,0]<stderr>:", "2024-05-01T10:11:12.123456789Z ", "worker-1: "])
def test_an_exception_of_any_name_ends_a_traceback(name: str, prefix: str) -> None:
    lines = ["Traceback (most recent call last):", '  File "a.py", line 3, in get', "    fetch()", f"{name}: no answer"]
    (complaint,) = complaints_of("\n".join(prefix + line for line in lines))
    assert (complaint.kind, complaint.text, complaint.where) == ("exception", f"{name}: no answer", "a.py:3 (get)")


def test_a_traceback_says_where_it_was_raised() -> None:
    log = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 9, in <module>
[rank1]:     main()
[rank1]:   File "lib/data.py", line 41, in load
[rank1]:     raise KeyError(name)
[rank1]: KeyError: 'labels'
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"""
    (complaint,) = complaints_of(log)
    assert complaint.summary == "rank 1, train.log:6, raised in lib/data.py:41 (load)"


def test_what_a_rule_explains_is_not_said_again() -> None:
    (complaint,) = complaints_of(f"{OUT_OF_MEMORY}\na:1:2 [0] x.cc:1 NCCL WARN Odd", with_rules=True)
    assert complaint.text == "Odd"
    assert (
        complaints_of("Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000", True) == []
    )


@pytest.mark.parametrize(
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
def test_what_is_no_complaint(line: str) -> None:
    assert complaints_of(line) == []


@pytest.mark.parametrize("path", sorted(CLEAN.iterdir()), ids=lambda path: path.name)
def test_clean_inputs_have_only_harmless_warnings(path: Path) -> None:
    facts = read_inputs([str(path)]).facts
    assert {complaint.text for complaint in unexplained(facts, [])} <= HARMLESS


def test_the_report_begins_with_them(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("".join(f"a:1:2 [0] x.cc:1 NCCL WARN Odd {c}\n" for c in "abcdefghijk"))
    answer = run_in_process(script, str(log))
    assert answer.returncode == 4
    lines = answer.stdout.splitlines()
    assert lines[:3] == ["The log says, and no rule explains:", "  Odd a", f"    NCCL warning; {log}:1"]
    assert "  and 6 other complaints" in lines and "Verdict: unknown." in lines and "wrong" not in answer.stdout
    assert "Odd k" in run_in_process(script, "--all", str(log)).stdout
    assert len(json.loads(run_in_process(script, str(log), "--json").stdout)["unexplained"]) == 11


def test_beside_a_verdict_they_come_after_it(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"{OUT_OF_MEMORY}\na:1:2 [0] x.cc:1 NCCL WARN Odd")
    said = run_in_process(script, str(log)).stdout
    assert said.startswith("Verdict: A GPU has no memory left")
    assert "The log says as well, and no rule explains:\n  Odd\n    NCCL warning; " in said


def test_a_known_warning_has_its_meaning() -> None:
    (complaint,) = complaints_of("n1:1:2 [0] misc/ibvwrap.cu:61 WARN Failed to open libibverbs.so[.1]")
    assert complaint.meaning and "Harmless without RDMA cards" in complaint.meaning.says
    assert complaints_of("n1:1:2 [0] misc/x.cc:61 NCCL WARN Odd")[0].meaning is None

"""What links carry, what is left behind (nothing), what a user is told; in real namespaces where they can be made."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from benchmarks.link_lab import control, failures, shaping, state
from benchmarks.link_lab.counters import COLUMNS, read_counters
from benchmarks.link_lab.namespaces import ip, lab_network, pids_in
from benchmarks.link_lab.state import Lab
from ddp_lab.analysis.comparison.link_rates import RATE_COLUMNS
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate
from scripts import link_lab as script

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "command-line.md").read_text().partition("## `scripts/link_lab.py`")[2].split("\n## ")[0]
TIMEOUT_S = 120
RATE = Rate(200_000_000)


def why_no_lab() -> str:
    """Empty where this machine can make network namespaces."""
    probe = f"ddp-lab-probe-{os.getpid()}"
    try:
        shaping.require_tools()
        ip("netns", "add", probe)
        ip("netns", "delete", probe)
    except UserError as error:
        return str(error)
    return ""


NO_LAB = why_no_lab()
needs_lab = pytest.mark.skipif(bool(NO_LAB), reason=f"no link lab here: {NO_LAB}")


@pytest.fixture
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of states and a prefix of names for this test alone; other labs on this machine are not touched."""
    monkeypatch.setattr(state, "FOLDER", tmp_path / "labs")
    monkeypatch.setattr(state, "PREFIX", f"ddp-lab-test-{os.getpid()}")
    return tmp_path / "labs"


@pytest.fixture
def lab(own_place: Path) -> Iterator[Lab]:
    with lab_network([RATE, RATE], 9000, None, ["x.py"]) as lab:
        yield lab


def namespaces() -> set[str]:
    names = {entry["name"] for entry in json.loads(ip("-json", "netns", "list") or "[]")}
    return {name for name in names if name.startswith(state.PREFIX)}


RECEIVE = """
import socket, time
server = socket.create_server(("", 5000))
print("ready", flush=True)
connection, _ = server.accept()
buffer, received, started = bytearray(2**20), 0, None
while size := connection.recv_into(buffer):
    if started is None:
        started = time.perf_counter()  # what came until now came at an unknown rate
    else:
        received += size
print(8 * received / (time.perf_counter() - started))
"""
SEND = """
import socket, sys
socket.create_connection((sys.argv[1], 5000), timeout=60).sendall(bytes(int(sys.argv[2])))
"""


def goodput(lab: Lab, sender: int, receiver: int, sent_bytes: int) -> float:
    """Bits a second of one TCP connection."""
    within = [["ip", "netns", "exec", lab.nodes[node].namespace, sys.executable, "-c"] for node in (sender, receiver)]
    with subprocess.Popen([*within[1], RECEIVE], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        arguments = [SEND, lab.nodes[receiver].address, str(sent_bytes)]
        subprocess.run([*within[0], *arguments], check=True, timeout=TIMEOUT_S)
        return float(server.stdout.readline())


@needs_lab
def test_links_carry_their_rate_in_both_directions_and_count_it(lab: Lab) -> None:
    """What goes over the link is the payload and 66 bytes of headers for each 8,948 of it, 0.7 %."""
    assert goodput(lab, 0, 1, 20_000_000) == pytest.approx(200e6, rel=0.1)
    first, second = read_counters(lab)
    assert first.sent == pytest.approx(20_000_000, rel=0.03)
    assert second.received == pytest.approx(first.sent, rel=0.01) and first.received < 500_000
    shaping.set_rate(lab, lab.nodes[1], Rate(50_000_000))
    assert goodput(lab, 1, 0, 5_000_000) == pytest.approx(50e6, rel=0.1), "what node 1 sends"
    assert goodput(lab, 0, 1, 5_000_000) == pytest.approx(50e6, rel=0.1), "what node 1 receives"
    for node in lab.nodes:
        shaping.set_rate(lab, node, Rate(None))
        control_of = ip("netns", "exec", node.namespace, "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
        assert control_of == "reno\n", "whatever the host has"
    assert goodput(lab, 1, 0, 50_000_000) > 400e6


@needs_lab
def test_changes_from_another_terminal(lab: Lab) -> None:
    assert (
        control.change("set-rate", None, 1, Rate.parse("60mbit")) == "lab 0: the link of node 1 carries 60mbit each way"
    )
    assert control.change("cut", 0, 1) == "lab 0: the link of node 1 is cut"
    assert "node 0 (10.77.0.100): 200mbit\n  node 1 (10.77.0.101): cut" in control.listing()
    assert [node.number for node in shaping.unreachable(lab)] == [1]
    assert control.change("restore", None, None) == "lab 0: the link of each node is whole"
    assert shaping.unreachable(lab) == []
    assert goodput(lab, 0, 1, 6_000_000) == pytest.approx(60e6, rel=0.1), "the rate outlasts a cut"
    assert [(node.rate, node.is_cut) for node in lab.reload().nodes] == [("200mbit", False), ("60mbit", False)]
    for wrong, expected in (((7, None), "--lab 7: no such lab; running: 0"), ((None, 2), "lab 0 has nodes 0 to 1")):
        with pytest.raises(UserError, match=expected):
            control.change("cut", *wrong)
    with pytest.raises(UserError, match="rate 1bit: refused by tc or the kernel"):
        control.change("set-rate", None, 0, Rate(1))
    assert lab.reload().nodes[0].rate == "200mbit"


ORPHAN = """
import subprocess, sys, time
from pathlib import Path
from benchmarks.link_lab import state
from benchmarks.link_lab.namespaces import lab_network
from ddp_lab.runtime.link.rates import Rate
state.FOLDER, state.PREFIX = Path(sys.argv[1]), sys.argv[2]
with lab_network([Rate(10**9)] * 2, 9000, None, ["x.py"]) as lab:
    subprocess.Popen(["ip", "netns", "exec", lab.nodes[1].namespace, "sleep", "300"])
    print("up", flush=True)
    time.sleep(300)
"""


@needs_lab
def test_the_next_start_removes_what_a_killed_lab_left(own_place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [sys.executable, "-c", ORPHAN, str(own_place), state.PREFIX]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        with lab_network([RATE], 9000, None, []) as beside:
            assert beside.number == 1, "labs stand beside each other"
        (left,) = state.all_labs()
        assert left.is_alive
        process.kill()
    wait_until(lambda: bool(pids_in(left)))  # its process may not have entered the namespace yet
    (sleeper,) = pids_in(left)
    assert not left.is_alive and len(namespaces()) == 3 and "which has ended" in control.listing()
    with lab_network([RATE], 9000, None, []) as lab:
        assert lab.number == 0 and namespaces() == set(lab.namespaces)
        assert state.start_of(sleeper) is None
    assert "removed what lab 0 of process" in capfd.readouterr().err
    assert namespaces() == set() and [path.name for path in own_place.iterdir()] == ["lock"]


def wait_until(is_done: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_done() and time.monotonic() < deadline:
        time.sleep(0.05)


@needs_lab
def test_foreign_namespaces_and_refused_rates_leave_all_as_it_was(own_place: Path) -> None:
    foreign = f"{state.PREFIX}-0-node1"
    ip("netns", "add", foreign)
    try:
        with pytest.raises(UserError, match="exists, and no lab made it"), lab_network([RATE] * 2, 9000, None, []):
            pass
        assert namespaces() == {foreign}
    finally:
        ip("netns", "delete", foreign)
    for rates, delay, expected in (
        ([RATE, Rate(1)], None, "rate 1bit: refused by tc or the kernel"),
        ([RATE, RATE], "banana", "--delay banana: "),
    ):
        with pytest.raises(UserError, match=expected), lab_network(rates, 9000, delay, []):
            pass
    assert namespaces() == set() and [path.name for path in own_place.iterdir()] == ["lock"]


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and the one line of the script."""
    with mock.patch.object(sys, "argv", ["link_lab.py", *arguments]):
        try:
            code = script.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return code, said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rate", "banana", "--", "main_ddp.py"], "rate 'banana': give a number above 0 with its unit, e.g. 250mbit"),
        (["--rate", "1gbit,0mbit", "--", "main_ddp.py"], "rate '0mbit'"),
        (["--node-rate", "1:1gbit", "--", "main_ddp.py"], "1:1gbit: must be a node and its rate, such as 1=500mbit"),
        (["--node-rate", "2=1gbit", "--", "main_ddp.py"], "nodes are 0 to 1"),
        (["--nodes", "0", "--", "main_ddp.py"], "0: must be 1 to 100"),
        (["--mtu", "100", "--", "main_ddp.py"], "100: must be 1280 to 65535"),
        (["--rate", "1gbit"], "no command; give it after --"),
        (["--", "nothing.py"], "nothing.py: no such script"),
        (["--rate", "1gbit,2gbit", "--counters", "x", "--", "main_ddp.py"], "--counters is for one rate"),
        (["set-rate", "fast"], "rate 'fast'"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = error_of(capsys, *arguments)
    assert code == 2 and expected in said


@pytest.mark.parametrize(
    ("what", "answer", "expected"),
    [
        ("os.geteuid", lambda: 1000, "must be root; run it with sudo"),
        ("shutil.which", lambda name: None if name == "tc" else name, "needs tc; install iproute2"),
        ("platform.system", lambda: "Darwin", "needs Linux's network namespaces; this is Darwin"),
    ],
)
@pytest.mark.parametrize("arguments", [("--", "main_ddp.py"), ("cut",)])
def test_what_the_machine_lacks_is_one_line(
    what: str, answer: object, expected: str, arguments: tuple[str], capsys: pytest.CaptureFixture[str], own_place: Path
) -> None:
    all_there = mock.patch("shutil.which", lambda name: name), mock.patch("os.geteuid", lambda: 0)
    with all_there[0], all_there[1], mock.patch(what, answer):
        code, said = error_of(capsys, *arguments)
    assert code == 1 and expected in said


@pytest.mark.parametrize(
    ("text", "bits", "shown"),
    [
        ("1000Mbit", 10**9, "1gbit"),
        ("2.5gbit", 2_500_000_000, "2.5gbit"),
        ("56kbit", 56_000, "56kbit"),
        ("100bit", 100, "100bit"),
        ("none", None, "unshaped"),
        ("loopback", None, "unshaped"),
    ],
)
def test_rates(text: str, bits: int | None, shown: str) -> None:
    assert Rate.parse(text).bits_per_s == bits and str(Rate.parse(text)) == shown


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab that nobody built."""
    monkeypatch.setattr(state, "FOLDER", tmp_path)
    lab = state.plan([Rate(10**9), Rate(5 * 10**8)], 9000, None, [], [])
    lab.logs.mkdir()
    return lab


@pytest.mark.parametrize(
    ("failed", "said", "cut", "expected"),
    [
        ([(0, 1, 1.0), (1, -9, 2.0)], "gone", [], "rank 1 on node 1 (10.77.0.101) was killed by SIGKILL"),
        ([(0, 2, 1.0)], "error: x\nlater", [], "rank 0 on node 0 (10.77.0.100) failed with exit code 2: x"),
        ([(1, 1, 1.0)], "[rank1]: KeyError: 1", [], "failed with exit code 1: KeyError: 1 (all of it: "),
        ([], "", [], "torchrun on node 1 (10.77.0.101) failed with exit code 3: without a word"),
        (
            [(0, 1, 1.0)],
            "RuntimeError: Timed out",
            [1],
            "node 1 (10.77.0.101) cannot be reached over its link; rank 0 on node 0 (10.77.0.100) failed with exit "
            "code 1: RuntimeError: Timed out",
        ),
    ],
)
def test_why_a_job_failed(
    failed: list[tuple[int, int, float]], said: str, cut: list[int], expected: str, planned: Lab, tmp_path: Path
) -> None:
    for rank, code, when in failed:
        (planned.logs / f"node{rank}.json").write_text(json.dumps([{"rank": rank, "exitcode": code, "time": when}]))
    (planned.logs / "node0").mkdir()
    (planned.logs / "node0" / "stderr.log").write_text(said)
    with mock.patch.object(failures, "unreachable", lambda lab: [lab.nodes[number] for number in cut]):
        assert expected in failures.why_failed(planned, [None, 3], tmp_path)


def test_flags_and_columns_are_documented() -> None:
    flags = [action.option_strings[-1] for action in script.build_parser()._actions if action.option_strings]
    assert re.findall(r"^- `(--[a-z-]+)", SECTION, re.MULTILINE) == [flag for flag in flags if flag != "--help"]
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", SECTION, re.MULTILINE)
    assert [name.strip("`") for row in rows for name in row.split(", ")] == [*COLUMNS, *RATE_COLUMNS]


TINY = ["main_ddp.py", "--ddp-choice", "simple_ddp", "--workload", "mlp", "--depth", "2", "--width", "64"]
TINY += ["--eval-samples", "4", "--no-profile"]
LONG = ["--train-samples", "9600"]
"""1,200 steps, which is at least ten seconds; after a sixth of them rank 0 prints its first line."""


class Job:
    """`link_lab.py` in a process of its own; nothing may be left of it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "link_lab.py"), *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.lab = int(self.wait_for("link lab ").split()[2].rstrip(":"))

    def wait_for(self, part: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if part in line:
                return line
        raise AssertionError(f"{part} was never said: {self.end()}")

    def end(self) -> tuple[int, str, str]:
        out, error = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, "".join(self.lines) + out, error

    def ranks_of(self, node: int) -> list[int]:
        """Process ids; `torchrun`'s own is not among them."""
        pids = ip("netns", "pids", f"ddp-lab-{self.lab}-node{node}").split()
        words = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids}
        return [pid for pid, line in words.items() if b"main_ddp.py" in line[2] and line[1] == b"-u"]

    def control(self, *arguments: str) -> None:
        told = [sys.executable, str(ROOT / "scripts" / "link_lab.py"), *arguments, "--lab", str(self.lab)]
        subprocess.run(told, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)

    def require_gone(self) -> None:
        assert f"ddp-lab-{self.lab}-" not in ip("netns", "list")
        assert not (state.FOLDER / f"{self.lab}.json").exists() and not (state.FOLDER / f"{self.lab}.logs").exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*arguments: str) -> Job:
        jobs.append(Job(tmp_path, *arguments))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.process.terminate()
        job.process.wait(timeout=TIMEOUT_S)
        job.require_gone()


@needs_lab
@pytest.mark.slow
def test_a_job_over_two_nodes(start: Callable[..., Job], tmp_path: Path) -> None:
    """Three steps; what goes over the link is at least the gradients of each and the parameters once."""
    lab = ["--nproc-per-node", "2", "--node-rate", "1=500mbit", "--counters", "c.csv"]
    code, out, error = start(*lab, "--", *TINY, "--max-steps", "3").end()
    assert code == 0 and error == "" and "(node 1 500mbit)" in out and "simple_ddp: done" in out, error
    (path,) = (tmp_path / "profile" / "simple_ddp").glob("*.run.json")
    content = json.loads(path.read_text())
    assert content["world_size"] == 4 and len(content["train_loss"]) == 3
    samples = pd.read_csv(tmp_path / "c.csv")
    assert samples.columns.tolist() == list(COLUMNS) and set(samples.node) == {0, 1}
    assert samples.groupby("node").sent_bytes.max().min() > 4 * content["parameters"]
    shown = re.findall(r"link: node (\d) sent ([\d.]+) MB and received ([\d.]+) MB", out)
    assert [node for node, *_ in shown] == ["0", "1"]
    assert float(shown[0][1]) == pytest.approx(float(shown[1][2]), rel=0.02)


@needs_lab
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
    ids=["int", "term", "kill"],
)
def test_a_job_that_is_stopped_leaves_nothing(start: Callable[..., Job], number: int, code: int) -> None:
    job = start("--", *TINY, *LONG)
    job.wait_for("step ")
    ranks = [*job.ranks_of(0), *job.ranks_of(1)]
    assert len(ranks) == 2
    job.process.send_signal(number)
    assert job.end()[0] == code
    wait_until(lambda: not any(map(state.start_of, ranks)))
    assert [state.start_of(pid) for pid in ranks] == [None, None]
    if number == signal.SIGKILL:  # its namespaces wait for the next start
        with lab_network([RATE], 9000, None, []):
            pass
    job.require_gone()


@needs_lab
@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_node(start: Callable[..., Job]) -> None:
    job = start("--", *TINY, *LONG)
    job.wait_for("step ")
    (rank,) = job.ranks_of(1)
    os.kill(rank, signal.SIGKILL)
    code, _, error = job.end()
    assert code == 1 and error == "error: rank 1 on node 1 (10.77.0.101) was killed by SIGKILL\n"


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("is_restored", [False, True])
def test_a_cut_is_named_after_the_timeout_and_outlived_before_it(start: Callable[..., Job], is_restored: bool) -> None:
    job = start("--", *TINY, *LONG, "--timeout-minutes", "1" if is_restored else "0.1")
    job.wait_for("step ")
    job.control("cut", "--node", "1")
    started = time.monotonic()
    if is_restored:
        time.sleep(10)
        assert job.process.poll() is None
        job.control("restore")
        code, out, error = job.end()
        assert code == 0 and "step 1200/1200" in out and "is cut" in error and "now carries 1gbit" in error, error
    else:
        code, _, error = job.end()
        assert code == 1 and time.monotonic() - started < 6 + 20, "it says so soon after the timeout"
        assert "\nerror: node 1 (10.77.0.101) cannot be reached over its link" in error and error.count("\n") == 2


@needs_lab
@pytest.mark.slow
def test_several_rates_end_in_one_page(start: Callable[..., Job], tmp_path: Path) -> None:
    flags = ["--workload", "mlp", "--depth", "4", "--width", "256", "--rounds", "1"]
    job = start("--rate", "50mbit,1gbit", "--", "benchmarks/strategies.py", "--choices", "simple_ddp", *flags)
    code, out, error = job.end()
    assert code == 0 and error == "" and "report: link_rates/link_rates.html" in out, error
    table = pd.read_csv(tmp_path / "link_rates" / "link_rates.csv")
    assert set(table.link) == {"50mbit", "1gbit"} and set(table.choice) == {
        "pytorch_ddp",
        "simple_ddp",
        "local",
        "runtime",
    }
    times = table.pivot_table(index="link_bits_per_s", columns="choice", values="step_ms_median")
    assert times.simple_ddp[50e6] > times.simple_ddp[1e9]

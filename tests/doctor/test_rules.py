"""Every rule finds its own inputs and names the right cause first; none takes another's; clean inputs stay unknown."""

import re
import time
from pathlib import Path

import pytest

from ddp_lab.doctor.diagnosis import Finding, advice, diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.live.machine import Machine
from ddp_lab.doctor.predicates import PREDICATES, failures, local, network
from ddp_lab.doctor.reading import complaints as reading_complaints
from ddp_lab.doctor.reading import nccl_log, watchdog
from ddp_lab.doctor.reading.inputs import read_inputs
from ddp_lab.doctor.reading.texts import LONGEST_LINE, to_text
from ddp_lab.doctor.rulebook import all_rules, compiled, rules_as_markdown
from scripts import doctor as script
from tests.doctor.test_look_alikes import logs
from tests.in_process import run_in_process

DATA = Path(__file__).parents[1] / "data" / "doctor"
DOCS = Path(__file__).parents[2] / "docs"
OTHERS = {"clean", "cases", "reports"}
CASES = sorted(path for rule in DATA.iterdir() if rule.name not in OTHERS for path in rule.iterdir())
CLEAN = sorted((DATA / "clean").iterdir())
MEASURED = {"slow-pair"}
"""Rules without a file to read: they see only what `--live` measured (tests/doctor/test_live.py)."""


def findings(*paths: Path) -> list[Finding]:
    inputs = read_inputs([str(path) for path in paths])
    assert inputs.problems == []
    return diagnose(inputs.facts)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parent.name}/{case.name}")
def test_own_input_gives_the_right_verdict(case: Path) -> None:
    found = findings(case)
    assert found[0].rule.name == case.parent.name
    assert found[0].lines, "a verdict quotes what it rests on"
    for line in found[0].lines:
        if line.number:
            text = Path(line.path).read_text().split("\n")[line.number - 1]
            assert line.text.strip()[:80] in text


@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.name)
def test_clean_input_is_unknown(case: Path) -> None:
    assert findings(case) == []


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.name)
def test_every_pattern_and_predicate_is_tried(rule: object) -> None:
    """A pattern that matches none of its rule's inputs, or a predicate that sees nothing in them, would be untested."""
    if rule.name in MEASURED:
        return
    folder = DATA / rule.name
    cases = [read_inputs([str(case)]).facts for case in (sorted(folder.iterdir()) if folder.is_dir() else [])]
    cases += [Facts(texts=[to_text("log", log.encode())]) for name, log in logs("fires") if name == rule.name]
    assert cases
    for pattern in compiled(tuple(rule.patterns)):
        assert any(facts.search(pattern) for facts in cases), pattern.pattern
    of_machine = {"interface_not_here", "small_shm", "small_memlock"}
    if rule.predicate and rule.predicate not in of_machine:
        assert any(PREDICATES[rule.predicate](facts) for facts in cases)


def test_rules_are_complete() -> None:
    names = [rule.name for rule in all_rules()]
    assert len(set(names)) == len(names) and {path.name for path in DATA.iterdir()} - OTHERS <= set(names)
    assert {rule.predicate for rule in all_rules()} - {None} == set(PREDICATES)
    for rule in all_rules():
        assert rule.patterns or rule.predicate
        assert rule.sources and all(source.startswith("https://") for source in rule.sources)
        assert rule.why and (rule.confidence is None) == (rule.kind == "symptom")
        assert not re.search("--timeout-minutes|--ddp-choice|--grad-accum-steps", " ".join([*rule.to_try, *rule.more]))
        for commands in (rule.to_try, rule.in_vm, rule.own):
            assert len(commands) <= 5
            for command in commands:
                assert re.fullmatch(r"\S[^\n]{0,200}?  # \S[^\n]{3,}", command), f"{rule.name}: {command}"
        assert rule.to_try


def test_the_guide_lists_the_rules() -> None:
    page = (DOCS / "hangs.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \| (\w+) \| ([\w-]+) \|$", page, re.MULTILINE)
    assert rows == [(rule.name, rule.verdict, rule.kind, rule.confidence or "-") for rule in all_rules()]
    printed = rules_as_markdown()
    for name in re.findall(r"\(rule ([a-z0-9-]+)\)", printed):
        assert f"### {name}\n" in printed


def test_advice_differs_in_virtual_machines() -> None:
    lspci, virtual = (read_inputs([str(DATA / "p2p-acs-iommu" / name)]).facts for name in ("lspci.txt", "vm_with_hang"))
    (rule,) = (rule for rule in all_rules() if rule.name == "p2p-acs-iommu")
    assert diagnose(lspci)[0].rule is diagnose(virtual)[0].rule is rule
    assert [heading for heading, _ in advice(rule, lspci)] == ["Try, on bare metal", "Try, in a virtual machine"]
    assert advice(rule, virtual) == [("Try, in a virtual machine", rule.in_vm)]


@pytest.mark.parametrize("with_topology", [True, False])
def test_p2p_across_numa_never_from_topology_alone(with_topology: bool) -> None:
    """The same topology, and the same channels, without a hang in the first collectives: nothing."""
    case = DATA / "p2p-across-numa" / "case"
    log = "\n".join(line for line in (case / "nccl.log").read_text().splitlines() if "Watchdog" not in line)
    facts = Facts(texts=[to_text("nccl.log", log.encode())])
    if with_topology:
        facts.topologies = read_inputs([str(case / "topology.txt")]).facts.topologies
    assert diagnose(facts) == []
    late = (case / "nccl.log").read_text().replace("SeqNum=2,", "SeqNum=20000,")
    found = diagnose(Facts(texts=[to_text("late", late.encode())], topologies=facts.topologies))
    assert [finding.rule.name for finding in found] == ["watchdog-timeout"]


def test_a_rule_before_the_symptoms_that_follow_from_it() -> None:
    paths = [DATA / "gpu-off-the-bus" / "dmesg.txt", DATA / "watchdog-timeout", DATA / "peer-closed"]
    names = [found.rule.name for found in findings(*paths)]
    assert names == ["gpu-off-the-bus", "watchdog-timeout", "peer-closed"]

    first, rest = run_in_process(script, *map(str, paths)).stdout.split("Found as well")
    assert "rule gpu-off-the-bus" in first and "a symptom, not a cause; rule watchdog-timeout" in rest


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("2_15_nccl2.log", "ranks 0, 2 gave up after 600 s in group 0"),
        ("2_15_nccl2_of_a_group.log", "rank 5 gave up in group 3"),  # it is rank 1 of that group
    ],
)
def test_ranks_that_gave_up_in_nccl_of_torch_2_15(log: str, said: str) -> None:
    (finding,) = findings(DATA / "watchdog-timeout" / log)
    assert finding.details[0].startswith(said)


def test_a_host_to_which_all_connections_closed_is_named() -> None:
    lost = "{}:1:2 [0] misc/socket.cc:50 NCCL WARN socketProgress: Connection closed by remote peer {}<5591{}>"
    one = Facts(texts=[to_text("log", "\n".join(lost.format(f"n{i}", "n7.lan", i) for i in (1, 2)).encode())])
    assert diagnose(one)[0].details == ["All connections that closed were to n7.lan: look there first."]
    each_other = "\n".join([lost.format("n1", "n2", 1), lost.format("n2", "n1", 2)])
    assert diagnose(Facts(texts=[to_text("log", each_other.encode())]))[0].details == []


def test_cumem_on_some_ranks_of_a_host() -> None:
    fallback = "cuMem host allocations do not appear to be working; falling back to a /dev/shm/ based implementation."
    lines = [f"a:1:1 [0] NCCL INFO {fallback}", "a:2:2 [1] NCCL INFO Using network Socket"]
    found = diagnose(Facts(texts=[to_text("log", "\n".join(lines).encode())]))
    assert [finding.rule.name for finding in found] == ["cumem-host"]
    everywhere = "\n".join(f"a:{pid}:1 [0] NCCL INFO {fallback}" for pid in (1, 2))
    assert diagnose(Facts(texts=[to_text("log", everywhere.encode())])) == []


def machine(**changes: object) -> Machine:
    healthy = Machine(
        shm_bytes=2**35,
        shm_free_bytes=2**34,
        memlock_bytes=None,
        interfaces={"lo": "unknown", "eth0": "up"},
        infiniband=["mlx5_0"],
        is_virtual=False,
        environment={"NCCL_SOCKET_IFNAME": "=eth0"},
        gpus=[],
        topology="",
        versions={},
        port="29500 free",
        iommu="",
    )
    return Machine(**{**vars(healthy), **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"environment": {"NCCL_SOCKET_IFNAME": "^lo,docker"}}, []),
        ({"environment": {"GLOO_SOCKET_IFNAME": "eth7"}}, ["interface-not-found"]),
        ({"shm_bytes": 2**26, "shm_free_bytes": 2**26}, ["shm-small"]),
        ({"shm_free_bytes": 0}, ["shm-small"]),
        ({"memlock_bytes": 2**23}, ["memlock"]),
        ({"memlock_bytes": 2**23, "infiniband": []}, []),
    ],
)
def test_rules_about_this_machine(changes: dict[str, object], expected: list[str]) -> None:
    assert [finding.rule.name for finding in diagnose(Facts(machine=machine(**changes)))] == expected


OTHER_PATTERNS = [
    pattern
    for module in (reading_complaints, watchdog, nccl_log, failures, local, network)
    for value in vars(module).values()
    for pattern in (value.values() if isinstance(value, dict) else [value])
    if isinstance(pattern, re.Pattern)
]
BY_RULE = [pytest.param(compiled((*r.patterns, *r.unless, *r.explains)), id=r.name) for r in all_rules()]


@pytest.mark.parametrize("patterns", [*BY_RULE, *([each] for each in OTHER_PATTERNS)])
def test_no_pattern_explodes(patterns: list[re.Pattern[str]]) -> None:
    """Long lines made of what a pattern begins with, repeated, must not take more than a moment."""
    starts = [
        "2024-01-01 00:00:00123456: ",
        "a.a.a.",
        "[PG ID 1 Rank 1]at work: 1",
        "NCCL WARN ",
        "Got completion status=",
        "ACSCtl: SrcValid- ",
        "NVRM: Xid (",
        "a:1:1 [0] ",
    ]
    seeds = ["a", " ", "1", "[", *starts]
    for pattern in patterns:
        seeds.append(re.sub(r"\\.|[\[\]{}()*+?|^$]", "", pattern.pattern)[:40] or "x")
    lines = [(seed * LONGEST_LINE)[:LONGEST_LINE] for seed in seeds]
    start = time.process_time()
    for pattern in patterns:
        for line in lines:
            pattern.search(line)
    assert time.process_time() - start < 1.0


def test_a_large_log_takes_seconds() -> None:
    """20,000 lines, most of them long and hostile; 256 MiB is read at most."""
    hostile = ("x-" * 2000 + "\n" + "a:1:1 [0] " * 400 + "\n" + "Channel 00 : " * 300 + "\n") * 200
    usual = "n:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\nn:1:2 [0] NCCL INFO step done\n" * 10_000
    start = time.process_time()
    assert diagnose(Facts(texts=[to_text("log", (hostile + usual).encode())])) == []
    assert time.process_time() - start < 8

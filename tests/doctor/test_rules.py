"""Every rule finds its own inputs and names the right cause first; none takes another's; clean inputs stay unknown."""

import re
import time
from pathlib import Path

from ddp_lab.doctor import command as script
from ddp_lab.doctor.diagnosis import advice, diagnose
from ddp_lab.doctor.facts import Facts
from ddp_lab.doctor.predicates import PREDICATES, failures, local, network
from ddp_lab.doctor.reading import complaints as reading_complaints
from ddp_lab.doctor.reading import nccl_log, texts, watchdog
from ddp_lab.doctor.reading.inputs import read_inputs
from ddp_lab.doctor.reading.texts import LONGEST_LINE
from ddp_lab.doctor.rulebook import all_rules, compiled, rules_as_markdown
from ddp_lab.machine import Machine
from tests.doctor.test_look_alikes import facts_of, logs
from tests.in_process import run_in_process
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data" / "doctor"
DOCS = Path(__file__).parents[2] / "docs"
OTHERS = {"clean", "cases", "reports"}
CASES = sorted(path for rule in DATA.iterdir() if rule.name not in OTHERS for path in rule.iterdir())
CLEAN = sorted((DATA / "clean").iterdir())
MEASURED = {"slow-pair"}
"""Rules without a file to read: they see only what `--live` measured (tests/doctor/test_live.py)."""


def findings(*paths):
    inputs = read_inputs([str(path) for path in paths])
    assert inputs.problems == []
    return diagnose(inputs.facts)


@each_row("case", CASES)
def test_own_input_gives_the_right_verdict(case):
    results = findings(case)
    assert results[0].rule.name == case.parent.name
    assert results[0].lines, "a verdict quotes what it rests on"
    for line in results[0].lines:
        if line.number:
            text = Path(line.path).read_text().split("\n")[line.number - 1]
            assert line.text.strip()[:80] in text


@each_row("case", CLEAN)
def test_clean_input_is_unknown(case):
    assert findings(case) == []


@each_row("rule", all_rules())
def test_every_pattern_and_predicate_is_tried(rule):
    """A pattern that matches none of its rule's inputs, or a predicate that sees nothing in them, would be untested."""
    if rule.name in MEASURED:
        return
    folder = DATA / rule.name
    cases = [read_inputs([str(case)]).facts for case in (sorted(folder.iterdir()) if folder.is_dir() else [])]
    cases += [facts_of(log) for name, log in logs("fires") if name == rule.name]
    assert cases
    for pattern in compiled((*rule.patterns, *rule.all_of)):
        assert any(facts.search(pattern) for facts in cases), pattern.pattern
    of_machine = {"interface_not_here", "small_shm", "small_memlock"}
    if rule.predicate and rule.predicate not in of_machine:
        assert any(PREDICATES[rule.predicate](facts) for facts in cases)


def test_rules_are_complete():
    names = [rule.name for rule in all_rules()]
    assert len(set(names)) == len(names) and {path.name for path in DATA.iterdir()} - OTHERS <= set(names)
    assert {rule.predicate for rule in all_rules()} - {None} == set(PREDICATES)
    for rule in all_rules():
        assert rule.patterns or rule.all_of or rule.predicate
        assert rule.sources and all(source.startswith("https://") for source in rule.sources)
        assert rule.why and (rule.confidence is None) == (rule.kind == "symptom")
        assert not re.search("--timeout-minutes|--ddp-choice|--grad-accum-steps", " ".join([*rule.to_try, *rule.more]))
        for commands in (rule.to_try, rule.in_vm, rule.own):
            assert len(commands) <= 5
            for command in commands:
                assert re.fullmatch(r"\S[^\n]{0,200}?  # \S[^\n]{3,}", command), f"{rule.name}: {command}"
        assert rule.to_try


def test_logs_of_hip_get_tools_of_hip():
    facts = facts_of("[rank0]: RuntimeError: HIP error: invalid device ordinal")
    commands = [command for rule in all_rules() for _, of in advice(rule, facts) for command in of]
    assert not [command for command in commands if re.search("nvidia-smi|CUDA_VISIBLE|compute-sanitizer", command)]
    finding = diagnose(facts)[0]
    assert finding.rule.name == "invalid-device" and "rocm-smi -i;" in dict(advice(finding.rule, facts))["Try"][0]


def test_the_guide_lists_the_rules():
    page = (DOCS / "hangs.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \| (\w+) \| ([\w-]+) \|$", page, re.MULTILINE)
    assert rows == [(rule.name, rule.verdict, rule.kind, rule.confidence or "-") for rule in all_rules()]
    printed = rules_as_markdown()
    for name in re.findall(r"\(rule ([a-z0-9-]+)\)", printed):
        assert f"### {name}\n" in printed


@each_row("with_topology", [True, False])
def test_p2p_across_numa_never_from_topology_alone(with_topology):
    """The same topology, and the same channels, without a hang in the first collectives: nothing."""
    case = DATA / "p2p-across-numa" / "case"
    facts = facts_of(*(line for line in (case / "nccl.log").read_text().splitlines() if "Watchdog" not in line))
    if with_topology:
        facts.topologies = read_inputs([str(case / "topology.txt")]).facts.topologies
    assert diagnose(facts) == []
    late = facts_of((case / "nccl.log").read_text().replace("SeqNum=2,", "SeqNum=20000,"))
    late.topologies = facts.topologies
    assert [finding.rule.name for finding in diagnose(late)] == ["watchdog-timeout"]


def test_a_rule_before_the_symptoms_that_follow_from_it():
    paths = [DATA / "gpu-off-the-bus" / "dmesg.txt", DATA / "watchdog-timeout", DATA / "peer-closed"]
    names = [finding.rule.name for finding in findings(*paths)]
    assert names == ["gpu-off-the-bus", "watchdog-timeout", "peer-closed"]

    first, further = run_in_process(script, *map(str, paths)).stdout.split("Found as well")
    assert "rule gpu-off-the-bus" in first and "a symptom, not a cause; rule watchdog-timeout" in further


def machine(**changes):
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


@each_row(
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
def test_rules_about_this_machine(changes, expected):
    assert [finding.rule.name for finding in diagnose(Facts(machine=machine(**changes)))] == expected


OTHER_PATTERNS = [
    pattern
    for module in (reading_complaints, texts, watchdog, nccl_log, failures, local, network)
    for value in vars(module).values()
    for pattern in (value.values() if isinstance(value, dict) else [value])
    if isinstance(pattern, re.Pattern)
]
BY_RULE = [compiled((*r.patterns, *r.unless, *r.explains)) for r in all_rules()]


@each_row("patterns", [*BY_RULE, *([pattern] for pattern in OTHER_PATTERNS)])
def test_no_pattern_explodes(patterns):
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
    assert time.process_time() - start < 10.0, "a pattern that explodes takes minutes"

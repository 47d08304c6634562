"""What NCCL writes as JSON: answers of RAS, and the Inspector's times; what is refused, and what says nothing."""

import json
from pathlib import Path

from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.reading.inputs import read_inputs

DATA = Path(__file__).parents[1] / "data" / "doctor"
RAS = json.loads((DATA / "ras-process-gone" / "ras.json").read_text())
LOGS = sorted((DATA / "inspector-straggler" / "rank_1_last").iterdir())


def changed(**status):
    """The answer with another status of the rank that is missing."""
    answer = json.loads(json.dumps(RAS))
    answer["communicators"][0]["missing_ranks"][0]["status"] |= status
    return answer


def read(folder, content, name="ras.json"):
    (folder / name).write_text(content)
    inputs = read_inputs([str(folder / name)])
    return inputs, [finding.rule.name for finding in diagnose(inputs.facts)]


def test_a_rank_that_answers_without_the_communicator_is_not_gone(tmp_path):
    """It has destroyed it, or has it not yet."""
    for dead, unresponsive, expected in ((1, 1, 1), (0, 1, 1), (0, 0, 0)):
        answer = changed(considered_dead=bool(dead), unresponsive=bool(unresponsive))
        results = read(tmp_path, json.dumps(answer))[1]
        assert results == ["ras-process-gone"] * expected


def test_the_inspector_needs_enough_collectives_of_several_ranks(tmp_path):
    assert [finding.rule.name for finding in diagnose(read_inputs([str(path) for path in LOGS[:2]]).facts)]
    assert not diagnose(read_inputs([str(LOGS[1])]).facts), "one rank compares with none"
    for path in LOGS:
        lines = path.read_text().splitlines()
        (tmp_path / path.name).write_text("\n".join(lines[:9]))
    few = read_inputs([str(tmp_path)])
    assert len(few.facts.timed) == 3 * 8 and not diagnose(few.facts), "a send is not counted"


def test_a_line_of_the_inspector_that_is_cut_off_is_left_out(tmp_path):
    """Its first line says what a file is."""
    text = LOGS[0].read_text()
    inputs, _ = read(tmp_path, text[:-100], "node1.log")
    assert len(inputs.facts.timed) == 10 and not inputs.problems
    inputs, _ = read(tmp_path, text[100:], "node1.log")
    assert inputs.facts.timed == []
    inputs, results = read(tmp_path, json.dumps(RAS | {"communicators": {}}))
    assert results == [] and "not an answer of ncclras" in inputs.problems[0]

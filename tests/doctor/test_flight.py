"""Flight records compared: where ranks diverge, who is behind, in which call; and what is refused."""

import json
import pickle
from argparse import Namespace
from copy import deepcopy
from pathlib import Path

from torch.distributed.flight_recorder.components.builder import build_db

from ddp_lab.doctor.comparison import compare
from ddp_lab.doctor.reading.flight_recorder import read_dump
from ddp_lab.doctor.reading.inputs import read_inputs
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data" / "doctor"


def record(rank, calls, world=2, first=1, last_state="completed"):
    """A record of this project's layout; all calls but the last are completed."""
    entries = [
        {
            "seq": first + index,
            "kind": kind,
            "elements": elements,
            "dtype": "float32",
            "group": "ranks " + ",".join(map(str, range(world))),
            "state": "completed" if index + 1 < len(calls) else last_state,
            "time_s": 1e9 + index,
        }
        for index, (kind, elements) in enumerate(calls)
    ]
    return {"version": 1, "rank": rank, "world_size": world, "step": 3, "entries": entries}


def divergences(*contents):
    return compare([read_dump(f"rank_{content['rank']}.flight.json", content) for content in contents])


CALLS = [("all_reduce", 8), ("broadcast", 4), ("all_reduce", 16)]


def test_messages_between_stages_are_no_difference():
    """One rank sends what the other receives, and a receive is posted ahead."""
    ranks = [record(rank, [(kind, 8)] * count) for rank, kind, count in ((0, "send", 2), (1, "recv", 3))]
    dumps = [read_dump(f"rank_{rank}.flight.json", content) for rank, content in enumerate(ranks)]
    assert compare(dumps) == [] and [dump.point_to_point for dump in dumps] == [2, 3]


def test_groups_of_different_ranks_with_one_name_are_different():
    """Each rank numbers the groups that it makes itself."""
    dumps = [
        torch_dump(rank, "3", ranks, [(kind, 8)]) for rank, ranks, kind in ((0, "[0, 1]", "a"), (2, "[2, 3]", "b"))
    ]
    results = compare([read_dump(f"rank_{rank}.json", dump) for rank, dump in zip((0, 2), dumps, strict=True)])
    assert [(result.kind, result.ranks) for result in results] == [("missing", [1]), ("missing", [3])]
    same_names = [torch_dump(rank, "3", "[0, 2]", [(kind, 8)]) for rank, kind in ((0, "a"), (2, "b"))]
    results = compare([read_dump(f"rank_{rank}.json", dump) for rank, dump in zip((0, 2), same_names, strict=True)])
    assert [result.kind for result in results] == ["differ"]


def torch_dump(rank, group, ranks, calls, running=1):
    """A dump of torch; the collective with number `running` is not done."""
    entries = [
        {
            **{"record_id": number, "collective_seq_id": number, "p2p_seq_id": 0, "process_group": [group, "tp"]},
            **{"profiling_name": f"nccl:{kind}", "state": "completed" if number < running else "started"},
            **{
                "input_sizes": [[elements]],
                "output_sizes": [[elements]],
                "time_created_ns": 10**9 * number,
                "is_p2p": False,
            },
            **{"input_dtypes": ["Float"], "output_dtypes": ["Float"]},
        }
        for number, (kind, elements) in enumerate(calls, 1)
    ]
    return {"version": "2.10", "rank": rank, "entries": entries, "pg_config": {group: {"desc": "tp", "ranks": ranks}}}


def said_by_torch(dumps):
    """What torch's own analyser (`torchfrtrace`) says: number of the first collective with a problem, and the ranks."""
    args = Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10)
    calls = build_db(deepcopy({str(dump["rank"]): dump for dump in dumps}), args, "2.10").collectives
    problems = [(call.collective_seq_id, {*(call.mismatch_collectives or call.missing_ranks or ())}) for call in calls]
    return next((problem for problem in problems if problem[1]), None)


@each_row(
    ("last_of_rank_2", "difference"),
    [
        ([("all_reduce", 16)], None),
        ([("all_reduce", 17)], "differ"),
        ([("broadcast", 16)], "differ"),
        ([], "behind"),
    ],
)
def test_torchs_analyser_names_the_same_collective_and_ranks(last_of_rank_2, difference):
    last = [[("all_reduce", 16)], [("all_reduce", 16)], last_of_rank_2]
    dumps = [torch_dump(rank, "0", "[0, 1, 2]", [*CALLS[:2], *calls], running=3) for rank, calls in enumerate(last)]
    results = [result for result in divergences(*dumps) if result.kind != "stuck"]
    assert [result.kind for result in results] == [difference] * bool(difference)
    divergence = next(((result.seq, set(result.ranks)) for result in results), None)
    assert said_by_torch(dumps) == divergence == ((3, {2}) if difference else None)


AHEAD = record(0, [*CALLS, ("all_reduce", 1)], last_state="issued")
AHEAD["entries"][2]["state"] = "issued"


@each_row(
    ("contents", "expected"),
    [
        ([record(0, CALLS), record(1, CALLS)], None),
        ([record(0, CALLS), record(1, CALLS[1:], first=2)], None),  # compared is only what every dump still has
        ([record(0, [("all_to_all", 3)]), record(1, [("all_to_all", 5)])], None),  # sizes that may differ
        ([record(0, CALLS, last_state="issued"), record(1, CALLS[:1])], ("behind", 2, [1])),
        ([record(rank, CALLS, last_state="issued") for rank in (0, 1)], ("stuck", 3, [0, 1])),
        ([AHEAD, record(1, CALLS, last_state="issued")], ("stuck", 3, [0, 1])),  # a call queued behind it says nothing
        ([record(rank, CALLS, 3, last_state="issued") for rank in (0, 2)], ("missing", 3, [1])),
        ([record(0, CALLS), record(1, [*CALLS[:2], ("all_reduce", 17)])], ("differ", 3, [0])),
    ],
)
def test_where_ranks_diverge(contents, expected):
    assert [(result.kind, result.seq, result.ranks) for result in divergences(*contents)] == [expected] * bool(expected)


@each_row(
    ("group", "members"),
    [
        ("ranks 0,1", {0, 1}),
        ("ranks 0,1 (2)", {0, 1}),
        ("ranks 0-2,5", {0, 1, 2, 5}),
        ("6 ranks, group 0", {0, 1, 2, 3, 4, 5}),
        ("3 ranks, group 4", set()),
    ],
)
def test_who_is_in_a_group(group, members):
    """The others are not missed in it."""
    contents = [record(rank, CALLS, world=6, last_state="issued") for rank in range(6)]
    for content in contents:
        is_member = content["rank"] in (members or {0, 1, 2})
        content["entries"] = [entry | {"group": group} for entry in content["entries"] if is_member]
    assert read_dump("rank_0.flight.json", contents[0]).members == {group: members}
    assert [result.kind for result in divergences(*contents)] == ["stuck"]


def test_dumps_of_torch_2_15_on_gloo():
    """Real ones: rank 1 slept while the others reduced; its Gloo dump says nothing true of the groups' members."""
    facts = read_inputs([str(DATA / "rank-behind" / "torch_2_15_gloo")]).facts
    assert [dump.rank for dump in facts.dumps] == [0, 1, 2]
    (result,) = facts.divergences
    assert (result.kind, result.seq, result.ranks) == ("behind", 4, [1]) and "default_pg" in result.group


def test_a_pickle_is_never_loaded(tmp_path):
    class Planted:
        def __reduce__(self):
            return Path.touch, (tmp_path / "loaded",)

    for protocol in range(2, 6):
        (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Planted(), protocol))
        inputs = read_inputs([str(tmp_path)])
        assert inputs.facts.dumps == [] and "a pickle, which is not loaded" in inputs.problems[0]
        assert not (tmp_path / "loaded").exists()


def test_of_a_folder_the_latest_run(tmp_path):
    for run, calls in (("20261120-080000-aaaa", CALLS[:1]), ("20261121-080000-aaaa", CALLS)):
        for rank in (0, 1):
            rank_calls = calls if rank == 0 or run.startswith("20261121") else []
            content = json.dumps(record(rank, rank_calls))
            (tmp_path / f"{run}.rank_{rank}.flight.json").write_text(content)
    inputs = read_inputs([str(tmp_path)])
    assert len(inputs.facts.dumps) == 2 and inputs.facts.divergences == [] and inputs.problems == []
    assert "run 20261121-080000-aaaa, the latest, and not 1 older runs" in inputs.looked_at[0]

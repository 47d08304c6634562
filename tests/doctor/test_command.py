"""`ddp-lab doctor` as a user runs it: what it says first, exit codes, JSON, and inputs of every kind."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

from ddp_lab.doctor import command as script
from tests.command_page import flags_in, section
from tests.in_process import run_in_process

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "doctor"


def doctor(*arguments, stdin=b""):
    return run_in_process(script, *arguments, stdin=stdin)


def test_verdict_first_then_everything_to_act_on():
    answer = doctor(str(DATA / "shm-full" / "2_26.log"))
    assert answer.returncode == 3 and answer.stderr == ""
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("Verdict: /dev/shm is too small or full") and lines[1] == "  certain; rule shm-full"
    assert f"{DATA}/shm-full/2_26.log:1: [2026-04-22 21:34:20] worker-4" in lines[2]
    assert 1 <= lines.index("Looked at") - 1 - (lines.index("Try") + 1) <= 5, "at most five things to try"
    assert lines[-1].startswith("--all prints the rest") and "Source" not in lines

    lines = doctor("--all", str(DATA / "shm-full" / "2_26.log")).stdout.splitlines()
    order = ["Verdict", "Try", "Why", "Source", "Ranks in NCCL's log", "Looked at"]
    places = [next(i for i, line in enumerate(lines) if line.startswith(part)) for part in order]
    assert places == sorted(places)


def test_json_has_what_the_page_documents():
    answer = doctor("--json", str(DATA / "socket-despite-infiniband" / "with_topology"))
    content = json.loads(answer.stdout)
    assert all(advice["commands"] for advice in content["findings"][0]["try"])
    assert answer.returncode == 3 and content["verdict"] == "socket-despite-infiniband"
    complaining = json.loads(doctor("--json", str(DATA / "clean" / "nccl_2_4.log")).stdout)
    fields = {*content, *content["findings"][0], *content["findings"][0]["evidence"][0], *complaining["unexplained"][0]}
    assert fields <= set(re.findall(r"`(\w+)`", section("ddp-lab doctor")))
    assert content["topologies"][0]["nearest_nics"] == {"GPU0": ["mlx5_0"], "GPU1": ["mlx5_bond_0"]}
    assert content["processes"][0]["transports"] == {"0-8": ["NET/Socket"]}
    assert json.loads(doctor("--json", str(DATA / "clean" / "gloo.log")).stdout)["verdict"] == "unknown"


def test_every_flag_is_documented():
    actions = script.build_parser()._actions
    assert sorted(flags_in(section("ddp-lab doctor"))) == sorted(
        action.option_strings[-1] for action in actions if action.option_strings[1:] == [] and action.option_strings
    )


def test_nothing_from_a_file_reaches_the_terminal_as_code(tmp_path):
    """Of a log and of a flight record; nor does either forge a line."""
    warning = "h:1:1 [0] NCCL WARN \x1b]0;title\x07\x1b[2J\x9b31m\u202eDuplicate GPU detected [bold]x[/bold]\n"
    (tmp_path / "evil.log").write_text(warning)
    forged = "x\x1b[31m\x1b]0;pwned\x07\nVerdict: fake"
    for rank, kind in enumerate(("all_reduce", "broadcast")):
        entry = {"collective_seq_id": 1, "process_group": ["0", forged], "profiling_name": kind, "state": "started"}
        dump = {"version": "2.10", "rank": rank, "entries": [entry], "pg_config": {"0": {"ranks": "[0, 1]"}}}
        (tmp_path / f"fr_{rank}.json").write_text(json.dumps(dump))
    answer = doctor(str(tmp_path), "--all")
    assert answer.returncode == 3 and "Duplicate GPU detected [bold]x[/bold]" in answer.stdout
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", answer.stdout)
    assert [line for line in answer.stdout.splitlines() if line.startswith("Verdict")] == answer.stdout.splitlines()[:1]


def test_a_run_folder_with_traces_and_other_files(tmp_path):
    """As a run leaves it. Useless files are skipped without a word."""
    folder = tmp_path / "profile" / "zero3"
    (folder / "rank_0").mkdir(parents=True)
    (folder / "rank_0" / "20261121-093000-1f2e.step8.pt.trace.json.gz").write_bytes(gzip.compress(b"{}"))
    (folder / "notes.json").write_text("{}")
    for rank in (0, 1, 2):
        name = f"20261121-093000-1f2e.rank_{rank}.flight.json"
        (folder / name).write_bytes((DATA / "rank-behind" / "own" / name).read_bytes())
    answer = doctor(str(tmp_path / "profile"))
    assert answer.returncode == 3 and answer.stderr == "" and "rank 1 never issued it" in answer.stdout
    (tmp_path / "nothing").mkdir()
    answer = doctor(str(tmp_path / "nothing"))
    assert answer.returncode == 1 and "has no log, topology, run record or flight-recorder dump" in answer.stderr


def test_help_and_reading_need_no_torch():
    path = DATA / "clean" / "gloo.log"
    code = f"import runpy, sys; sys.argv = ['ddp-lab', 'doctor', '{path}']\n"
    code += "try: runpy.run_module('ddp_lab', run_name='__main__')\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.stdout.endswith("False\n"), answer.stderr

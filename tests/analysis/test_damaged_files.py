"""A fuzzer over every field of a run record and of a trace, and files that unpack to more than there is memory for."""

import bz2
import copy
import gzip
import lzma
import os
import random
import re
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from ddp_lab.analysis.command import main
from ddp_lab.analysis.comparison.choices import report_on_choices
from ddp_lab.analysis.comparison.fairness import FIELDS
from ddp_lab.analysis.comparison.two_runs import report_on_two_runs
from ddp_lab.analysis.files import write_text
from ddp_lab.analysis.record import checked, read_record
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.doctor.reading import content as doctors
from ddp_lab.doctor.reading.inputs import read_inputs
from ddp_lab.planner.costs.record import load
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import LIMIT
from tests.analysis.comparison.test_compare import timed
from tests.tables import each_row
from tests.traces import cpu_trace, cuda_trace, write, write_run

RUN, OTHER = "20261121-093000-0001", "20261121-100000-0002"
GONE = object()
VALUES = (
    GONE,
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    1e300,
    1e-300,
    "",
    "x",
    "a\nb",
    [],
    [None],
    [[1]],
    {},
    {"a": [-1]},
)
IN_ALL = (0, 0.0, -1, None, 1e300, 1e-9)
"""Instead of every entry of a list."""
DOCUMENTED = Path(__file__).parents[2] / "docs" / "run-record.md"
Case = tuple[tuple[Any, ...], Any]


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[Case]:
    """The way to each value, and the value; of a list, to its first entry."""
    below = found.items() if isinstance(found, dict) else enumerate(found[:1]) if isinstance(found, list) else ()
    for key, value in below:
        yield (*path, key), value
        yield from places(value, (*path, key))


def cases(whole: Any) -> list[Case]:
    """Each place with each wrong or odd value."""
    return [
        (path, value)
        for path, now in places(whole)
        for value in (*VALUES, *([value] * len(now) for value in IN_ALL if isinstance(now, list)))
    ]


def changed(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(whole)
    holder: Any = found
    for key in path[:-1]:
        holder = holder[key]
    if value is GONE:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return found


def whole_record(**changes: Any) -> dict[str, Any]:
    """Of a run without traces, with every documented field."""
    names = re.findall(r"^\| `(\w+)` \|", DOCUMENTED.read_text(), re.MULTILINE)
    found = dict.fromkeys(names) | timed("pytorch_ddp", 0.1) | {"notes": ["a"], "versions": {"torch": "2"}}
    config = found["config"] | {"profile_ranks": "0,1", "mesh": "dp=2", "no_profile": True}
    return found | {"run_id": RUN, "resumed_from": {"step": 1}, "config": config} | changes


def refusal(read: Callable[[], Any]) -> str:
    """What a reader says; empty if it has nothing to say. A warning of numpy's is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            read()
        except UserError as error:
            return str(error)
    return ""


def require_numbers(folder: Path) -> None:
    """No page and no table has a figure that is none; they are removed."""
    for path in [*folder.rglob("*.html"), *folder.rglob("*.csv")]:
        text = re.sub(r"<script.*?</script>", "", path.read_text(), flags=re.DOTALL)
        of_nothing = r"|\binf\b" if path.name != "changes.csv" else ""
        assert not re.search(rf"\b(nan|NaN|None)\b{of_nothing}", text), path.name
        path.unlink()


def test_every_field_of_a_run_record_is_used_or_named(tmp_path: Path) -> None:
    """All cases are checked, and 20 of those that pass are read by all that reads records."""
    path, whole, passed = tmp_path / "profile" / "pytorch_ddp" / f"{RUN}.run.json", whole_record(), []
    write(path.with_name(f"{OTHER}.run.json"), whole_record(run_id=OTHER))
    write(tmp_path / "profile" / "other" / f"{RUN}.run.json", whole_record(choice="other"))
    for place, value in cases(whole):
        found = changed(whole, place, value)
        said = refusal(lambda found=found: checked(found, path, failed_too=True))
        names = {key for key in place if isinstance(key, str)} | {"run record of version"}
        if said:
            assert said.startswith(f"{path}: ") and "\n" not in said and any(name in said for name in names), said
        else:
            passed.append((place, value, found))
    assert 300 < len(passed) < 600
    readers = (
        lambda: report_on_choices(tmp_path, "reports", ["pytorch_ddp", "other"], [], FIELDS),
        lambda: report_on_two_runs(path.parent, RUN, OTHER, tmp_path / "reports", FIELDS),
        lambda: read_inputs([str(path)]),
    )
    for place, value, found in random.Random(0).sample(passed, 20):
        write(path, found)
        for read in readers:
            said = refusal(read)
            assert "\n" not in said and (not said or str(path.parent) in said or "differ in" in said), (
                place,
                value,
                said,
            )
        require_numbers(tmp_path)


def test_every_field_of_a_trace_is_used_or_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All events of both ranks at once, and anything in the file of one; with a record that is whole."""
    trace_dir = write_run(tmp_path / "profile" / "x", run_id=RUN)
    write(trace_dir / f"{RUN}.run.json", whole_record())
    paths, whole = sorted(trace_dir.glob("rank_*/*")), cpu_trace()
    of_all = [
        {
            **made,
            "traceEvents": [{**each, key: value} if steps or "Step#" not in each["name"] else each for each in events],
        }
        for made in (whole, cuda_trace())
        for events in (made["traceEvents"],)
        for steps in (True, False)
        for key, value in (("dur", 0), ("dur", -1), ("ts", 0), ("name", ""))
    ]
    of_one = [changed(whole, *case) for case in random.Random(0).sample(cases(whole), 5)]
    for found, other in [(found, found) for found in of_all] + [(found, whole) for found in of_one]:
        for rank, (path, content) in enumerate(zip(paths, (found, other), strict=True)):
            write(path, {**content, "distributedInfo": {**whole["distributedInfo"], "rank": rank}})
        codes: list[int] = []
        assert refusal(lambda codes=codes: codes.append(main("reports", ["--trace-dir", str(trace_dir)]))) == ""
        said = capsys.readouterr().err
        assert all(line.startswith(("warning: ", "error: ", "reading ")) for line in said.splitlines()), said
        assert codes[0] == (1 if "error: " in said else 0)
        require_numbers(tmp_path / "reports")


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}
MOST, UNPACKED = 2**22, 2**25


@each_row("packed", PACKED)
def test_a_small_file_that_unpacks_to_a_huge_one(tmp_path: Path, packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 MiB not much more than the limit, 4 MiB here, is in memory, and a message or the report says so."""
    monkeypatch.setenv(LIMIT, str(MOST / 2**30))
    monkeypatch.setattr(doctors, "TAIL_BYTES", 2**20)
    monkeypatch.setattr(doctors, "TAIL_LINES", 10_000)
    monkeypatch.setattr(doctors, "_CHUNK", 2**14)
    monkeypatch.setattr(doctors, "HEAD_LINES", 10_000)
    zeros, spaces, lines = (tmp_path / f"{name}.json.{packed}" for name in ("zeros", "spaces", "lines"))
    zeros.write_bytes(PACKED[packed](bytes(UNPACKED)))
    spaces.write_bytes(PACKED[packed](b'{"traceEvents": [' + b" " * UNPACKED))
    lines.write_bytes(PACKED[packed](b"a\n" * (UNPACKED // 2)))
    tracemalloc.start()
    try:
        for read in (read_trace, read_record, load):
            assert "not valid JSON" in refusal(lambda read=read: read(zeros))
            assert "GiB unpacked; if so, give --most-gib above 0.00390625" in refusal(lambda read=read: read(spaces))
        found = read_inputs([str(lines)])
        assert "left out" in found.looked_at[0] and "only its first 4 MiB unpacked" in found.looked_at[0]
        assert tracemalloc.get_traced_memory()[1] < 5 * MOST
    finally:
        tracemalloc.stop()
    monkeypatch.setenv(LIMIT, str(2 * UNPACKED / 2**30))
    assert "not valid JSON" in refusal(lambda: read_trace(spaces))


def test_links_and_what_is_no_file_stay_what_they_are(tmp_path: Path) -> None:
    link, file, pipe = (tmp_path / name for name in ("link", "file", "pipe"))
    link.symlink_to(file)
    write_text(link, "whole")
    assert link.is_symlink() and file.read_text() == "whole"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "whole")
        assert pipe.is_fifo() and os.read(reader, 9) == b"whole"
    finally:
        os.close(reader)

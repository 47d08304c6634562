"""Damaged files: each reader gives possible figures, or one line that names the file; in bounded time and memory."""

import bz2
import gzip
import lzma
import os
import re
import shutil
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings

from ddp_lab.analysis.command import main as report
from ddp_lab.analysis.comparison.choices import report_on_choices
from ddp_lab.analysis.comparison.fairness import FIELDS
from ddp_lab.analysis.comparison.two_runs import report_on_two_runs
from ddp_lab.analysis.record import read_record
from ddp_lab.analysis.summary import analyse_window
from ddp_lab.analysis.traces.finding import find_windows
from ddp_lab.analysis.traces.reading import read_trace
from ddp_lab.doctor.complaints import unexplained
from ddp_lab.doctor.diagnosis import diagnose
from ddp_lab.doctor.reading import content as doctors
from ddp_lab.doctor.reading.inputs import read_inputs
from ddp_lab.planner.costs import hardware
from ddp_lab.runtime.errors import UserError
from ddp_lab.untrusted import LIMIT
from ddp_lab.writing import write_text
from tests.damage import DAMAGE, damaged
from tests.parity import message_of
from tests.tables import by_default
from tests.traces import cpu_trace, cuda_trace, timed, write, write_run

DATA = Path(__file__).parent / "data"
DOCTOR = DATA / "doctor"
RUN, OTHER = "20261121-093000-0001", "20261121-100000-0002"
LONGEST_S = 20.0
Reader = tuple[Path, Callable[[], Any]]
"""The file that is damaged, and what reads it."""


def require_figures(folder):
    """No page and no table has NaN, infinity or None for a figure."""
    for path in [*folder.rglob("*.html"), *folder.rglob("*.csv")]:
        text = re.sub(r"<script.*?</script>", "", path.read_text(), flags=re.DOTALL)
        of_nothing = r"|\binf\b" if path.name != "changes.csv" else ""
        assert not re.search(rf"\b(nan|NaN|None)\b{of_nothing}", text), path.name


def whole_record(**changes):
    """The record of a run without traces."""
    record = timed("pytorch_ddp", 0.1) | {"notes": ["a"], "versions": {"torch": "2"}}
    config = record["config"] | {"profile_ranks": "0,1", "mesh": "dp=2", "no_profile": True}
    return record | {"run_id": RUN, "resumed_from": {"step": 1}, "config": config} | changes


def record_alone(folder):
    path = write(folder / f"{RUN}.run.json", whole_record())
    return path, lambda: read_record(path, failed_too=True)


def records(folder):
    """Everything that reads records."""
    path = write(folder / "profile" / "pytorch_ddp" / f"{RUN}.run.json", whole_record())
    write(path.with_name(f"{OTHER}.run.json"), whole_record(run_id=OTHER))
    write(folder / "profile" / "other" / f"{RUN}.run.json", whole_record(choice="other"))

    def read():
        doctor(path)
        read_record(path)  # otherwise there is nothing to compare
        for compare in (
            lambda: report_on_choices(folder, "reports", ["pytorch_ddp", "other"], [], FIELDS),
            lambda: report_on_two_runs(path.parent, RUN, OTHER, folder / "reports", FIELDS),
        ):
            try:
                compare()
            except UserError as error:
                assert str(path.parent) in str(error) or "differ in" in str(error)
        require_figures(folder)

    return path, read


def traces(make, reports=False):
    def reader(folder):
        trace_dir = write_run(folder / "profile" / "x", make, RUN)
        write(trace_dir / f"{RUN}.run.json", whole_record())

        def read():
            assert report("reports", ["--trace-dir", str(trace_dir), "--output-dir", str(folder / "reports")]) in (0, 1)
            require_figures(folder / "reports")

        return next(trace_dir.glob("rank_1/*")), read if reports else lambda: analysed(trace_dir)

    return reader


def real_traces(folder):
    """Traces of two ranks on an H200."""
    shutil.copytree(DATA / "traces" / "h200" / "zero2_gloo", folder / "x")
    return folder / "x" / "rank_1.pt.trace.json.gz", lambda: analysed(folder / "x")


def analysed(folder):
    """Asserts that parts of a step are not negative and add up to it."""
    analysis = analyse_window(find_windows(folder)[0])
    steps = analysis.exposure.steps
    parts = steps[["compute_ms", "exposed_ms", "exposed_copy_ms", "idle_ms"]]
    assert (parts >= -1e-6).to_numpy().all()
    assert parts.sum(axis="columns").tolist() == pytest.approx(steps["step_ms"].tolist(), rel=5e-3)
    shares = analysis.summary[["compute_pct", "non_compute_pct", "idle_pct", "overlap_pct"]].to_numpy(float)
    assert ((shares >= -0.01) & (shares <= 100.01) | np.isnan(shares)).all()


def doctor(path):
    inputs = read_inputs([str(path)])
    findings = diagnose(inputs.facts)
    unexplained(inputs.facts, findings)
    if inputs.problems:
        raise UserError("".join(inputs.problems))


def of_doctor(file):
    def reader(folder):
        path = Path(shutil.copy(DOCTOR / file, folder / Path(file).name))
        return path, lambda: doctor(path)

    return reader


def card(folder):
    path = folder / "card.toml"
    path.write_text('[devices.mine]\nlike = "H100"\nmemory_mib = 1024\nbytes_per_s = 1e12\nsource = "me"\n')
    return path, lambda: hardware.cluster(f"2x{path}", "pcie4")


READERS = {
    "a run record": (60, record_alone),
    "a run record, compared": (4, records),
    "a trace": (6, traces(cpu_trace)),
    "a trace of a device": (6, traces(cuda_trace)),
    "a trace, reported": (2, traces(cpu_trace, reports=True)),
    "a real trace": (1, real_traces),
    "a flight record": (40, of_doctor("stuck-together/own/20261121-093000-1f2e.rank_0.flight.json")),
    "torch's flight record": (40, of_doctor("stuck-together/torch_nccl/nccl_trace_rank_0.json")),
    "an answer of RAS": (40, of_doctor("ras-process-gone/ras.json")),
    "the Inspector's times": (40, of_doctor("inspector-straggler/rank_1_last/node1-pid163945.log")),
    "a log of NCCL": (40, of_doctor("shm-full/2_26.log")),
    "a topology": (40, of_doctor("socket-despite-infiniband/with_topology/topology.txt")),
    "a card": (40, card),
}


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", READERS)
def test_what_is_damaged_is_read_or_named(name, times, tmp_path, capsys):
    """An error is one line, never a traceback. Warnings of numpy are errors."""
    examples, reader = READERS[name]
    path, read = reader(tmp_path)
    content = path.read_bytes()
    read()
    outcomes = Counter[bool]()

    @settings(max_examples=times * examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(DAMAGE)
    def check(chance):
        path.write_bytes(damaged(content, chance))
        message, begun = "", time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            try:
                read()
            except UserError as error:
                message = str(error)
        assert time.process_time() - begun < LONGEST_S
        names = path.name, path.parent.name, "unknown device"  # a card's `like`
        is_named = any(name in message for name in names)
        assert "\n" not in message and (not message or is_named), message
        outcomes[bool(message)] += 1
        printed = capsys.readouterr().err.splitlines()
        assert all(line.startswith(("warning: ", "error: ", "reading ")) for line in printed), printed

    check()
    assert outcomes[True] or "trace" in name, "nothing was seen"


PACKED = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lambda data: lzma.compress(data, preset=0),
    "zst": lambda data: pyarrow.compress(data, codec="zstd", asbytes=True),
}
MOST, UNPACKED = 2**20, 2**22


@pytest.mark.parametrize("packed", by_default(PACKED, "gz", "zst"))
def test_a_small_file_that_unpacks_to_a_huge_one(tmp_path, packed, monkeypatch):
    """Of 4 MiB unpacked hardly more than the limit, here 1 MiB, is in memory, and a message or the report says so."""
    monkeypatch.setenv(LIMIT, str(MOST / 2**30))
    for name, value in {"TAIL_BYTES": 2**18, "TAIL_LINES": 10_000, "_CHUNK": 2**14, "HEAD_LINES": 10_000}.items():
        monkeypatch.setattr(doctors, name, value)
    zeros, spaces, lines = (tmp_path / f"{name}.json.{packed}" for name in ("zeros", "spaces", "lines"))
    zeros.write_bytes(PACKED[packed](bytes(UNPACKED)))
    spaces.write_bytes(PACKED[packed](b'{"traceEvents": [' + b" " * UNPACKED))
    lines.write_bytes(PACKED[packed](b"a\n" * (UNPACKED // 2)))
    tracemalloc.start()
    try:
        for read in (read_trace, read_record):
            assert "not valid JSON" in message_of(UserError, read, zeros)
            assert f"GiB unpacked; if so, give --most-gib above {MOST / 2**30:g}" in message_of(UserError, read, spaces)
        inputs = read_inputs([str(lines)])
        assert "left out" in inputs.looked_at[0] and "only its first 1 MiB unpacked" in inputs.looked_at[0]
        assert tracemalloc.get_traced_memory()[1] < (80 if packed == "xz" else 16) * MOST  # xz has a window of 64 MiB
    finally:
        tracemalloc.stop()
    monkeypatch.setenv(LIMIT, str(2 * UNPACKED / 2**30))
    assert "not valid JSON" in message_of(UserError, read_trace, spaces)


def test_links_and_what_is_no_file_stay_what_they_are(tmp_path):
    link, file, pipe = (tmp_path / name for name in ("link", "file", "pipe"))
    link.symlink_to(file)
    write_text(link, "whole")
    assert link.is_symlink() and file.read_text() == "whole"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "whole")
    assert pipe.is_fifo() and os.read(reader, 9) == b"whole"
    os.close(reader)

"""What-if: a run of hand-made traces, whose figures can be worked out in one's head, under other settings."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_lab.planner.traced_run import compute_seconds, fits, read_run, shared_out
from ddp_lab.planner.what_if import WhatIf
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.link.rates import Rate
from scripts import plan as script
from tests.in_process import run_in_process
from tests.traces import cpu_trace, record_of_eight_steps, timeline_of, write_run

RUN_ID = "20261121-093000-0001"
BUSY_US = 799
"""Of `cpu_trace`: 999 us, 200 of which only wait."""


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """An mlp of 2 x 16 x 16 parameters, 1.0 ms a step."""
    return written(tmp_path / "profile" / "flat_ddp")


def written(folder: Path, **changes: Any) -> Path:
    write_run(folder)
    content = record_of_eight_steps("flat_ddp", 1e-3) | {"run_id": RUN_ID, "step_time_median_s": 1e-3, "device": "cpu"}
    content["config"] = content["config"] | {"depth": 2, "width": 16, "no_profile": False, "grad_accum_steps": 1}
    (folder / f"{RUN_ID}.run.json").write_text(json.dumps(content | changes))
    return folder


def plan(*arguments: str) -> tuple[int, str, str]:
    answer = run_in_process(script, "what-if", *arguments)
    return answer.returncode, answer.stdout, answer.stderr


def test_time_shared_out() -> None:
    """0-4 and 2-6 share 2-4; 8-9 is alone."""
    assert shared_out(np.array([[0.0, 4.0], [2.0, 6.0], [8.0, 9.0]])).tolist() == [3.0, 3.0, 1.0]


def test_what_a_trace_says() -> None:
    timelines = [timeline_of(cpu_trace(rank), rank) for rank in range(2)]
    assert compute_seconds(timelines[0]) == pytest.approx(BUSY_US * 1e-6)
    models = fits(timelines)
    assert list(models) == ["all_reduce"] and float(models["all_reduce"].seconds(4000)) == pytest.approx(300e-6)


def test_the_same_setting_computes_as_long_as_recorded(run_folder: Path) -> None:
    run = read_run(run_folder)
    same = WhatIf(run).answer()
    assert same.compute_s == pytest.approx(BUSY_US * 1e-6, rel=1e-6)
    in_flight = float(run.collectives["all_reduce"].seconds(2 * 16 * 16 * 4))
    assert same.exposed_s >= in_flight * 0.99


def test_another_setting(run_folder: Path, tmp_path: Path) -> None:
    """Four ranks' all-reduce sends 3/4 of twice its bytes, not 1/2; the global batch grows with them; a link of half
    the rate takes longer, and the rate of a shaped one is the record's."""
    what_if = WhatIf(read_run(run_folder))
    assert what_if.global_batch_size(4) == 2 * what_if.global_batch_size(None)
    assert what_if.answer(ranks=4).exposed_s > what_if.answer().exposed_s
    shaped = WhatIf(read_run(written(tmp_path / "shaped", link_bits_per_s=10**9)))
    times = [shaped.answer(rate=Rate(rate)).step_time_s for rate in (10**8, 10**9)]
    assert times[0] > times[1]
    assert times[1] == pytest.approx(shaped.answer().step_time_s)


def test_the_command(run_folder: Path) -> None:
    code, out, error = plan(str(run_folder), "--ranks", "8", "--rate", "100gbit", "--bucket-cap-mb", "10")
    assert (code, error) == (0, "")
    recorded, same, changed, trust = out.splitlines()
    assert recorded == "recorded: flat_ddp on mlp, 2 ranks over gloo: 1.0 ms a step"
    assert re.match(r"the same, predicted: \d+\.\d ms a step, .*; error [+-]\d+\.\d%$", same)
    assert changed.startswith("predicted, 8 ranks, global batch 32, links of 100gbit, buckets of 10.0 MiB: ")
    assert trust.startswith("If that is off by as much as on the recorded setting: ")


def test_mistakes_are_one_line(run_folder: Path) -> None:
    for flag, value, said in (
        ("--ranks", "0", "--ranks: 0: must be a whole number of at least 1"),
        ("--rate", "fast", "rate 'fast': give a number above 0 with its unit"),
        ("--rate", "unshaped", "--rate: give a number, such as 10gbit"),
        ("--choice", "flat_dpp", "unknown strategy 'flat_dpp'; did you mean flat_ddp"),
        ("--choice", "deepspeed_zero3", "deepspeed_zero3: "),
    ):
        code, out, error = plan(str(run_folder), flag, value)
        assert code == 2 and "predicted, " not in out and error.startswith("error: ")
        assert error.count("\n") == 1 and said in error


def test_runs_that_cannot_be_used(tmp_path: Path) -> None:
    for folder, changes, said in (
        ("none", None, "no run record"),
        ("untraced", {"run_id": "20261121-100000-0002"}, "no trace of run 20261121-100000-0002"),
        ("untimed", {"step_time_median_s": None}, "no step that was timed without the profiler"),
        ("odd", {"config": {"workload": "mlp", "depth": []}}, "its settings cannot be read"),
    ):
        path = tmp_path / folder
        path.mkdir()
        if changes is not None:
            written(path, **changes)
        with pytest.raises(UserError, match=said):
            read_run(path)
    with pytest.raises(UserError, match="cannot be read as a run record"):
        read_run(tmp_path / "nowhere.run.json")

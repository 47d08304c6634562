"""The two lines at the end of a run: planted causes in real runs, and rows of a record for what a CPU does not have."""

from typing import Any

import pytest
import torch.distributed as dist

import ddp
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.records.run_so_far import RunSoFar
from ddp_lab.runtime.records.verdict import verdict
from ddp_lab.runtime.records.waits import lateness
from ddp_lab.runtime.run import train_and_record
from ddp_lab.runtime.watch.flight_recorder import FlightRecorder
from ddp_lab.runtime.watch.sequence import recorded_collectives
from tests.checkpoints import here
from tests.ranks import RankPool
from tests.runtime.test_own_workload import written
from tests.runtime.test_run import record_of
from tests.tables import each_row

SLOW = """
import time
import torch.distributed as dist

class Slow(list):
    def __getitem__(self, index):
        time.sleep({})
        return super().__getitem__(index)

def build():
    return Workload(Model(), Slow(samples(48)), samples(4), loss=mean)
"""


def run_recorded(settings: dict[str, Any]):
    """A run whose collectives are recorded, but for which nobody watches."""
    config = RunConfig.of(**settings)
    so_far, flight = RunSoFar(config), FlightRecorder.create(dist.get_rank())
    so_far.latest_collectives = lambda: flight.state().entries
    with recorded_collectives(flight):
        train_and_record(config, here(), ddp.load, so_far)
    flight.close()


@pytest.mark.parametrize(
    ("choice", "data", "expected"),
    [
        ("bucket_ddp_async", "0.03", "input-bound: loading data takes"),
        ("pytorch_ddp", "0.05 * (dist.get_rank() == 1)", "rank 1 is a straggler"),
    ],
)
def test_a_run_names_what_was_planted(ranks: RankPool, tmp_path, choice, data, expected):
    name = written(tmp_path, SLOW.format(data))
    settings = {"choice": choice, "workload": name, "output_dir": str(tmp_path), "no_profile": True, "no_eval": True}
    ranks.run(2, run_recorded, settings | {"global_batch_size": 8, "grad_accum_steps": 1})
    record = record_of(tmp_path, choice)
    first, then = record["verdict"]
    is_busy = first.startswith("withheld: a training thread could run but had no core")  # the machine, with others
    assert is_busy or first.startswith(expected), first
    rows = record["throughput"]
    if "input" in expected:
        assert all(row["data_s"] > 0.09 for row in rows), "4 samples of 30 ms, but for the last step"
        assert is_busy or "samples ready" in then
    else:
        assert rows[1]["late_s"] > 0.5 * rows[1]["step_s"] and rows[1]["late_s"] > 5 * rows[0]["late_s"]
        loads = choice == "pytorch_ddp" and not is_busy
        assert (", and loads data" in first, "disk of rank 1" in then) == (loads, loads)
    assert (rows[0]["collectives_s"] is None) == (choice == "pytorch_ddp"), "C++ waits for those of DDP"
    assert all(row["core_s"] >= 0 and row["device_s"] is None for row in rows)


def row(rank: int = 0, **changes) -> dict[str, Any]:
    """Of a step of 100 ms on a GPU that is busy, in ms."""
    times = {"step": 100, "data": 1, "collectives": 2, "device": 60, "core": 1, "late": 1} | changes
    return {"rank": rank} | {f"{name}_s": None if ms is None else ms / 1000 for name, ms in times.items()}


def record(*rows: dict[str, Any], **changes) -> dict[str, Any]:
    memory = [{"rank": 0, "peak_reserved_bytes": None, "peak_rss_bytes": 2**30, "limit_bytes": 2**33}]
    steps = {"step_time_s": [0.1] * 6, "settling_steps": 0, "resumed_from": None, "gpu_sharing": None}
    return steps | {"throughput": rows, "memory": memory, "config": {"no_profile": False}} | changes


CPU = {"device": None}
FULL = [{"rank": 3, "peak_reserved_bytes": 75 * 2**30, "peak_rss_bytes": 2**30, "limit_bytes": 79 * 2**30}]
ROWS = [
    (record(row(), row(1)), "GPU-bound: each host waits for its GPU for 60%", "ddp-lab report"),
    (record(row(), row(1, device=4)), "host-bound: rank 1 waits for its GPU only 4 ms, 4% of a step", "--compile"),
    (record(row(device=4, data=50), row(1, device=9, data=40)), "input-bound: loading data takes 40 ms", "ready"),
    (record(row(data=50), row(1, data=40)), "GPU-bound", "ddp-lab report"),  # hidden behind the GPU's work
    (record(row(**CPU), row(1, **CPU)), "compute-bound; loading data takes at most 1%", "ddp-lab report"),
    (record(row(collectives=60, **CPU), row(1, collectives=34, **CPU)), "exposed communication: ", "--global-batch"),
    (record(row(collectives=90, **CPU), row(1, late=80, **CPU)), "rank 1 is a straggler: it comes last", "rank 1"),
    (record(row(), row(1, late=80), config={"no_profile": True}), "rank 1 is a straggler", "without --no-profile"),
    (record(row(late=30, **CPU), row(1, late=33, **CPU)), "compute-bound", "report"),  # now one, now the other
    (record(row(core=30, collectives=40, **CPU), row(1, collectives=40, **CPU)), "withheld: a training", "fewer"),
    (record(row(core=30, data=70, **CPU), row(1, data=70, **CPU)), "input-bound", "ready"),  # the load explains less
    (record(row(), row(1), gpu_sharing="2 ranks a GPU"), "withheld: ranks share a GPU", "a GPU for each"),
    (record(row(), step_time_s=[0.1, None, 0.1, 0.1]), "unknown: 2 of 4 steps are timed", "--max-steps"),
    (record(row(), row(1), memory=FULL), "GPU-bound", "--activation-checkpointing block, smaller micro-batches"),
    (record(row(data=20, **CPU), row(1, data=20, late=70, **CPU)), "rank 1 is a straggler", ""),  # the larger one first
]  # fmt: skip


@each_row("run_record, expected, advice", ROWS)
def test_rows_of_a_record(run_record, expected, advice):
    first, then = verdict(run_record)
    assert first.startswith(expected) and advice in then, (first, then)
    assert ("memory is near the limit: rank 3 held 75.0 of 79.0 GiB" in first) == (run_record["memory"] is FULL)


def test_lateness_counts_once_a_step_and_on_one_host_alone():
    """Rank 2 comes 3 s late to the first of two collectives of each step, and drags that along."""
    when = [{(step, "ranks 0-2", seq): 100.0 * step + seq + 3 * (rank == 2) for step in range(3) for seq in (1, 2)}
            for rank in range(3)]  # fmt: skip
    assert lateness(when, ["a"] * 3) == [0, 0, 3]
    pause = [calls | {(0, "ranks 0-2", 1): 1.0 + 60 * (rank == 0)} for rank, calls in enumerate(when)]
    assert lateness(pause, ["a"] * 3) == [0, 0, 3], "one pause of rank 0 is no habit"
    assert lateness(when, ["a", "a", "b"]) == [None] * 3
    assert lateness([{call: s for call, s in calls.items() if call[0] < 2} for calls in when], ["a"] * 3) == [None] * 3

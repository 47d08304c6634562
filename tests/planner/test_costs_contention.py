"""What compute and collectives take from each other: on real ranks, and in files."""

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import contention as benchmark
from benchmarks import contention_rounds
from benchmarks.contention_rounds import Round, measure_drift, measure_rounds, summary
from planner import contention, hardware
from planner.contention import Measured
from planner.contracts import Contention
from planner.sources import contention_of
from tests.ranks import RankPool
from training.errors import UserError
from training.records.record import cpu_name


def measure_briefly() -> list[Round]:
    return measure_rounds(torch.device("cpu"), 2**20, seconds=0.05, rounds=2)


def test_ranks_agree_on_what_they_measured(ranks: RankPool) -> None:
    one, other = ranks.run(2, measure_briefly)
    assert one == other and len(one) == 2
    for each in one:
        assert min(dataclasses.astuple(each)) > 0


class CountedWork:
    """Done from the given step on; counts how often it is asked."""

    def __init__(self, done_after: int, steps: list[int]) -> None:
        self._done_after, self._steps, self.asked, self.awaited = done_after, steps, 0, False

    def is_completed(self) -> bool:
        self.asked += 1
        return len(self._steps) >= self._done_after

    def wait(self) -> None:
        self.awaited = True


def test_finished_calls_are_not_asked_after_every_step() -> None:
    """Of 100 calls, all but the last are done after the first of five steps."""
    steps: list[int] = []
    works = [CountedWork(5 if number == 99 else 1, steps) for number in range(100)]

    def step() -> None:
        time.sleep(0.01)
        steps.append(1)

    def issue(*_: Any, **__: Any) -> CountedWork:
        time.sleep(0.001)
        return next(handles)

    handles, tensor = iter(works), torch.ones(1)
    with mock.patch.object(contention_rounds.dist, "all_reduce", issue), mock.patch("torch.distributed.barrier"):
        step_s, all_reduce_s = contention_rounds.timed_together(step, tensor, 100, torch.device("cpu"))
    assert len(steps) == 5 and all(work.awaited for work in works)
    assert sum(work.asked for work in works) == 100 + 4
    assert step_s >= 0.01 and 100 * all_reduce_s >= 0.1 + 5 * step_s - 1e-6, "a step's time is without the issuing"


def drift_with_a_late_rank(late_s: float) -> float:
    """Rank 1 begins each step so much later than the other."""
    training_step = contention_rounds.training_step

    def late_step(*args: Any) -> Callable[[], None]:
        step = training_step(*args)

        def late() -> None:
            time.sleep(late_s * torch.distributed.get_rank())
            step()

        return late

    with mock.patch.object(contention_rounds, "training_step", late_step):
        return measure_drift(torch.device("cpu"), seconds=0.1, rounds=3)


def test_a_rank_that_is_late_is_drift(ranks: RankPool) -> None:
    """One of four all-reduces of a step waits 0.2 s for it on the other rank: 0.025 s on average. What was computed
    before each is between 1 ms and 1 s."""
    late, mine = ranks.run(2, drift_with_a_late_rank, 0.2), ranks.run(2, drift_with_a_late_rank, 0.0)
    assert late[0] == late[1] and mine[0] == mine[1]
    assert 0 <= mine[0] < late[0]
    assert 0.025 < late[0] < 0.8


def test_factors_are_medians_and_never_a_gain() -> None:
    rounds = [Round(1.0, 10.0, awaited, 0.5, beside, 9.0) for beside, awaited in ((1.5, 40.0), (3.0, 20.0), (2.0, 5.0))]
    assert summary(rounds) == {
        "compute": 2.0,
        "communication": 1.0,
        "together": 0.5,
        "step_s": 1.0,
        "all_reduce_s": 10.0,
        "hand_over_s": 0.5,
        "rounds": 3,
        "spread_pct": pytest.approx(37.5),
    }


def measured(rate_bytes_per_s: float, compute: float, world_size: int = 2, **changes: object) -> Measured:
    """With an all-reduce that reached this rate."""
    payload = 16 * 2**20
    seconds = 2 * (world_size - 1) / world_size * payload / rate_bytes_per_s
    values = {
        "payload_bytes": payload,
        "hand_over_s": 5e-5,
        "drift": 0.01,
        "world_size": world_size,
        "backend": "gloo",
        "device": "cpu",
        "device_name": cpu_name(),
        "link_bits_per_s": rate_bytes_per_s * 8,
        "compute": compute,
        "communication": 2 * compute,
        "together": compute / 10,
        "step_s": 0.01,
        "all_reduce_s": seconds,
        "rounds": 3,
        "spread_pct": 1.0,
        "host": "here",
        "date": "2026-11-22",
    }
    return Measured(**{**values, **changes})  # type: ignore[arg-type]


def test_measurements_are_kept_and_found_by_rate(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "c.json"
    for each in (measured(1e9, 3.0), measured(1e7, 9.0), measured(1e7, 1.0), measured(1e8, 1.5, world_size=4)):
        contention.keep(path, each)

    def at(link: str, ranks: int = 2) -> float:
        found = contention.load(path, hardware.cluster(f"{ranks}xcpu", link)).beside(2**20)
        assert found.communication == pytest.approx(2 * found.compute) and found.hand_over_s == 5e-5
        assert found.together == pytest.approx(found.compute / 10)
        return found.compute

    assert at("1mbit") == 1.0  # the later one of the same rate
    assert at("100gbit") == 3.0
    assert 1.0 < at("500mbit") < at("1gbit") < 3.0
    assert at("1gbit", 4) == 1.5


def test_small_messages_have_factors_of_their_own(tmp_path: Path) -> None:
    """At two rates; the small ones reach less than the link's rate, which goes by the large ones."""
    path = tmp_path / "c.json"
    for rate, large, small in ((1e8, 1.5, 2.0), (1e9, 2.5, 4.0)):
        contention.keep(path, measured(rate, large))
        contention.keep(path, measured(rate, small, payload_bytes=2**16, hand_over_s=1e-4, all_reduce_s=1e-3))
    found = contention.load(path, hardware.cluster("2xcpu", "100gbit"))
    assert [found.beside(2.0**power).compute for power in (0, 16, 20, 24, 30)] == pytest.approx([4, 4, 3.25, 2.5, 2.5])
    assert found.beside(2**20).hand_over_s == pytest.approx(7.5e-5)
    assert contention.load(path, hardware.cluster("2xcpu", "1mbit")).beside(2**16).compute == 2.0


def test_ranks_that_take_turns_are_late_by_waves(tmp_path: Path) -> None:
    """Four ranks on two cores: two end after 1, two after 2, on average 1.5; on one core after 1, 2, 3 and 4, on three
    after 1, 1, 1 and 2."""
    path = tmp_path / "c.json"
    contention.keep(path, measured(1e9, 2.0, world_size=4))
    cluster, found = hardware.cluster("4xcpu", "1gbit"), []
    for cores in (1, 2, 3, 4, 64):
        with mock.patch("os.cpu_count", lambda cores=cores: cores):
            found.append(contention.load(path, cluster).beside(1.0))
    assert [each.drift for each in found] == pytest.approx([0.01] * 5)
    assert [each.most_late for each in found] == pytest.approx([1.5 / 2.5, 0.5 / 1.5, 0.75 / 1.25, 1.0, 1.0])


def test_a_gpu_computes_while_its_host_hands_over(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    contention.keep(path, measured(1e9, 2.0, backend="nccl", device="cuda", device_name="NVIDIA L4"))
    assert contention.load(path, hardware.cluster("2xL4", "pcie4")).beside(2**20).hand_over_s == 0.0


def test_a_measurement_of_another_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    contention.keep(path, measured(1e9, 2.0, device_name="Another CPU"))
    with pytest.raises(UserError, match="measured on Another CPU, not on "):
        contention.load(path, hardware.cluster("2xcpu", "loopback"))


@pytest.mark.parametrize(("gpus", "backend"), [("3xcpu", "gloo"), ("2xL4", "nccl")])
def test_no_measurement_of_that_kind(tmp_path: Path, gpus: str, backend: str) -> None:
    path = tmp_path / "c.json"
    contention.keep(path, measured(1e9, 2.0))
    with pytest.raises(UserError, match=f"{backend} with {gpus[0]} ranks.*nproc_per_node={gpus[0]}"):
        contention.load(path, hardware.cluster(gpus, "pcie4"))


def test_without_a_file_contention_is_assumed_on_gpus_alone(tmp_path: Path) -> None:
    """A mean that others have published, said so in the plan; a measurement takes its place."""
    on_gpus, on_cpu = hardware.cluster("2xL4", "pcie4"), hardware.cluster("2xcpu", "100gbit")
    assumed, said = contention_of(None, on_gpus)
    assert (assumed.beside(1.0).compute, assumed.beside(1.0).communication) == (1.189, 1.0)
    assert "1.19 times as long" in said and "arXiv 2507.03114" in said
    assert contention_of(None, on_cpu) == (Contention(), "")
    path = tmp_path / "contention.json"
    contention.keep(path, measured(1e9, 2.0))
    found, said = contention_of(path, on_cpu)
    assert found.beside(2**20).compute == 2.0 and said.endswith(f"by {path}.")


@pytest.mark.parametrize(
    "text", [None, "", "[]", "{}", '{"what": "contention", "schema_version": 1, "measured": [{"a": 1}]}']
)
def test_files_that_hold_no_contention(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=str(path)):
        contention.load(path, hardware.cluster("2xcpu", "loopback"))
    if text is not None:
        with pytest.raises(UserError, match=str(path)):
            contention.keep(path, measured(1e9, 2.0))


def test_flags_and_fields_are_documented() -> None:
    docs = Path(__file__).parents[2] / "docs"
    section = (docs / "command-line.md").read_text().split("## `benchmarks/contention.py`")[1].split("\n## ")[0]
    flags = [action.option_strings[-1] for action in benchmark.build_parser()._actions]
    assert re.findall(r"^\| `(--[^`]+)` \|", section, re.MULTILINE) == [flag for flag in flags if flag != "--help"]
    table = (docs / "planner-costs.md").read_text().split("| field of each entry in `measured` |")[1]
    first_cells = re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)
    documented = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert documented == [field.name for field in dataclasses.fields(Measured)]

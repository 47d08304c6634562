"""A window ends only when no collective is in flight: its end would write into memory that the profiler has freed."""

import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.loop import train
from ddp_lab.runtime.profiling.profiler import WindowProfiler
from ddp_lab.strategy.batches import StepData
from tests.checkpoints import here
from tests.models import build, make_batch
from tests.parity import NAMES, OPTIMIZERS, load, options_of
from tests.ranks import RankPool
from tests.tables import by_default, each_row

LATE_S = 0.1
WINDOW_ENDS = (3, 6)
HOOK_ID = 4_242


def unfinished_at_window_end(choice: str) -> list[int]:
    """How many collectives are in flight when each window ends, if the last rank is late with its update."""
    strategy = load(choice)(build("llama"), OPTIMIZERS["adam"], options_of(choice))
    update, is_late = strategy.update, dist.get_rank() == dist.get_world_size() - 1

    def update_late():
        time.sleep(LATE_S if is_late and strategy.optimizer_steps + 1 in WINDOW_ENDS else 0)
        update()

    works: list[dist.Work] = []

    def keep(call):
        if call.name.name != "REDUCE_SCATTER_BASE":  # Gloo's handle of it never says that it is completed
            works.append(call.work)

    unfinished: list[int] = []
    stop_trace = profile.stop_trace

    def observed_stop(profiler: profile):
        unfinished.append(sum(not work.is_completed() for work in works))
        stop_trace(profiler)

    config = RunConfig(profile_wait=1, profile_warmup=1, profile_active=1, profile_repeat=2)
    group = dist.group.WORLD
    assert group is not None
    group.register_post_hook(HOOK_ID, keep)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(strategy, "update", update_late),
            patch.object(profile, "stop_trace", observed_stop),
            WindowProfiler(config, Path(folder), "run", here(), strategy.finish_parameter_synchronization) as profiler,
        ):
            train(strategy, [StepData(4, [make_batch("llama", 2, 0)])] * 7, profiler)
    finally:
        group.unregister_post_hook(HOOK_ID)
    strategy.finish_parameter_synchronization()
    assert works
    return unfinished


@pytest.mark.parametrize(
    "choice",
    by_default(NAMES, "bucket_ddp_async", "pytorch_ddp", "zero1", "zero3"),
)
def test_nothing_is_in_flight_when_a_window_ends(ranks: RankPool, choice):
    assert ranks.run(2, unfinished_at_window_end, choice) == [[0, 0], [0, 0]]


def steps_of_traces(folder: Path) -> list[int]:
    return sorted(int(path.name.split(".step")[1].split(".")[0]) for path in folder.glob("run.*"))


@each_row("wait, settling, expected", [(1, 5, [6, 9]), (4, 5, [6, 12])])
def test_steps_in_which_a_strategy_settles_are_not_profiled(tmp_path, wait, settling, expected):
    """Windows of one step each, after `wait` steps and one of warm-up; none before the strategy has settled."""
    config = RunConfig(
        choice="x", profile_wait=wait, profile_warmup=1, profile_active=1, profile_repeat=2, max_steps=expected[-1]
    )
    ranks = RankContext(0, 1, torch.device("cpu"), "gloo")
    with WindowProfiler(config, tmp_path, "run", ranks, lambda: None, settling) as profiler:
        for _ in range(expected[-1]):
            profiler.step()
    assert steps_of_traces(tmp_path) == expected and config.profile_steps(settling) == expected[-1]
    assert config.fitted(expected[-1], settling) == (config, "")


@each_row(
    "settings, steps, settling, expected",
    [
        ({}, 3, 0, (0, 1, 2, 1)),
        ({}, 7, 5, (4, 1, 2, 1)),
        ({"profile_repeat": 3}, 17, 0, (4, 1, 3, 2)),
        ({"profile_repeat": 3}, 9, 0, (4, 1, 3, 1)),
        ({}, 0, 0, None),
    ],
)
def test_windows_shrink_to_the_run(settings, steps, settling, expected):
    """Wait, warm-up, steps and number of windows; None: there is no profile."""
    config, note = RunConfig(**settings).fitted(steps, settling)
    if expected is None:
        assert config.no_profile and "none is left to profile" in note
        return
    schedule = config.profile_wait, config.profile_warmup, config.profile_active, config.profile_repeat
    assert (
        schedule == expected and config.profile_steps(settling) <= steps and f"--profile-repeat {schedule[-1]}" in note
    )

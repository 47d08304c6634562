"""The collectives that a strategy announces are those that run: counted in the profile, by kind, number and bytes."""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ddp_lab.analysis.traces.collectives import gloo_collectives, sent_bytes
from ddp_lab.analysis.traces.reading import read_trace
from tests.models import make_batch
from tests.parity import Case, built, one_step, strategy_of
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import received_over_tcp

Totals = dict[str, tuple[int, int, float]]


def profiled_step(case: Case) -> tuple[Totals, Totals]:
    """Totals (calls, bytes, bytes that are sent) by kind of the third step: announced, and in the trace."""
    with strategy_of(case) as strategy:
        for step in range(3):
            if step == 2:
                strategy.finish_parameter_synchronization()  # of the step before
                profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
                profiler.start()
            one_step(strategy, [make_batch(case.model, 3, 10 * step + index) for index in range(2)])
        strategy.finish_parameter_synchronization()
        dist.barrier()
        profiler.stop()
        parts = strategy.expected_traffic(2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        seen = gloo_collectives(read_trace(path).events, dist.get_world_size())[0]
    announced: Totals = {}
    for collective in parts:
        calls, size, sent = announced.get(collective.kind, (0, 0, 0.0))
        sent = round(sent + collective.wire_bytes, 2)
        announced[collective.kind] = (calls + collective.count, size + collective.payload_bytes, sent)
    calls = seen[seen["kind"] != "barrier"].assign(sent=sent_bytes).groupby("kind")[["bytes", "sent"]]
    found = {kind: (len(of), int(of["bytes"].sum()), round(of["sent"].sum(), 2)) for kind, of in calls}
    return announced, found


@each_row("case", [Case("simple_ddp", "odd"), Case("zero3", "normed", "dp=3"), Case("pytorch_zero3", "frozen")])
def test_a_trace_shows_what_is_announced(ranks: RankPool, case):
    """By Gloo's events in it. That all choices issue what they announce, `test_parity.py` shows."""
    for announced, seen in ranks.run(case.of.size, profiled_step, case):
        assert announced == seen


LAYERS, WIDTH, MICRO_BATCHES = 4, 252, 2


class Wide(torch.nn.Module):
    """So wide that what Gloo says beside the data is little."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=x.square().mean())


def what_arrives(choice: str) -> tuple[float, float, float]:
    """Of a step: bytes that arrived here, that a rank sends as announced, and of all parameters."""
    strategy = built(choice, Wide())
    nbytes = 4.0 * LAYERS * WIDTH * (WIDTH + 1)
    for _ in range(2):
        dist.barrier()
        before = received_over_tcp()
        strategy.zero_grad()
        strategy.forward_backward([{"x": torch.ones(2, WIDTH)}] * MICRO_BATCHES)
        strategy.step()
        strategy.finish_parameter_synchronization()
        dist.barrier()
    sent = sum(part.wire_bytes for part in strategy.expected_traffic(MICRO_BATCHES))
    return received_over_tcp() - before, sent, nbytes


@each_row("world_size", [2, 3])
def test_what_is_announced_is_sent(ranks: RankPool, world_size):
    """By the formulas of docs/how-it-works, and as the operating system counts it. `zero3` gathers its last unit once a
    micro-batch. Torch's reduce-scatter over Gloo is an all-reduce."""
    formulas = {"zero1": 2, "zero2": MICRO_BATCHES + 1, "zero3": MICRO_BATCHES * (3 - 1 / LAYERS)}
    for name, formula in (formulas | {"pytorch_zero3": MICRO_BATCHES * 3}).items():
        found = ranks.run(world_size, what_arrives, name)
        arrived, sent, whole = (sum(each) / world_size for each in zip(*found, strict=True))
        share = (world_size - 1) / world_size * whole
        assert sent / share == pytest.approx(formula, rel=2e-3), name
        over_gloo = formula + MICRO_BATCHES * (name == "pytorch_zero3")
        assert arrived / share == pytest.approx(over_gloo, rel=0.01), name

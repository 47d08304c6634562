"""In which order batches are copied and waited for: the streams of a pretended device write down what is asked."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch

from ddp_lab.runtime.data.batches import copied_ahead
from ddp_lab.strategy.batches import StepData


class PretendedStream:
    """Of copies, or the current one."""

    def __init__(self, log, name):
        self._log, self.name, self._events = log, name, 0

    def record_event(self):
        self._log.append(f"copied {self._events}")
        self._events += 1
        return f"copied {self._events - 1}"

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log():
    noted = []
    plain_to = torch.Tensor.to

    def to(tensor, device, non_blocking=False):
        assert non_blocking, "the host would wait"
        return plain_to(tensor, "cpu")

    with (
        mock.patch("torch.cuda.Stream", lambda device: PretendedStream(noted, "copies")),
        mock.patch("torch.cuda.stream", lambda stream: nullcontext()),
        mock.patch("torch.cuda.current_stream", lambda: PretendedStream(noted, "compute")),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: noted.append("pinned") or tensor),
        mock.patch.object(torch.Tensor, "to", to),
        mock.patch.object(torch.Tensor, "record_stream", lambda _, stream: noted.append(f"used on {stream.name}")),
    ):
        yield noted


def test_a_batch_is_copied_while_the_one_before_is_used(log):
    steps = [StepData(4, [{"x": torch.full((2,), float(step))}]) for step in range(3)]
    arrived = []
    for number, step in enumerate(copied_ahead(steps, torch.device("cuda", 0))):
        log.append(f"step {number}")
        arrived.append((step.samples, step.micro_batches[0]["x"][0].item()))
    assert arrived == [(4, 0.0), (4, 1.0), (4, 2.0)]
    ready = ["compute waits for copied {}", "used on compute", "step {}"]
    copied = ["pinned", "copied {}"]
    order = [(copied, 0), (copied, 1), (ready, 0), (copied, 2), (ready, 1), (ready, 2)]
    assert log == [line.format(number) for lines, number in order for line in lines]

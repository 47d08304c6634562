"""Each part of a model waits for its own parameters, just before it runs."""

import torch
from torch import nn
from torch.nn import functional

from ddp_lab.strategy.modules import find_blocks
from sharding.options.arrivals import Arrivals
from tests.tables import each_row


class LoggingModel(nn.Module):
    """Notes what runs. `offset` lies beside the blocks, in no part; `head` is perhaps not called."""

    def __init__(self, log, calls_head=True):
        super().__init__()
        self.log, self.calls_head = log, calls_head
        self.embedding = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.offset = nn.Parameter(torch.zeros(2))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        x = self.embedding(x) + self.offset
        for index, block in enumerate(self.blocks):
            self.log.append(f"before block {index}")
            x = block(x)
        self.log.append("before head")
        return self.head(x) if self.calls_head else functional.linear(x, self.head.weight)


class Flat:
    """Stands for a flat parameter, and for its gather under way."""

    def __init__(self, name, parameter, log):
        self.name, self.parameters, self.log = name, [parameter], log

    def wait(self):
        self.log.append(f"wait for {self.name}")


def started(model):
    """The `Arrivals` of `model` after a first forward pass; gathers of all parameters are under way."""
    flats = [Flat(name, p, model.log) for name, p in model.named_parameters() if "bias" not in name]
    arrivals = Arrivals(model, find_blocks(model), flats)
    model(torch.ones(1, 2))
    model.log.clear()
    for flat in flats:
        arrivals.start(flat, flat)
    return arrivals


@each_row("is_training", [True, False])
def test_each_part_waits_for_its_own(is_training):
    log = []
    model = LoggingModel(log)
    started(model)
    with torch.set_grad_enabled(is_training):
        model(torch.ones(1, 2))
    assert log == [
        "wait for offset",
        "wait for embedding.weight",
        "before block 0",
        "wait for blocks.0.weight",
        "before block 1",
        "wait for blocks.1.weight",
        "before head",
        "wait for head.weight",
    ]
    log.clear()
    model(torch.ones(1, 2))
    assert log == ["before block 0", "before block 1", "before head"], "nothing is on its way any more"


def test_weights_of_a_module_that_is_not_called_are_waited_for_at_once():
    log = []
    model = LoggingModel(log, calls_head=False)
    started(model)
    model(torch.ones(1, 2))
    assert log[:2] == ["wait for offset", "wait for head.weight"] and log[-1] == "before head"

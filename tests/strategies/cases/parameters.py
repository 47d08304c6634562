"""Parameters that are made, shared or laid out in an unusual way; buffers."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.strategies.cases.case import FEATURES, LoopCase, Run, Samples, squared_error


def layers(*inner: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), *inner, nn.Tanh(), nn.Linear(8, 1))


def in_blocks(make) -> nn.Sequential:
    """Two of them in a list, so that sharding sees blocks."""
    return layers(nn.Sequential(make(), make()))


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(8, 8))


class Many(nn.Module):
    """Hundreds of parameters of one element, and some without a dimension."""

    def __init__(self):
        super().__init__()
        self.tiny = nn.ParameterList(nn.Parameter(torch.randn(1)) for _ in range(250))
        self.scalars = nn.ParameterDict({f"s{index}": nn.Parameter(torch.randn(())) for index in range(20)})
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.cat(list(self.tiny)).tanh().mean() + torch.stack(list(self.scalars.values())).mean()
        return self.last(x * total)


class Mixed(nn.Module):
    """Blocks in fp64 between layers in fp32, and a scale in bf16."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).double()
        for block in self.blocks:
            hidden = torch.tanh(block(hidden)) * self.scale
        return self.last(hidden.float())


class Shared(nn.Module):
    """Blocks that share one bias, two that share all, and an embedding that is the head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.again = nn.ModuleList([self.blocks[2], nn.Linear(8, 8)])
        self.head.weight = self.embedding.weight
        self.blocks[1].bias = self.blocks[0].bias

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding((5 * x.abs()).long() % 12).mean(1)
        for block in (*self.blocks, *self.again):
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(hidden).mean(1, keepdim=True)


class ReadsOthers(nn.Module):
    """Reads the weights of layers that it does not call."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.uncalled, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = functional.linear(x, self.uncalled.weight, self.uncalled.bias) + block(x)
        return self.last(x)


class ReadsBlocks(ReadsOthers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(self.blocks[0](x), self.blocks[1].weight) + self.uncalled(x))


class Image(nn.Module):
    """Convolutions whose weights lie in channels-last order, and a weight that is a transposed view."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last) for _ in range(2))
        self.weight = nn.Parameter(torch.randn(4, 4).t())
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolution(torch.outer(x[0], x.flatten()[:18]).view(x.size(0), 3, 3, 3))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden.mean((2, 3)) @ self.weight)


class Views(nn.Module):
    """Two parameters over one memory, the old way to tie: a weight, and the same transposed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES)
        self.last.weight.data = self.first.weight.data.t()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))).mean(1, keepdim=True)


class Counts(nn.Module):
    """Buffers that forward replaces, changes in place, and does not save."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            self.count += 1
        return self.last(torch.tanh(hidden - self.mean) * self.scale)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def switch(run: Run, module: nn.Module, step: int):
    """Trains with the statistics as they are in step 1; evaluates before step 2."""
    module.train(step != 1)
    if step == 2:
        module.eval()
        with torch.no_grad():
            run(torch.ones(3, FEATURES))
        module.train()


def evaluates_with_graph(run: Run, module: nn.Module, step: int):
    """Runs forward with a graph in evaluation, which changes no statistics."""
    module.eval()
    run(torch.ones(3, FEATURES))
    module.train()


def penalty_in_forward(run: Run, batch: Samples) -> Tensor:
    prediction, penalty = run(batch.x)
    return functional.mse_loss(prediction, batch.y) + 0.01 * penalty


def penalty_outside(run: Run, batch: Samples) -> Tensor:
    module = getattr(run, "module", run)
    return squared_error(run, batch) + 0.01 * sum(p.square().sum() for p in module.parameters())


class Penalized(nn.Module):
    """Answers with a penalty on its own weights, and one of them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(torch.tanh(self.first(x))) * self.scale, self.scale


CASES = {
    "weight norm in blocks": LoopCase(lambda: in_blocks(weight_norm)),
    "hundreds of tiny parameters": LoopCase(Many),
    "parameters of several dtypes": LoopCase(Mixed),
    "parameters shared between modules": LoopCase(Shared),
    "weights of a layer that is not called": LoopCase(ReadsOthers),
    "weights of another block": LoopCase(ReadsBlocks, unused=True),
    "two parameters over one memory": LoopCase(Views),
    "channels last, and a transposed weight": LoopCase(Image),
    "buffers replaced in forward": LoopCase(Counts, before=switch),
    "BatchNorm": LoopCase(normed, micro_batches=2),
    "BatchNorm, between training and evaluation": LoopCase(normed, before=switch),
    "BatchNorm, evaluated with a graph before the optimizer": LoopCase(
        normed, before=switch, between=evaluates_with_graph
    ),
    "a parameter as an output": LoopCase(Penalized, penalty_in_forward),
    "a penalty outside of forward": LoopCase(layers, penalty_outside, in_evaluation=False),
}

"""Loops by hand whose ranks share a loss, a layer, statistics or stages. Runs inside ranks."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as seen_by_autograd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, silu

from ddp_lab.parity import watch
from tests.parity_tool.by_hand import Sum

SAMPLES, WIDTH, STEPS = 8, 16, 3


class Part(nn.Module):
    """What a rank has. `loss` is that of the rank's samples, so that the average over ranks is that of the batch."""

    shares_samples = False
    """All ranks have all samples."""

    def __init__(self, fault: str):
        super().__init__()
        self.fault, self.rank, self.ranks = fault, dist.get_rank(), dist.get_world_size()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, x: Tensor) -> Tensor:
        loss: Tensor = (self(x) - x.roll(1, -1)).square().mean()
        return loss


class Towers(Part):
    """Each query is scored against the passages of all ranks."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.last(x.flip(-1))

    def loss(self, x: Tensor) -> Tensor:
        query, passage = self(x)
        if self.ranks > 1 and self.fault:
            parts = [torch.empty_like(passage) for _ in range(self.ranks)]
            dist.all_gather(parts, passage.detach())
            parts[self.rank] = passage
        else:
            parts = seen_by_autograd.all_gather(passage) if self.ranks > 1 else [passage]
        return cross_entropy(query @ torch.cat(list(parts)).T, torch.arange(len(x)) + self.rank * len(x))


class Term(Part):
    """A term of the loss for an even load of two experts, which the model answers with."""

    def __init__(self, fault: str):
        super().__init__(fault)
        self.gate, self.second = nn.Linear(WIDTH, 2, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        scores = self.gate(hidden).softmax(-1)
        took = scores > 0.5
        count, rows = took.double().sum(0), torch.tensor(float(len(x)))
        dist.all_reduce(count)
        dist.all_reduce(rows)
        mean = scores.sum(0) / (rows if self.fault else len(x))
        mixed = sum((scores * took)[:, i : i + 1] * expert(hidden) for i, expert in enumerate((self.last, self.second)))
        return mixed, 2 * (count.float() / rows * mean).sum()

    def loss(self, x: Tensor) -> Tensor:
        mixed, term = self(x)
        loss: Tensor = (mixed - x.roll(1, -1)).square().mean() + 0.1 * term
        return loss


class Statistics(Part):
    """Statistics of the samples of all ranks."""

    def __init__(self, fault: str):
        super().__init__(fault)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden, count = self.first(x), SAMPLES
        mean = seen_by_autograd.all_reduce(hidden.sum(0)) / count
        var = seen_by_autograd.all_reduce((hidden - mean).square().sum(0)) / count
        self.running_mean.lerp_(mean.detach(), 0.1)
        self.running_var.lerp_(var.detach() * (1 if self.fault else count / (count - 1)), 0.1)
        return self.last((hidden - mean) / (var + 1e-5).sqrt())


class Fused(Part):
    """A gate and what it multiplies are one weight, of which each rank has some rows."""

    shares_samples = True

    def __init__(self, fault: str):
        super().__init__(fault)
        self.gate_up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        halves = [self.gate_up.weight] if fault == "fused" and self.ranks > 1 else self.gate_up.weight.chunk(2)
        rows = [half.detach().chunk(self.ranks)[self.rank] for half in halves]
        self.gate_up.weight = nn.Parameter(torch.cat(rows))
        self.down.weight = nn.Parameter(self.down.weight.detach().chunk(self.ranks, 1)[self.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        gate, up = self.gate_up(Sum.apply(hidden, False)).chunk(2, -1)
        return self.last(hidden + Sum.apply(self.down(silu(gate) * up), True))


class Adapter(Part):
    """The adapter's second factor is 0 at the start, and with it the gradient of the first."""

    def __init__(self, fault: str):
        super().__init__(fault)
        self.a, self.b = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        return self.last(self.first(x) + self.b(self.a(x)))


class Stages(Part):
    """Two stages of a pipeline, with a weight in both."""

    shares_samples = True

    def __init__(self, fault: str):
        super().__init__(fault)
        self.tied = nn.Linear(WIDTH, WIDTH + 1, bias=False)
        if self.ranks > 1:
            del self.last, self.first
            setattr(self, ("first", "last")[self.rank], nn.Linear(WIDTH, WIDTH))
            torch.manual_seed(7)
            self.load_state_dict(Part("").state_dict() | self.tied.state_dict(prefix="tied."), strict=False)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "first"):
            x = self.first(linear(linear(x, self.tied.weight), self.tied.weight.T))
        return linear(self.last(x), self.tied.weight) if hasattr(self, "last") else x

    def step(self, x: Tensor):
        """Forward and backward of both stages."""
        if self.ranks == 1:
            self(x).square().mean().backward()
        elif self.rank == 0:
            hidden = self(x)
            dist.send(hidden.detach(), 1)
            gradient = torch.empty_like(hidden)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(len(x), WIDTH)
            dist.recv(hidden, 0)
            hidden.requires_grad_()
            self(hidden).square().mean().backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, 0)
        if not self.fault:
            dist.all_reduce(self.tied.weight.grad)


def clip(model: Part, most: float):
    """By the norm of the whole model. All ranks have the same biases and the same first and last layer."""
    norm = torch.zeros(())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        alike = model.ranks if model.fault != "replicas" and name.startswith(("first", "last")) else 1
        norm += parameter.grad.square().sum() / alike
    dist.all_reduce(norm)
    for parameter in model.parameters():
        parameter.grad *= most / norm.sqrt()  # type: ignore[operator]


PARTS: dict[str, type[Part]] = {cls.__name__.lower(): cls for cls in (Towers, Term, Statistics, Fused, Adapter, Stages)}


def train(folder: Path, of: str, fault: str = "", clips: float = 0.0, rounding: bool = False, **_):
    torch.manual_seed(7)
    model = PARTS[of](fault)
    if fault == "cast parameters":
        model.bfloat16()
    recorder = watch(model, folder, steps=STEPS, another_rounding=rounding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
        if fault == "repeats":
            x = torch.cat([x, x[:2]])
        if fault == "own batches":
            x = x + model.rank
        if isinstance(model, Stages):
            model.step(x)
        else:
            size = 1 if model.shares_samples or fault == "own batches" else model.ranks
            model.loss(x.chunk(size)[model.rank % size]).backward()
            for parameter in model.parameters() if size > 1 else ():
                dist.all_reduce(parameter.grad)
                parameter.grad /= size  # type: ignore[operator]
        if clips:
            clip(model, clips)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()

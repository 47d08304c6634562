"""A loop without a wrapper, around a model without biases that its ranks cut by hand. Runs inside ranks."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

from ddp_lab.parity import watch

SAMPLES, LENGTH, WORDS, WIDTH, STEPS = 8, 6, 11, 16, 3


class Sum(torch.autograd.Function):
    """Sums over ranks, either forward or backward."""

    @staticmethod
    def forward(context, tensor: Tensor, is_forward: bool) -> Tensor:
        context.is_forward = is_forward
        return Sum.of(tensor) if is_forward else tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient if context.is_forward else Sum.of(gradient), None

    @staticmethod
    def of(tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total


class CutNet(nn.Module):
    """`cut`: `tp`, where each rank has some columns of `up` and rows of `down`; or `tokens`, or nothing."""

    def __init__(self, cut: str, fault: str, bias: bool, frozen: bool):
        super().__init__()
        self.cut, self.fault = cut, fault
        self.embed, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.last = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=bias)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("rate", torch.rand(WIDTH))
        self.register_buffer("average", self.head.weight.detach().clone())
        self.embed.requires_grad_(not frozen)
        self.place.requires_grad_(not frozen)
        if fault == "cast buffer":
            self.rate.copy_(self.rate.bfloat16())
        if cut == "tp":
            rank, ranks = dist.get_rank(), dist.get_world_size()
            self.up.weight = nn.Parameter(self.up.weight.detach().chunk(ranks)[rank].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach().chunk(ranks, dim=1)[rank].clone())

    def forward(self, words: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(words) + self.place(position_ids) * self.rate
        if self.fault == "reentrant":
            return self.head(self.last(hidden + checkpoint(self.inner, hidden, use_reentrant=True)))
        return self.head(self.last(hidden + self.inner(hidden)))

    def inner(self, hidden: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        if self.cut == "tp" and self.fault != "no sum backward":
            hidden = Sum.apply(hidden, False)
        hidden = self.down(gelu(self.up(hidden)))
        return Sum.apply(hidden, True) if self.cut == "tp" and self.fault != "no sum forward" else hidden


def train(
    folder: Path,
    cut: str,
    fault: str = "",
    micro_batches: int = 1,
    bias: bool = False,
    frozen: bool = False,
    clips: float = 0.0,
    rounding: bool = False,
):
    torch.manual_seed(7)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = CutNet(cut if ranks > 1 else "", fault, bias, frozen)
    recorder = watch(model, folder, steps=STEPS, another_rounding=rounding)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    scale = 1024.0 if fault == "clips scaled" else 1.0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        words, labels = (torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
        start = 0
        if cut == "tokens":
            words, labels = (tensor.chunk(ranks, dim=1)[rank].clone() for tensor in (words, labels))
            start = {"positions": 0, "others' positions": ranks - 1 - rank}.get(fault, rank) * words.shape[1]
            if fault == "labels":
                labels[:, -1] = -100
        elif not cut:
            words, labels = (tensor.chunk(ranks)[rank] for tensor in (words, labels))
        for inputs, targets in zip(words.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            if fault == "zero between":
                optimizer.zero_grad()
            scores = model(inputs, position_ids=torch.arange(start, start + inputs.shape[1]))
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten()) / micro_batches
            (loss * scale / (1 if cut == "tp" else ranks)).backward()
            if fault == "average":
                model.average.lerp_(model.head.weight.detach(), 0.1)
            if fault == "sums each micro-batch":
                add_over_ranks(parameters)
        if cut != "tp" and fault != "sums each micro-batch":
            add_over_ranks(parameters)
        if clips:
            nn.utils.clip_grad_norm_(parameters, clips)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= scale
        optimizer.step()
        if fault != "average":
            model.average.lerp_(model.head.weight.detach(), 0.1)
        optimizer.zero_grad()
    recorder.close()


def add_over_ranks(parameters: list[nn.Parameter]):
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)

"""A training loop as people write it, right or with one of their faults. Runs inside ranks (`tests.ranks`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy

from ddp_lab.parity import watch
from tests.parity_tool import by_hand, parts

SAMPLES, LENGTH, WORDS, WIDTH = 8, 6, 11, 16
STEPS = 3


class Net(nn.Module):
    """A small language model with most of what goes wrong in it."""

    def __init__(self, dropout: float = 0.0, tied: bool = True, counts: bool = False, more_words: int = 0):
        super().__init__()
        self.embed = nn.Embedding(WORDS + more_words, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS + more_words)
        if tied:
            self.head.weight = self.embed.weight
        self.counts = counts
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.embed(words)
        if self.counts and self.training:
            hidden = hidden - self.mean
            self.mean.lerp_(hidden.detach().mean((0, 1)), 0.5)
        return self.head(self.norm(hidden + self.dropout(self.inner(hidden))))


def data(step: int, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Words and labels of a global batch. `padded`: later samples are shorter, so that ranks have fewer labels."""
    generator = torch.Generator().manual_seed(step)
    words, labels = (torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
    if padded:
        for sample in range(SAMPLES):
            labels[sample, LENGTH - sample * (LENGTH - 1) // (SAMPLES - 1) :] = -100
    return words, labels


def train(folder: Path, wrapper: str = "none", fault: str = "", micro_batches: int = 1, **how):
    """Train three steps, and record them."""
    if "of" in how:
        parts.train(folder, fault=fault, **how)
    elif "cut" in how:
        by_hand.train(folder, fault=fault, micro_batches=micro_batches, **how)
    else:
        Loop(wrapper, fault, micro_batches, **how).run(folder)


class Loop:
    """One run. Attributes that start with `is_` or `with_` say what it has."""

    def __init__(
        self,
        wrapper: str,
        fault: str,
        micro_batches: int,
        optimizer: str = "adam",
        dropout: float = 0.0,
        counts: bool = False,
        padded: bool = False,
        clips: float = 0.0,
        clips_by_hand: float = 0.0,
        autocast: bool = False,
        checkpoint: bool = False,
        rounding: bool = False,
        hook: bool = False,
        broadcasts: bool = True,
    ):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.wrapper, self.fault, self.micro_batches = wrapper, fault, micro_batches
        self.padded, self.clips, self.autocast, self.rounding = padded, clips, autocast, rounding
        self.clips_by_hand = clips if fault == "clips shards" else clips_by_hand
        torch.manual_seed(7 + self.rank if fault == "other start" else 7)
        net = Net(dropout, tied=fault != "untied", counts=counts, more_words=3 * (fault == "more words"))
        if fault == "untied":
            net.head.weight.data.copy_(net.embed.weight.data)
        if checkpoint:
            inner = net.inner
            net.inner = Checkpointed(inner)  # type: ignore[assignment]
        if fault == "frozen":
            net.norm.weight.requires_grad_(False)
        if hook:
            net.norm.weight.register_hook(lambda gradient: gradient * 0.5)
        self.net, self.model = net, self.wrapped(net, broadcasts)
        parameters = self.early if fault == "optimizer first" else self.groups()
        rate = 1e-2 * (self.ranks if fault == "rate twice" else 1)
        if fault == "rate of a rank" and self.rank == 1:
            rate *= 3
        kinds = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD, "zero": torch.optim.AdamW}
        numbers = {"lr": rate, "weight_decay": 0.1 if fault == "decay" else 0.0}
        self.sends = optimizer.endswith(" by hand")
        if optimizer == "zero" and self.ranks > 1:
            self.optimizer: Any = ZeroRedundancyOptimizer(parameters, kinds["adam"], **numbers)
        else:
            parameters = parameters[self.rank :: self.ranks] if self.sends else parameters
            self.optimizer = kinds[optimizer.removesuffix(" by hand")](parameters, **numbers)
        torch.manual_seed(7 if fault == "equal seeds" else 7 + self.rank)
        self.delayed: list[Tensor] = []

    def groups(self) -> list[Any]:
        return list(self.model.parameters())

    def wrapped(self, net: Net, broadcasts: bool) -> nn.Module:
        self.early = list(net.parameters())
        if self.wrapper == "ddp":
            return nn.parallel.DistributedDataParallel(net, broadcast_buffers=broadcasts)
        if self.wrapper == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.ranks,))
            fully_shard(net.inner, mesh=mesh)
            return fully_shard(net, mesh=mesh)
        return net

    def run(self, folder: Path):
        recorder = watch(self.model, folder, steps=STEPS, another_rounding=self.rounding)
        try:
            for step in range(STEPS):
                self.step(step)
        finally:
            recorder.close()

    # One step ---------------------------------------------------------------------------------------------------------

    def step(self, step: int):
        self.number = step
        if self.fault == "eval mode":
            self.model.eval()
        words, labels = self.samples(step)
        counted = [self.labels_of(part) for part in labels.chunk(self.micro_batches)]
        total = torch.tensor(float(sum(counted)))
        dist.all_reduce(total)
        for number, (inputs, targets) in enumerate(
            zip(words.chunk(self.micro_batches), labels.chunk(self.micro_batches), strict=True)
        ):
            is_last = number == self.micro_batches - 1
            with self.synchronizing(is_last), self.precision():
                model = self.net if self.fault == "bare module" else self.model
                loss = cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
                self.scaled(loss, counted[number], float(total)).backward()
            if self.fault == "zero between" and not is_last:
                self.optimizer.zero_grad()
        self.reduce()
        if self.fault == "late":
            self.one_step_late()
        if self.clips and self.fault not in ("clips first", "clips shards"):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clips)
        if self.clips_by_hand:
            self.clip_by_hand()
        self.optimizer.step()
        if self.sends and self.fault != "not sent":  # each parameter's owner has updated it
            for number, parameter in enumerate(self.groups()):
                dist.broadcast(parameter.data, number % self.ranks)
        if self.fault == "rate each micro-batch":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9**self.micro_batches
        else:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
        if self.fault != "no zero_grad":
            self.model.zero_grad()

    def samples(self, step: int) -> tuple[Tensor, Tensor]:
        words, labels = data(step, self.padded)
        if self.fault == "sampler without rank":
            return words[: SAMPLES // self.ranks], labels[: SAMPLES // self.ranks]
        order = torch.arange(SAMPLES)
        if self.fault == "other shuffle":
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(5 * self.rank + step))
        if self.fault == "other data":
            words, labels = data(step + 100, self.padded)
        if self.fault == "drops last":
            order = order[:-2]
        indices = order.chunk(self.ranks)[self.rank]
        return words[indices], labels[indices]

    def labels_of(self, labels: Tensor) -> int:
        return int((labels != -100).sum())

    def scaled(self, loss: Tensor, counted: int, total: float) -> Tensor:
        """The loss to run backward from: the reduction averages over ranks."""
        if self.fault == "mean of means":
            return loss / self.micro_batches
        weight = counted * self.ranks / total
        if self.fault == "not divided":
            weight *= self.micro_batches
        if self.fault == "divided by ranks" or (self.fault == "short window" and self.number == STEPS - 1):
            weight /= self.ranks
        if self.fault == "still scaled":
            weight *= 1024
        return loss * weight

    @contextmanager
    def synchronizing(self, is_last: bool) -> Iterator[None]:
        off = not is_last or self.fault in ("no_sync at last", "clips first")
        if self.wrapper == "ddp" and off:
            with self.model.no_sync():  # type: ignore[operator]
                yield
        else:
            yield

    def precision(self):
        flips = self.fault == "autocast"
        return torch.autocast("cpu", torch.bfloat16) if self.autocast != flips else nullcontext()

    def reduce(self):
        """What the wrapper does not."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if self.fault == "clips first":
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clips)
        if (self.wrapper == "none" and self.ranks > 1) or self.fault == "clips first":
            for gradient in gradients:
                self.average(gradient)
        if self.fault == "compresses":
            for gradient in gradients:
                gradient.copy_(gradient.bfloat16())
        if self.fault == "sum on top":
            for gradient in gradients:
                dist.all_reduce(gradient)

    def average(self, gradient: Tensor):
        if self.fault == "group of some":
            if not hasattr(self, "pairs"):
                self.pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            dist.all_reduce(gradient, group=self.pairs[self.rank // 2])
            gradient /= 2
        else:
            dist.all_reduce(gradient)
            gradient /= self.ranks

    def clip_by_hand(self):
        """By the norm of what all ranks hold; with faults, of what a rank holds, or of every other gradient."""
        gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in self.model.parameters()]
        normed = gradients[self.rank :: 2] if self.fault == "norm of some" else gradients
        square = torch.stack([gradient.square().sum() for gradient in normed]).sum()
        if self.wrapper == "fsdp" and not self.fault:
            dist.all_reduce(square)
        for gradient in gradients:
            gradient *= min(1.0, self.clips_by_hand / float(square.sqrt()))

    def one_step_late(self):
        now = [parameter.grad.clone() for parameter in self.model.parameters()]  # type: ignore[union-attr]
        for parameter, before in zip(self.model.parameters(), self.delayed or now, strict=True):
            parameter.grad.copy_(before)  # type: ignore[union-attr]
        self.delayed = now


class Checkpointed(nn.Module):
    """Runs its module again in backward."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._checkpoint_wrapped_module = module

    def forward(self, hidden: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self._checkpoint_wrapped_module, hidden, use_reentrant=False)


Train = Callable[..., None]

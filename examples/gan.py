"""Two models in one process, each with a strategy: a generator learns to make points on a circle.

    torchrun --standalone --nproc_per_node=2 examples/gan.py bucket_ddp_async zero3

The generator's loss runs backward through the discriminator. What that adds to the discriminator's gradients is outside
of its own `micro_batch`, so nothing is sent for it, and `zero_grad` forgets it.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import ddp_lab

dist.init_process_group("gloo")
torch.manual_seed(0)
generator_choice, discriminator_choice = sys.argv[1:3] if len(sys.argv) > 2 else ("bucket_ddp_async", "zero3")


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.9))


def circle(count: int) -> Tensor:
    angle = 2 * torch.pi * torch.rand(count)
    return torch.stack([angle.cos(), angle.sin()], 1)


generator = ddp_lab.load(generator_choice)(network(8, 2), adam)
discriminator = ddp_lab.load(discriminator_choice)(network(2, 1), adam)
torch.manual_seed(1 + dist.get_rank())  # each rank draws points of its own
real, fake = torch.ones(64, 1), torch.zeros(64, 1)

for _ in range(400):
    with discriminator.micro_batch():
        made = generator(torch.randn(64, 8)).detach()
        loss = cross_entropy(discriminator(circle(64)), real) + cross_entropy(discriminator(made), fake)
        loss.backward()
    discriminator.step()
    discriminator.zero_grad()

    with generator.micro_batch():
        cross_entropy(discriminator(generator(torch.randn(64, 8))), real).backward()
    generator.step()
    generator.zero_grad()
    discriminator.zero_grad()

with torch.no_grad():
    radius = generator(torch.randn(256, 8)).norm(dim=1)
if dist.get_rank() == 0:
    print(
        f"made points have a radius of {radius.mean():.2f} +- {radius.std():.2f}; those on the circle have 1",
        flush=True,
    )
dist.destroy_process_group()

"""A training loop of your own, with any strategy.

    torchrun --standalone --nproc_per_node=2 examples/plain_loop.py zero3

A line that one process would not have, or would have in another form, ends in `# ddp-lab`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_lab

has_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
if has_gpu:
    torch.cuda.set_device(device)  # ddp-lab
dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")  # ddp-lab

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
inputs = torch.randn(512, 16)
data = TensorDataset(inputs, inputs[:, :4].argmax(1))
loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))  # ddp-lab

choice = sys.argv[1] if len(sys.argv) > 1 else "bucket_ddp_async"
if dist.get_rank() == 0:
    print(f"{choice}: {dist.get_world_size()} ranks on {device.type}", flush=True)
strategy = ddp_lab.load(choice)(model, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))  # ddp-lab
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(strategy.optimizer, T_max=40)

for epoch in range(5):
    loader.sampler.set_epoch(epoch)  # ddp-lab
    for index, (x, y) in enumerate(loader):
        is_last = index % 4 == 3  # four micro-batches make a step
        with strategy.micro_batch(last=is_last):  # ddp-lab
            loss = nn.functional.cross_entropy(strategy(x.to(device)), y.to(device)) / 4
            loss.backward()
        if is_last:
            strategy.clip_grad_norm_(1.0)
            strategy.step()
            strategy.zero_grad()
            scheduler.step()
    if dist.get_rank() == 0:
        print(f"{choice}: epoch {epoch}, loss {4 * loss.item():.3f}", flush=True)

weights = strategy.full_state_dict()  # whole, on rank 0
if dist.get_rank() == 0:
    torch.save(weights, "model.pt")
dist.destroy_process_group()

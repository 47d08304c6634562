"""A fine-tuning script in the style of Hugging Face's examples, turned over to ddp-lab.

    torchrun --standalone --nproc_per_node=2 examples/fine_tune.py --choice zero3 --output-dir tuned

Nine lines are new or replaced; they end in `# ddp-lab`. Elsewhere `strategy` stands in the place of model, optimizer
and clipping. Model and data are small and made here; put yours in their place.
"""

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForSequenceClassification, LlamaConfig, get_scheduler

import ddp_lab  # ddp-lab

parser = argparse.ArgumentParser()
parser.add_argument("--choice", default="bucket_ddp_async")  # ddp-lab
parser.add_argument("--output-dir", default="tuned")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--gradient-accumulation-steps", type=int, default=2)
args = parser.parse_args()

dist.init_process_group("gloo")  # ddp-lab
torch.manual_seed(0)
model = AutoModelForSequenceClassification.from_config(
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        num_labels=2,
        pad_token_id=0,
        use_cache=False,
    )
)
tokens = torch.randint(1, 100, (1024, 16))
samples = [{"input_ids": row, "labels": (row == 7).any().long()} for row in tokens]
for index, sample in enumerate(samples):
    if index % 2:
        sample["input_ids"][index % 16], sample["labels"] = 7, torch.tensor(1)
train, held_out = samples[:768], samples[768:]


def groups(module: torch.nn.Module) -> list[dict]:
    """Weight decay for matrices alone."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if "norm" not in name], "weight_decay": 0.01},
        {"params": [p for name, p in named if "norm" in name], "weight_decay": 0.0},
    ]


loader = DataLoader(train, batch_size=8, sampler=DistributedSampler(train))  # ddp-lab
strategy = ddp_lab.load(args.choice)(  # ddp-lab
    model, lambda params: torch.optim.AdamW(params, lr=2e-3), ddp_lab.StrategyOptions(parameter_groups=groups)
)
steps = args.epochs * len(loader) // args.gradient_accumulation_steps
scheduler = get_scheduler("linear", strategy.optimizer, num_warmup_steps=10, num_training_steps=steps)

steps_done = 0
for epoch in range(args.epochs):
    model.train()
    for batch in loader:
        steps_done += 1
        is_last = steps_done % args.gradient_accumulation_steps == 0
        with strategy.micro_batch(last=is_last):  # ddp-lab
            loss = strategy(**batch).loss / args.gradient_accumulation_steps
            loss.backward()
        if is_last:
            strategy.clip_grad_norm_(1.0)
            strategy.step()
            scheduler.step()
            strategy.zero_grad()

    model.eval()
    counts = torch.zeros(2)
    for batch in DataLoader(held_out, batch_size=8, sampler=DistributedSampler(held_out, shuffle=False)):
        with torch.no_grad():
            right = strategy(**batch).logits.argmax(-1) == batch["labels"]
        counts += torch.tensor([right.sum(), len(right)])
    dist.all_reduce(counts)  # ddp-lab
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: accuracy {counts[0] / counts[1]:.1%} of {int(counts[1])} held-out samples", flush=True)

state = strategy.full_state_dict()  # ddp-lab
if dist.get_rank() == 0:
    model.save_pretrained(args.output_dir, state_dict=state)
dist.destroy_process_group()  # ddp-lab

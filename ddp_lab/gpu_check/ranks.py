"""What the parts run on every rank:  torchrun ... ddp_lab/gpu_check/ranks.py WHAT [--backend nccl] [--choices a,b]

Rank 0 prints what was found as one line of JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ddp_lab.runtime.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddp
import sharding
from ddp_lab.gpu_check.host_waits import HostWaits
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data import copies
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.distributed import Ranks, joined_ranks
from ddp_lab.runtime.loop import Unwatched, train
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.interface import Strategy
from ddp_lab.strategy.options import StrategyOptions
from tests.models import build, make_batch

MODEL, SAMPLES, STEPS = "llama", 3, 4
REGISTRIES = (ddp.REGISTRY, sharding.REGISTRY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(FINDERS))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--share-gpu", action="store_true")
    parser.add_argument("--choices", help="default: all that are installed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")  # images may set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    read_no_masks()
    names = [name for registry in REGISTRIES for name in registry.names if not name.startswith("deepspeed")]
    with joined_ranks(RunConfig(backend=options.backend, share_gpu=options.share_gpu, timeout_minutes=2.0)) as ranks:
        found = FINDERS[options.what](options.choices.split(",") if options.choices else names, ranks)
        if ranks.is_main:
            print(json.dumps(found), flush=True)


def make(name: str, module: nn.Module) -> Strategy:
    """A choice with AdamW. Buckets hold a few parameters each, as those of a large model do."""
    registry = next(registry for registry in REGISTRIES if name in registry.names)
    in_buckets = name in ("bucket_ddp_async", "baseline")
    options = StrategyOptions(bucket_cap_mb=0.01) if in_buckets else StrategyOptions()
    return registry.load(name)(module, make_optimizer, options)


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def batch_of(step: int, rank: int, index: int = 0) -> dict[str, Tensor]:
    """A micro-batch on the CPU."""
    return make_batch(MODEL, SAMPLES, 1000 * step + 10 * index + rank)


def steps_of(ranks: Ranks, count: int, micro_batches: int = 1) -> Iterator[StepData]:
    """This rank's micro-batches of so many steps, copied to the device as those of a run."""
    plain = (
        StepData(
            SAMPLES * ranks.world_size * micro_batches, [batch_of(step, ranks.rank, i) for i in range(micro_batches)]
        )
        for step in range(count)
    )
    return copies.copied_ahead(plain, ranks.device)


def backend(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """The class that carries tensors of the device."""
    group = dist.group.WORLD
    assert group is not None
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if ranks.device.type == "cuda" else ""
    return {"class": type(group._get_backend(ranks.device)).__name__, "nccl": nccl}


def parity(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """By choice: the largest difference of a parameter to training in one process, over the largest parameter."""
    oracle = build(MODEL).to(ranks.device)
    optimizer = make_optimizer(oracle.parameters())
    for step in range(STEPS):
        batches = [copies.to_device(batch_of(step, rank), ranks.device) for rank in range(ranks.world_size)]
        optimizer.zero_grad()
        oracle(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).loss.backward()
        optimizer.step()
    wanted = {name: tensor.cpu() for name, tensor in oracle.state_dict().items()}

    def difference(name: str) -> float:
        strategy = make(name, build(MODEL).to(ranks.device))
        train(strategy, steps_of(ranks, STEPS), Unwatched(), None, lambda result: None)
        state = strategy.full_state_dict()
        pairs = [(state[key].float(), tensor.float()) for key, tensor in wanted.items() if key in state]
        worst = [((own - right).abs().max() / right.abs().max()).item() for own, right in pairs if right.any()]
        return max(worst, default=0.0)

    return each(names, difference)


def waits(names: list[str], ranks: Ranks, is_planted: bool = False) -> dict[str, Any]:
    """By choice: calls of settled steps that make the host wait for the device, and where they are."""

    def places(name: str) -> dict[str, int]:
        strategy = make(name, build(MODEL).to(ranks.device))
        if is_planted:
            strategy.module.register_forward_hook(read_loss)
        with HostWaits(ranks.device) as counter:
            train(strategy, steps_of(ranks, counter.steps, micro_batches=2), counter, 1.0, lambda result: None)
        return counter.found

    return each(names, places)


def read_loss(module: nn.Module, inputs: Any, outputs: Any) -> None:
    outputs.loss.item()


def planted_wait(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """The same with a model that reads its loss in each forward pass."""
    return waits(names, ranks, is_planted=True)


def steps(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """By choice: the loss after a few steps, for tools that watch from outside."""

    def loss(name: str) -> float | None:
        strategy = make(name, build(MODEL).to(ranks.device))
        return train(strategy, steps_of(ranks, STEPS), Unwatched(), 1.0, lambda result: None).loss[-1]

    return each(names, loss)


def race(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """The same with a race: no stream waits for a batch to arrive. So that nothing breaks, the host does, by a call
    that orders no streams for a tool that watches."""

    def unordered(step: StepData, arrived: torch.cuda.Event) -> StepData:
        while not arrived.query():
            time.sleep(1e-4)
        return step

    with mock.patch.object(copies, "received", unordered):
        return steps(names, ranks)


def each(names: list[str], find: Callable[[str], Any]) -> dict[str, Any]:
    """What `find` answers for each choice, or its error as text: an error of all ranks stops no other choice."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = find(name)
        except Exception as error:  # the sanitizer's is a plain one
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


FINDERS = {
    "backend": backend,
    "parity": parity,
    "waits": waits,
    "planted_wait": planted_wait,
    "steps": steps,
    "race": race,
}


if __name__ == "__main__":
    main()

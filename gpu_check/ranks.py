"""What the parts run on every rank:  torchrun ... gpu_check/ranks.py WHAT [--backend nccl] [--choices a,b]

Rank 0 prints what was found as one line of JSON.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.process.environment import prepare_process

if __name__ == "__main__":
    prepare_process()

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ddp
import sharding
from tests.models import build, make_batch
from training.config import RunConfig, StrategyOptions
from training.data.copies import to_device
from training.distributed import Ranks, joined_ranks
from training.loop import Unwatched, train
from training.strategy import Strategy

MODEL, SAMPLES, STEPS, SETTLED = "llama", 3, 4, 7
REGISTRIES = (ddp.REGISTRY, sharding.REGISTRY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=sorted(FINDERS))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--choices", help="default: all that are installed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for registry in REGISTRIES for name in registry.names if not name.startswith("deepspeed")]
    with joined_ranks(RunConfig(backend=options.backend, timeout_minutes=2.0)) as ranks:
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


def batches_of(step: int, ranks: Ranks) -> list[dict[str, Tensor]]:
    """Of every rank, on this rank's device."""
    return [to_device(make_batch(MODEL, SAMPLES, 100 * step + rank), ranks.device) for rank in range(ranks.world_size)]


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
        batches = batches_of(step, ranks)
        optimizer.zero_grad()
        oracle(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).loss.backward()
        optimizer.step()
    wanted = {name: tensor.cpu() for name, tensor in oracle.state_dict().items()}

    def difference(name: str) -> float:
        strategy = make(name, build(MODEL).to(ranks.device))
        steps = [(SAMPLES * ranks.world_size, [batches_of(step, ranks)[ranks.rank]]) for step in range(STEPS)]
        train(strategy, steps, Unwatched(), None, lambda result: None)
        state = strategy.full_state_dict()
        pairs = [(state[key].float(), tensor.float()) for key, tensor in wanted.items() if key in state]
        worst = [((own - right).abs().max() / right.abs().max()).item() for own, right in pairs if right.any()]
        return max(worst, default=0.0)

    return each(names, difference)


def waits(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """By choice: calls of a settled step that make the host wait for the device, and where they are."""

    def places(name: str) -> dict[str, int]:
        strategy = make(name, build(MODEL).to(ranks.device))
        step = (SAMPLES * ranks.world_size, [batches_of(0, ranks)[ranks.rank]])
        train(strategy, [step] * SETTLED, Unwatched(), None, lambda result: None)
        found: dict[str, int] = {}

        def note(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
            if "synchroniz" in str(message):
                place = f"{Path(filename).name}:{line}"
                found[place] = found.get(place, 0) + 1

        if ranks.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = note  # type: ignore[assignment]
                strategy.zero_grad()
                strategy.forward_backward(step[1])
                strategy.step()
        finally:
            if ranks.device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        strategy.require_finite()
        return found

    return each(names, places)


def steps(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """By choice: the loss after a few steps, for tools that watch from outside."""

    def loss(name: str) -> float:
        strategy = make(name, build(MODEL).to(ranks.device))
        todo = [(SAMPLES * ranks.world_size, [batches_of(step, ranks)[ranks.rank]]) for step in range(STEPS)]
        return train(strategy, todo, Unwatched(), 1.0, lambda result: None).loss[-1]

    return each(names, loss)


def each(names: list[str], find: Callable[[str], Any]) -> dict[str, Any]:
    """What `find` answers for each choice, or its error as text: an error of all ranks stops no other choice."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = find(name)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return found


FINDERS = {"backend": backend, "parity": parity, "waits": waits, "steps": steps}


if __name__ == "__main__":
    main()

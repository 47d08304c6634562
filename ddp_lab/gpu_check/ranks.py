"""What the parts run on every rank:  torchrun ... ddp_lab/gpu_check/ranks.py WHAT [--backend nccl] [--choices a,b]

Rank 0 prints what was found as one line of JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
import tensor_parallel
from ddp_lab.gpu_check.host_waits import HostWaits
from ddp_lab.gpu_check.parts import STAGES, pipelines
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data import batches as own_batches
from ddp_lab.runtime.data.masks import read_no_masks
from ddp_lab.runtime.distributed import Ranks, joined_ranks, meshed
from ddp_lab.runtime.loop import Unwatched, train
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.strategy import Strategy
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
        names += pipelines(ranks.world_size, options.share_gpu)
        found = FINDERS[options.what](options.choices.split(",") if options.choices else names, ranks)
        if ranks.is_main:
            print(json.dumps(found), flush=True)


@contextmanager
def made(name: str, ranks: Ranks) -> Iterator[Strategy]:
    """A choice with AdamW. Buckets hold a few parameters each, as those of a large model do."""
    module = build(model_of(name)).to(ranks.device)
    choice, _, schedule = name.partition(STAGES)
    if not schedule:
        registry = next(registry for registry in REGISTRIES if name in registry.names)
        in_buckets = name in ("bucket_ddp_async", "baseline")
        options = StrategyOptions(bucket_cap_mb=0.01) if in_buckets else StrategyOptions()
        yield registry.load(name)(module, make_optimizer, options)
        return
    mesh, per_rank = f"dp={ranks.world_size // 2},pp=2", 2 if schedule == "interleaved" else 1
    config = RunConfig.of(choice=choice, mesh=mesh, pipeline_schedule=schedule, stages_per_rank=per_rank)
    with meshed(ranks, mesh) as placed:
        assert placed.groups is not None, "there is a mesh"
        parts = tensor_parallel.REGISTRY.load_parallelize(choice)(module, config, placed.groups, ranks.device)
        options = StrategyOptions(model_parallel=parts)
        yield tensor_parallel.load(choice).in_stages()(module, make_optimizer, options, placed.groups.data)


def model_of(name: str) -> str:
    """One with enough blocks for all stages."""
    return "deep" if STAGES in name else MODEL


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def batch_of(model: str, step: int, rank: int, index: int = 0) -> dict[str, Tensor]:
    """A micro-batch on the CPU."""
    return make_batch(model, SAMPLES, 1000 * step + 10 * index + rank)


def steps_of(name: str, ranks: Ranks, count: int, micro_batches: int = 1) -> Iterator[StepData]:
    """This rank's micro-batches of so many steps, copied to the device as those of a run. Stages of a pipeline have
    those of all its ranks."""
    first, model = ranks.rank // 2 * 2, model_of(name)
    members = (first, first + 1) if STAGES in name else (ranks.rank,)
    plain = (
        StepData(
            SAMPLES * ranks.world_size * micro_batches,
            [batch_of(model, step, rank, index) for rank in members for index in range(micro_batches)],
        )
        for step in range(count)
    )
    return own_batches.copied_ahead(plain, ranks.device)


def backend(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """The class that carries tensors of the device."""
    group = dist.group.WORLD
    assert group is not None
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if ranks.device.type == "cuda" else ""
    return {"class": type(group._get_backend(ranks.device)).__name__, "nccl": nccl}


def parity(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """By choice: the largest difference of a parameter to training in one process, over the largest parameter."""
    wanted = {model: trained_alone(model, ranks) for model in dict.fromkeys(map(model_of, names))}

    def difference(name: str) -> float:
        with made(name, ranks) as strategy:
            train(strategy, steps_of(name, ranks, STEPS), Unwatched(), None, lambda result: None)
            state = strategy.full_state_dict()
        alone = wanted[model_of(name)].items()
        pairs = [(state[key].float(), tensor.float()) for key, tensor in alone if key in state]
        worst = [((own - right).abs().max() / right.abs().max()).item() for own, right in pairs if right.any()]
        return max(worst, default=0.0)

    return each(names, difference)


def trained_alone(model: str, ranks: Ranks) -> dict[str, Tensor]:
    """The state of a model that one process has trained on the batches of all ranks."""
    oracle = build(model).to(ranks.device)
    optimizer = make_optimizer(oracle.parameters())
    for step in range(STEPS):
        batches = [own_batches.to_device(batch_of(model, step, rank), ranks.device) for rank in range(ranks.world_size)]
        optimizer.zero_grad()
        oracle(**{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).loss.backward()
        optimizer.step()
    return {name: tensor.cpu() for name, tensor in oracle.state_dict().items()}


def waits(names: list[str], ranks: Ranks, is_planted: bool = False) -> dict[str, Any]:
    """By choice: calls of settled steps that make the host wait for the device, and where they are."""

    def places(name: str) -> dict[str, int]:
        with made(name, ranks) as strategy, HostWaits(ranks.device) as counter:
            if is_planted:
                strategy.module.register_forward_hook(read_loss)
            train(strategy, steps_of(name, ranks, counter.steps, micro_batches=2), counter, 1.0, lambda result: None)
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
        with made(name, ranks) as strategy:
            return train(strategy, steps_of(name, ranks, STEPS), Unwatched(), 1.0, lambda result: None).loss[-1]

    return each(names, loss)


def race(names: list[str], ranks: Ranks) -> dict[str, Any]:
    """The same with a race: no stream waits for a batch to arrive. So that nothing breaks, the host does, by a call
    that orders no streams for a tool that watches."""

    def unordered(step: StepData, arrived: torch.cuda.Event) -> StepData:
        while not arrived.query():
            time.sleep(1e-4)
        return step

    with mock.patch.object(own_batches, "received", unordered):
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

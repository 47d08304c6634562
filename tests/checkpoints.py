"""Runs that stop and resume, inside ranks (`tests.ranks`), of a model with everything that has to be saved."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.build import learning_rates, seed_everything
from ddp_lab.runtime.checkpoint.manifest import checkpoints_in
from ddp_lab.runtime.checkpoint.session import Checkpoints
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.distributed import RankContext
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.loop import TrainingResult, train
from ddp_lab.runtime.mesh import Mesh
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.options import AUTO
from ddp_lab.strategy.strategy import Strategy
from tests.models import FEATURES, answer, batch, build
from tests.parity import load

SAMPLES = 24
"""In a global batch. They divide among 1 to 4 ranks with two micro-batches each."""


class Everything(nn.Module):
    """Frozen parameters, sizes that do not divide, a single number, running statistics, and dropout."""

    def __init__(self, dropout: float):
        super().__init__()
        self.first = nn.Linear(FEATURES, 11)
        self.norm = nn.BatchNorm1d(11, momentum=0.3, affine=False)
        self.blocks = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(11, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        hidden = self.first(x)
        self.norm(hidden.detach())  # only for its statistics, since its output depends on how samples are divided
        for block in self.blocks:
            hidden = torch.tanh(block(self.dropout(hidden)))
        return answer(self.last(hidden) * self.scale, y)


def here(mesh: Mesh | None = None) -> RankContext:
    """This process among the ranks of a run on CPU."""
    groups: Any = mesh and SimpleNamespace(mesh=mesh)
    return RankContext(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo", groups)


def make_strategy(choice: str, seed: int, model: str | None, dropout: float) -> Strategy:
    torch.manual_seed(seed)
    module = build(model, seed) if model else Everything(dropout)
    return load(choice)(module, lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True))


def steps(first: int, last: int) -> Iterator[StepData]:
    """Each step has the same samples for any number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        global_batch = batch(SAMPLES, step)
        local_batch = {name: tensor[rank::size] for name, tensor in global_batch.items()}
        half = SAMPLES // size // 2
        yield StepData(SAMPLES, [{n: t[i * half : (i + 1) * half] for n, t in local_batch.items()} for i in range(2)])


def train_to(
    choice: str,
    last: int,
    folder: Path | None = None,
    dropout: float = 0.0,
    model: str | None = None,
    asks_in_step: int | None = None,
    planned: int | None = None,
    **changes,
) -> tuple[Strategy, TrainingResult]:
    """Train a new strategy up to step `last`. It saves into `folder`, if there is one; `resume` is that of a run.

    Args:
        asks_in_step: From this step on, the last rank asks all ranks to stop.
        planned: Steps of the whole run. Default: `last`.
    """
    saving = {"checkpoint_every": 2, "checkpoint_dir": str(folder)} if folder else {}
    config = RunConfig.of(**{"choice": choice, "lr": 1e-2, "workload": "mlp", **saving, **changes})
    checkpoints = Checkpoints(config, here(), "a run", {})
    checkpoints.require_steps_left(last)
    strategy = make_strategy(choice, 17 * checkpoints.step, model, dropout)
    if asks_in_step is not None and dist.get_rank() == dist.get_world_size() - 1:
        strategy.wants_to_stop = lambda: strategy.optimizer_steps >= asks_in_step
    seed_everything(config.seed, dist.get_rank())
    earlier = checkpoints.begin(strategy, config, SAMPLES, last, lambda: next(steps(0, 1)).micro_batches)
    rates = learning_rates(config, planned or last)
    try:
        todo = steps(checkpoints.step, last)
        settings = {"earlier": earlier, "is_due": checkpoints.is_due, "learning_rate": rates}
        result = train(strategy, todo, on_step=checkpoints.after_step, **settings)
        checkpoints.finish()
    finally:
        checkpoints.close()
    return strategy, result


def fingerprints(strategy: Strategy, result: TrainingResult) -> dict[str, str]:
    """A digest of each tensor on which a rank's next steps depend, and of the losses."""
    losses = torch.tensor(result.loss, dtype=torch.float64)
    tensors: dict[str, Any] = {"random": torch.get_rng_state(), "losses": losses}
    strategy.finish_parameter_synchronization()
    for piece in strategy.parameter_pieces():
        tensors[f"{piece.name} {piece.start}"] = strategy.on_this_rank(piece.tensor)
    for piece in strategy.updated_pieces():
        for name, value in strategy.updating_optimizer.state[piece.tensor].items():
            tensors[f"{name} of {piece.name} {piece.start}"] = strategy.on_this_rank(value)
    tensors |= dict(strategy.module.named_buffers())
    return {name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def straight_and_stopped(choice: str, folder: Path, in_background: bool) -> list[dict[str, str]]:
    """Fingerprints after 4 steps: without a stop, with one after step 2, and with another seed."""
    straight = fingerprints(*train_to(choice, 4, dropout=0.5))
    train_to(choice, 2, folder, dropout=0.5, checkpoint_async=in_background)
    stopped = fingerprints(*train_to(choice, 4, folder, dropout=0.5, resume="latest", checkpoint_async=in_background))
    other_seed = fingerprints(*train_to(choice, 4, dropout=0.5, seed=1))
    return [straight, stopped, other_seed]


def straight_and_asked_to_stop(choice: str, folder: Path) -> tuple[dict, dict, int, int]:
    """8 steps without a stop, and 8 with a stop that one rank asks for in step 3.

    Returns:
        The fingerprints of both; the number of steps before the stop, and the step of the checkpoint.
    """
    straight = fingerprints(*train_to(choice, 8, dropout=0.5))
    changes = {"dropout": 0.5, "checkpoint_every": 100}
    strategy, result = train_to(choice, 8, folder, asks_in_step=3, resume=AUTO, **changes)  # no checkpoint yet
    assert strategy.steps.stops_after == len(result.loss) == strategy.optimizer_steps
    saved = checkpoints_in(folder)
    return straight, fingerprints(*train_to(choice, 8, folder, resume=AUTO, **changes)), len(result.loss), saved[0][0]


def losses(
    choice: str, last: int, folder: Path | None, resume: str | None = None, model: str | None = None
) -> list[float]:
    return train_to(choice, last, folder, resume=resume, model=model)[1].loss


def error_of(choice: str, last: int, folder: Path | None, changes: dict[str, Any]) -> str:
    """The message for the user; empty if there is none."""
    try:
        train_to(choice, last, folder, **changes)
    except UserError as error:
        return str(error)
    return ""

"""The oracle of all parity tests: plain training in one process on the whole global batch, and the comparison with it.

Functions here run inside ranks (`tests.ranks`). Each global batch is a list (by rank) of lists (of micro-batch sizes),
so that a test can state how unevenly samples are split.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ddp
import ddp_lab
import sharding
from ddp_lab.runtime.errors import UnsupportedError
from ddp_lab.strategy.interface import Strategy
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.precision import DTYPES, autocast, bring_to
from ddp_lab.strategy.registry import Registry
from tests.models import BRANCHES, build, make_batch
from tests.ranks import RankPool
from tests.tables import each_row

Choice = tuple[str, str]
Split = Sequence[Sequence[int]]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
TOLERANCE = {"sgd": 1e-6, "adam": 1e-5}
"""Relative, of parameters after three steps (TRAPS: Adam magnifies rounding)."""
GRADIENT_TOLERANCE = 1e-6

REFUSALS = {
    ("pytorch_zero1", "odd"): "ZeroRedundancyOptimizer only supports using the same dense type for all parameters",
    **{(f"pytorch_zero{n}", "odd"): "FSDP2 cannot reduce the gradient of empty, which has no elements" for n in (2, 3)},
    **{(f"deepspeed_zero{n}", "odd"): "DeepSpeed takes no 0-d parameters" for n in (1, 2, 3)},
    **{(f"deepspeed_zero{n}", "branching"): "DeepSpeed updates unused parameters as if they had" for n in (1, 2, 3)},
}
"""(choice, model) that the choice cannot train, and what it says to that when it is built, or in the first step."""


def all_choices() -> list[Choice]:
    """(family, name) of every registered strategy, pytest's parameters; one that both families list, once."""
    replicated = [("ddp", name) for name in ddp.CHOICES]
    known = {ddp.REGISTRY.location(name) for name in ddp.CHOICES}
    sharded = [("sharding", name) for name in sharding.CHOICES if sharding.REGISTRY.location(name) not in known]
    return replicated + sharded


for_each_choice = pytest.mark.parametrize("choice", all_choices(), ids="-".join)
over_choices = each_row("choice", all_choices())
IN_OWN_LOOPS = [choice for choice in all_choices() if not choice[1].startswith("deepspeed")]
"""Those that run in loops that are not the runner's."""
in_own_loops = pytest.mark.parametrize("choice", IN_OWN_LOOPS, ids="-".join)
over_own_loops = each_row("choice", IN_OWN_LOOPS)


def load(choice: Choice) -> type[Strategy]:
    registries: dict[str, Registry] = {"ddp": ddp.REGISTRY, "sharding": sharding.REGISTRY}
    return registries[choice[0]].load(choice[1])


def options_of(choice: Choice, **given: Any) -> StrategyOptions:
    """What `given` says. Small models have one bucket, unless it says otherwise."""
    whole = {"bucket_cap_mb": 25.0} if choice[1] in ("bucket_ddp_async", "baseline") else {}
    return StrategyOptions(**whole | given)


def is_refused(ranks: RankPool, choice: Choice, model: str) -> bool:
    """Whether `choice` is listed as not supporting `model`; then it must say so on every rank, or the test fails."""
    wanted = REFUSALS.get((choice[1], model.partition(",")[0]))
    if wanted is not None:
        for message in ranks.run(2, message_of, UnsupportedError, build_and_step, choice, model):
            assert wanted in message
    return wanted is not None


def build_and_step(
    choice: Choice, model: str = "plain", options: StrategyOptions | None = None, optimizer: str = "sgd"
) -> Strategy:
    strategy = load(choice)(build(model), OPTIMIZERS[optimizer], options or options_of(choice))
    strategy.forward_backward([make_batch(model, 2, 0)])
    strategy.step()
    return strategy


def message_of(kind: type[Exception], function: Callable[..., Any], *args: Any) -> str:
    """What `function(*args)` says when it raises a `kind`, as it must."""
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


@contextmanager
def naming(what: object) -> Iterator[None]:
    """A failure within this context says `what` was tried."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"tried: {what}")
        raise


def check_messages(ranks: RankPool, world_size: int, function: Callable[..., dict[str, str]], *args: Any) -> None:
    """Each rank's `function(*args)` returns messages by what they must contain."""
    for said in ranks.run(world_size, function, *args):
        for wanted, message in said.items():
            assert wanted in message, message


def one_step(strategy: Strategy, batches: list[dict[str, Tensor]]) -> Tensor:
    strategy.zero_grad()
    loss = strategy.forward_backward(batches)
    strategy.step()
    return loss


def saved_halfway(
    options: dict[str, Any], choice: Choice, model: str, folder: Path, optimizer: str = "adam"
) -> dict[str, Tensor]:
    """The state after four steps; `folder` gets a checkpoint after the second."""
    strategy = load(choice)(build(model), OPTIMIZERS[optimizer], options_of(choice, **options))
    for step in range(4):
        if step == 2:
            ddp_lab.save_checkpoint(strategy, folder)
        one_step(strategy, [make_batch(model, 2, step)])
    return strategy.full_state_dict()


def gone_on(
    options: dict[str, Any], choice: Choice, model: str, folder: Path, optimizer: str = "adam"
) -> dict[str, Tensor]:
    """The state after the last two of these steps, from the checkpoint on."""
    strategy = load(choice)(build(model, seed=3), OPTIMIZERS[optimizer], options_of(choice, **options))
    ddp_lab.load_checkpoint(strategy, folder)
    for step in (2, 3):
        one_step(strategy, [make_batch(model, 2, step)])
    return strategy.full_state_dict()


def weight_decay_groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups: vectors without decay, at half the learning rate; the rest with decay."""
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    others = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    return [{"params": vectors, "weight_decay": 0.0, "lr": 0.005}, {"params": others, "weight_decay": 0.3}]


def global_batch(model: str, split: Split, step: int) -> list[list[dict[str, Tensor]]]:
    """The micro-batches of every rank in a step; sample values depend on step, rank and position alone."""
    batches = [
        [make_batch(model, size, 1000 * step + 100 * rank + index) for index, size in enumerate(sizes)]
        for rank, sizes in enumerate(split)
    ]
    for sign, of_rank in zip(BRANCHES.get(model, ()), batches, strict=False):
        for micro in of_rank:
            micro["x"][:, 0] = micro["x"][:, 0].abs() * sign
    return batches


def joined(batches: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """All samples of a global batch as one batch."""
    flat = [micro for of_rank in batches for micro in of_rank if len(next(iter(micro.values())))]
    return {name: torch.cat([micro[name] for micro in flat]) for name in flat[0]}


def oracle(
    model: str,
    steps: Sequence[Split],
    optimizer: str = "sgd",
    clip: float | None = None,
    groups: bool = False,
    precision: str = "fp32",
    param_dtype: str | None = None,
    state: dict[str, Tensor] | None = None,
    first_step: int = 0,
) -> dict[str, Any]:
    """Single-process training: `loss`, `norm` (clipped) and `grad_norm` by step, `gradients` of the first step, `state`
    after the last."""
    module = build(model)
    if state:
        module.load_state_dict(state)
    bring_to(module, precision)
    params = weight_decay_groups(module) if groups else [p for p in module.parameters() if p.requires_grad]
    optim = OPTIMIZERS[optimizer](params)
    result: dict[str, Any] = {"loss": [], "norm": [], "grad_norm": [], "gradients": {}}
    for index, split in enumerate(steps):
        optim.zero_grad()
        samples = joined(global_batch(model, split, first_step + index))
        with autocast("cpu", precision):
            loss = backward_in(DTYPES[param_dtype], module, samples) if param_dtype else module(**samples).loss
        if not param_dtype:
            loss.backward()
        trained = [p for p in module.parameters() if p.requires_grad]
        result["grad_norm"].append(
            torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None]).item()
        )
        if clip is not None:
            result["norm"].append(torch.nn.utils.clip_grad_norm_(trained, clip).item())
        if index == 0:
            result["gradients"] = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        optim.step()
        result["loss"].append(loss.item())
    result["state"] = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return result


def backward_in(dtype: torch.dtype, module: torch.nn.Module, samples: dict[str, Tensor]) -> Tensor:
    """The loss, and gradients in the parameters' own dtype, of a copy whose parameters and inputs are in `dtype`."""
    lower = deepcopy(module)
    for parameter in lower.parameters():
        parameter.data = parameter.data.to(dtype)
    loss = lower(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in samples.items()}).loss
    loss.backward()
    for parameter, copied in zip(module.parameters(), lower.parameters(), strict=True):
        parameter.grad = None if copied.grad is None else copied.grad.to(parameter.dtype)
    return loss


def train_on_rank(
    choice: Choice,
    model: str,
    steps: Sequence[Split],
    optimizer: str = "sgd",
    clip: float | None = None,
    groups: bool = False,
    options: dict[str, Any] | None = None,
    state: dict[str, Tensor] | None = None,
    first_step: int = 0,
    set_to_none: bool = True,
) -> dict[str, Any]:
    """The same through a strategy; every rank starts from other weights unless the strategy makes them equal."""
    rank = dist.get_rank()
    module = build(model, seed=rank)
    settings = options_of(choice, **(options or {}), parameter_groups=weight_decay_groups if groups else None)
    strategy = load(choice)(module, OPTIMIZERS[optimizer], settings)
    if state is not None:
        strategy.load_full_state_dict(state if rank == 0 else {})
    result: dict[str, Any] = {"loss": [], "norm": [], "grad_norm": [], "gradients": {}}
    for index, split in enumerate(steps):
        strategy.zero_grad(set_to_none=set_to_none)
        loss = strategy.forward_backward(global_batch(model, split, first_step + index)[rank])
        result["grad_norm"].append(strategy.verdict.loss_and_norm[1])
        if clip is not None:
            result["norm"].append(strategy.clip_grad_norm_(clip).item())
        if index == 0:
            result["gradients"] = strategy.full_gradients()
        if index + 1 < len(steps):
            strategy.announce(global_batch(model, steps[index + 1], first_step + index + 1)[rank])
        strategy.step()
        result["loss"].append(loss.item())
    result["state"] = strategy.full_state_dict()
    module.eval()
    result["own_state"] = watch_parameters(module)
    with torch.no_grad():
        result["own_loss"] = strategy(**make_batch(model, 8, 7)).loss.item()
    return result


def watch_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """Filled by the next forward pass: whole parameters as this rank computes with them, sharded at rest or not."""
    seen: dict[str, Tensor] = dict(module.named_buffers())
    for path, part in module.named_modules():

        def remember(part: torch.nn.Module, args: Any, path: str = path) -> None:
            seen.update({f"{path}.{name}": p.detach().clone() for name, p in part.named_parameters(recurse=False)})

        part.register_forward_pre_hook(remember)
    return seen


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: str) -> None:
    """Every element within `tolerance` relative to the largest one of all tensors.

    Not relative to its own tensor: where the terms of a sum cancel, as in the gradient of a 0-d parameter, the rounding
    of the terms is large against the sum, in the oracle too.
    """
    assert actual.keys() == expected.keys(), f"{what}: {set(actual) ^ set(expected)} only on one side"
    scale = max(wanted.abs().max().item() for wanted in expected.values() if wanted.numel())
    for name, wanted in expected.items():
        if wanted.numel():
            error = (actual[name].double() - wanted.double()).abs().max().item() / scale
            assert error <= tolerance, f"{what}: {name} is off by {error:.2e}, more than {tolerance:.0e}"


def assert_parity(results: list[dict[str, Any]], expected: dict[str, Any], tolerance: float) -> None:
    """Ranks agree bitwise, and with the oracle within `tolerance`; losses and clipped norms too."""
    for other in results[1:]:
        assert other["loss"] == results[0]["loss"] and other["grad_norm"] == results[0]["grad_norm"]
        assert other["own_loss"] == results[0]["own_loss"], "ranks differ in what they make of the same samples"
        assert other["own_state"].keys() == results[0]["own_state"].keys()
        for name, tensor in results[0]["own_state"].items():
            own = other["own_state"][name]
            assert torch.allclose(tensor, own, rtol=0, atol=0, equal_nan=True), f"{name} differs between ranks"
    assert_close(results[0]["gradients"], expected["gradients"], max(GRADIENT_TOLERANCE, tolerance / 10), "gradient")
    assert_close(results[0]["state"], expected["state"], tolerance, "parameter")
    for key in ("loss", "norm", "grad_norm"):
        for actual, wanted in zip(results[0][key], expected[key], strict=True):
            assert abs(actual - wanted) <= 1e-5 * max(1.0, abs(wanted)), f"{key}: {actual} instead of {wanted}"


def check_parity(
    ranks: RankPool,
    choice: Choice,
    model: str,
    steps: Sequence[Split],
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    **both: Any,
) -> list[dict[str, Any]]:
    """Train `model` on as many ranks as `steps` are for, and alone; nothing if `choice` refuses `model` as listed.

    Args:
        both: Arguments of both `train_on_rank` and `oracle`.

    Returns:
        What each rank returned.
    """
    if is_refused(ranks, choice, model):
        return []
    results = ranks.run(len(steps[0]), partial(train_on_rank, options=options, **both), choice, model, steps, optimizer)
    assert_parity(results, oracle(model, steps, optimizer, **both), TOLERANCE[optimizer] * max(1.0, len(steps) / 3))
    return results

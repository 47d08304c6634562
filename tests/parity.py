"""What training on ranks must be equal to: one process on the whole global batch, or itself under other settings.

A `Case` is a row of a table. `check` trains it on ranks and alone, and compares: losses, norms, gradients, parameters,
what ranks hold alike, and the collectives that are announced. Other functions here run inside ranks (`tests.ranks`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

import ddp
import ddp_lab
import sharding
from ddp_lab.families import EVERY
from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.errors import UserError
from ddp_lab.runtime.mesh import Mesh, mesh_groups
from ddp_lab.strategy.batches import StepData
from ddp_lab.strategy.building import DTYPES, autocast, bring_to
from ddp_lab.strategy.options import StrategyOptions
from ddp_lab.strategy.registry import found_at
from ddp_lab.strategy.strategy import Strategy
from reference.dtensors import local
from tensor_parallel.parallelize import parallelize
from tensor_parallel.plan import Column, Plan, Row
from tensor_parallel.traffic import Precision
from tests import models
from tests.models import BRANCHES, MIXTURE, WITH_STATISTICS, build, make_batch
from tests.ranks import RankPool
from tests.tables import each_row
from tests.traffic import announced, counted, sent

Split = Sequence[Sequence[int]]
Options = Mapping[str, Any]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}
TOLERANCE = {"sgd": 1e-6, "adam": 1e-5, "fused": 1e-5}
"""Relative, of parameters after three steps (TRAPS: Adam magnifies rounding)."""
ON_GPU = 1e-4
"""The smallest tolerance on GPUs, which round products in another order than one process on the CPU."""
HUGE = 1e6
"""A target with a finite loss, whose gradient is far above fp16's maximum, 65504."""

SPLITS: dict[str, Sequence[Split]] = {
    "even": [[[2, 2]] * 6] * 3,
    "uneven": [
        [[2, 1], [3], [1], [1, 1, 2], [1], [2]],
        [[2], [2, 2], [1, 1], [1], [3, 1], [1]],
        [[2, 2]] * 6,
    ],
    "some have none": [
        [[2, 2, 2], [1], [2, 1], [1]],
        [[], [1, 2], [2], []],
        [[2, 0, 1], [0, 2], [1], [1]],
        [[2, 2]] * 4,
    ],
    "one each": [[[2], [1], [1], [2]], [[1], [2], [2], [1]], [[2]] * 4],
    "unequal": [[[2, 1], [1, 3], [2, 2]], [[1, 2], [2, 4], [1, 1]], [[3, 1], [2, 2], [1, 2]]],
    "in turns": [[[1, 1], [1]], [[1], [1]]] * 3,
    "pipelined": [[[2, 1, 2, 1]] * 4, [[2] * 4] * 4],
}
"""By step and by rank, the sizes of its micro-batches. The last step, which is counted, is the same on all ranks."""

REFUSALS = {
    ("pytorch_zero1", "odd"): "ZeroRedundancyOptimizer only supports using the same dense type for all parameters",
    **{(f"pytorch_zero{n}", "odd"): "FSDP2 cannot reduce the gradient of empty, which has no elements" for n in (2, 3)},
    **{(f"deepspeed_zero{n}", "odd"): "DeepSpeed takes no 0-d parameters" for n in (1, 2, 3)},
    **{(f"deepspeed_zero{n}", "branching"): "DeepSpeed updates unused parameters as if they had" for n in (1, 2, 3)},
}
"""The error of (choice, model), where the choice cannot train the model; it comes in the build or the first step."""
PLANS: dict[str, Plan] = {
    "plain": {"net.0": Column(), "net.2": Row()},
    "frozen": {"middle": Column(), "last": Row()},
    "adapted": {"blocks.*.base": Column(), "blocks.*.adapter": Row()},
    "odd": {"large": Column(), "last": Row()},
    "branching": {"a": Column(), "b": Column(), "spare": Column(), "last": Row()},
    "deep": {f"blocks.{n}.0": Row() if n % 2 else Column() for n in range(6)},
}
"""How tp cuts the trap modules; plans of transformers' models are built in."""


NAMES = list(dict.fromkeys((*ddp.CHOICES, *(n for n in sharding.CHOICES if n != "baseline"))))
"""Every registered strategy without a mesh; `baseline` is `bucket_ddp_async`."""
FAMILIES = ["simple_ddp", "bucket_ddp_async", "pytorch_ddp", "zero1", "zero2", "zero3", "pytorch_zero3"]
"""One of each kind."""
IN_OWN_LOOPS = [name for name in NAMES if not name.startswith("deepspeed")]
"""Choices that run in loops other than the runner's."""
in_own_loops = pytest.mark.parametrize("choice", IN_OWN_LOOPS)
over_own_loops = each_row("choice", IN_OWN_LOOPS)


def load(choice: str) -> Any:
    """A registered choice, or the class at `package.module:Class`."""
    return found_at(choice) if ":" in choice else EVERY.load(choice)


def options_of(choice: str, **settings: Any) -> StrategyOptions:
    """Options of these `settings`. By default a small model has one bucket."""
    defaults = {"bucket_cap_mb": 25.0} if choice in ("bucket_ddp_async", "baseline", "tp") else {}
    return StrategyOptions(**defaults | settings)


@dataclass(frozen=True, repr=False)
class Case:
    """A training, and what it must be equal to.

    Attributes:
        mesh: `dp=2` alone is two ranks with a strategy, without groups of a mesh.
        options: Of the strategy; on a mesh, flags of a run, too. FOLDER in one stands for a new folder.
        split: A name in `SPLITS`, or such a list.
        fills: Gradients are filled with zeros between steps, not dropped.
        own_loop: Train in a loop with `micro_batch` and `scale_loss`, not in the runner's.
        huge: (step, rank) pairs for which a target is `HUGE`.
        state, first_step: Where the training starts. Default: the weights of seed 0.
        same_as: Fields with which the result must be bitwise the same.
        alone: Compare with one process, within the tolerance of the precision.
        counted: Compare the collectives of the last step with those announced.
        refused: The message that every rank must raise instead.
    """

    choice: str
    model: str = "plain"
    mesh: str = "dp=2"
    options: Options = field(default_factory=dict)
    split: str | Sequence[Split] = "even"
    optimizer: str = "sgd"
    clip: float | None = None
    groups: bool = False
    fills: bool = False
    own_loop: bool = False
    huge: Sequence[tuple[int, int]] = ()
    state: dict[str, Tensor] | None = None
    first_step: int = 0
    same_as: Options | None = None
    alone: bool = True
    counted: bool = True
    refused: str = ""

    def __repr__(self) -> str:
        plain = Case("")
        changed = {
            n: v for n, v in vars(self).items() if v != getattr(plain, n) and n not in ("choice", "mesh", "state")
        }
        return " ".join([f"{self.choice}@{self.dims.label}", *(f"{name}={value}" for name, value in changed.items())])

    @property
    def dims(self) -> Mesh:
        return Mesh.parse(self.mesh)

    @property
    def steps(self) -> list[Split]:
        steps = SPLITS[self.split] if isinstance(self.split, str) else self.split
        return [split[: self.dims.data_size] for split in steps]

    def within(self, folder: str) -> "Case":
        """The same, with FOLDER where `options` name it."""
        options = {name: v.replace("FOLDER", folder) if isinstance(v, str) else v for name, v in self.options.items()}
        return replace(self, options=options)

    @property
    def tolerances(self) -> tuple[float, float, float | None]:
        """Relative, of later losses and norms, of the first step's and its gradients, and of parameters in the end."""
        dtypes = {
            self.options.get("precision", "fp32"),
            *(self.options.get(f"{kind}_dtype") for kind in ("param", "reduce")),
        }
        if "compress" in self.options:
            return 0.02, 0.02, None
        if dtypes & {"bf16", "bf16-true"}:
            is_kept = self.optimizer == "sgd" and "bf16-true" not in dtypes  # bf16-true rounds each update, too
            return 2**-4, 2**-6, 2**-5 if is_kept else None
        if "fp16" in dtypes:  # pytorch_zero2 with parameters in fp16 is 0.0045 off; cause unknown
            return 2**-7 if "param_dtype" in self.options else 2**-8, 2**-9, 2**-9 if self.optimizer == "sgd" else None
        near = TOLERANCE[self.optimizer] * max(1.0, len(self.steps) / 3)
        # The head makes losses sensitive: 2.7e-6 off, with parameters 1.6e-7 off, by kernels of AVX-512 (AMD EPYC).
        later = 4e-6 if self.model == "lookup, read by the head" else 2e-6
        return later, max(1e-6, near / 10), near


def in_stages(
    choice: str, mesh: str, model: str, schedule: str = "1f1b", optimizer: str = "sgd", **options: Any
) -> Case:
    """A case whose model is cut into stages: with `interleaved`, two on each rank."""
    flags = {"pipeline_schedule": schedule, "stages_per_rank": 2 if schedule == "interleaved" else 1, **options}
    return Case(choice, model, mesh, flags, "pipelined", optimizer)


def message_of(kind: type[Exception], function: Callable[..., Any], *args: Any) -> str:
    """The message of the `kind` of exception that `function(*args)` must raise."""
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


@contextmanager
def naming(subject: object) -> Iterator[None]:
    """A failure within this context names `subject`."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"tried: {subject}")
        raise


def check_messages(ranks: RankPool, world_size: int, function: Callable[..., dict[str, str]], *args: Any) -> None:
    """Each rank's `function(*args)` returns messages by what they must contain."""
    for messages in ranks.run(world_size, function, *args):
        for expected, message in messages.items():
            assert expected in message, message


def one_step(strategy: Strategy, batches: list[dict[str, Tensor]]) -> Tensor:
    strategy.zero_grad()
    loss = strategy.forward_backward(batches)
    strategy.step()
    return loss


def weight_decay_groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups: vectors without decay, at half the learning rate; the rest with decay."""
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    return [{"params": vectors, "weight_decay": 0.0, "lr": 0.005}, {"params": matrices, "weight_decay": 0.3}]


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


def batches_of(case: Case, index: int) -> list[list[dict[str, Tensor]]]:
    batches = global_batch(case.model, case.steps[index], case.first_step + index)
    for step, rank in case.huge:
        if step == index:
            batches[rank][-1]["y"][0] = HUGE
    return batches


def weights_of(case: Case, batches: list[dict[str, Tensor]]) -> list[float] | None:
    """Targets of each micro-batch, where they do not have as many for each sample."""
    is_masked = case.model.endswith("masked")
    return [float((micro_batch["labels"][:, 1:] != -100).sum()) for micro_batch in batches] if is_masked else None


def joined(batches: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """All samples of a global batch as one batch."""
    flat = [micro for of_rank in batches for micro in of_rank if len(next(iter(micro.values())))]
    return {name: torch.cat([micro[name] for micro in flat]) for name in flat[0]}


def records() -> dict[str, Any]:
    return {name: [] for name in ("loss", "norm", "grad_norm", "scale", "skipped")}


# One process ---------------------------------------------------------------------------------------------------------


def oracle(case: Case) -> dict[str, Any]:
    """Training in one process: losses, norms and loss scales by step, `gradients` of the first step, `state` after the
    last, and the module's answers then."""
    precision, param_dtype = case.options.get("precision", "fp32"), case.options.get("param_dtype")
    module = build(case.model)
    module.load_state_dict(case.state or {}, strict=case.state is not None)
    bring_to(module, precision)
    expert_indices = routes(module)
    params = weight_decay_groups(module) if case.groups else [p for p in module.parameters() if p.requires_grad]
    optim, result = OPTIMIZERS[case.optimizer](params), records()
    scale, interval = case.options.get("loss_scale") or 2.0**16, case.options.get("growth_interval", 2000)
    scaler = torch.amp.GradScaler("cpu", scale, growth_interval=interval, enabled=precision == "fp16")
    for index in range(len(case.steps)):
        optim.zero_grad()
        samples = joined(batches_of(case, index))
        with autocast("cpu", precision):
            loss = backward_in(DTYPES[param_dtype], module, samples) if param_dtype else module(**samples).loss
        if not param_dtype:
            scaler.scale(loss).backward()
        scaler.unscale_(optim)
        trained = [p for p in module.parameters() if p.requires_grad]
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        result["grad_norm"].append(torch.nn.utils.get_total_norm(list(gradients.values())).item())
        if index == 0:
            result["gradients"] = {name: gradient.clone() for name, gradient in gradients.items()}
            is_token = samples["attention_mask"].flatten() > 0 if case.model.endswith("masked") else slice(None)
            result["load"] = [chosen[is_token].flatten().bincount().tolist() for chosen in expert_indices] or None
        if case.clip is not None:
            result["norm"].append(torch.nn.utils.clip_grad_norm_(trained, case.clip).item())
        before = scaler.get_scale()
        scaler.step(optim)
        scaler.update()
        result["loss"].append(loss.item())
        result["scale"].append(before if precision == "fp16" else 0.0)
        result["skipped"].append(scaler.get_scale() < before)
    result["state"] = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        answer = module.eval()(**make_batch(case.model, 8, 7))
    term = getattr(answer, "aux_loss", None) if "ep" in case.dims.degrees else None
    result["own_loss"] = (answer.loss - (0 if term is None else MIXTURE["router_aux_loss_coef"] * term)).item()
    return result | {"logits": answer.logits}


def backward_in(dtype: torch.dtype, module: torch.nn.Module, samples: dict[str, Tensor]) -> Tensor:
    """The loss of a copy whose parameters and inputs are in `dtype`. Sets gradients, in the parameters' own dtype."""
    lower = deepcopy(module)
    for parameter in lower.parameters():
        parameter.data = parameter.data.to(dtype)
    loss = lower(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in samples.items()}).loss
    loss.backward()
    for parameter, copied in zip(module.parameters(), lower.parameters(), strict=True):
        parameter.grad = None if copied.grad is None else copied.grad.to(parameter.dtype)
    return loss


def routes(module: torch.nn.Module) -> list[Tensor]:
    """A list to which each forward pass adds, for each mixture layer, the experts of each token: (tokens, k)."""
    expert_indices: list[Tensor] = []
    for part in module.modules():
        if hasattr(part, "gate") and hasattr(part, "experts"):
            part.gate.register_forward_hook(lambda _, __, output: expert_indices.append(output[2]))
    return expert_indices


# On ranks ------------------------------------------------------------------------------------------------------------


@contextmanager
def strategy_of(case: Case, seed: int | None = None) -> Iterator[Strategy]:
    """Within this context the groups of the mesh exist. Every rank starts from other weights, and gets rank 0's."""
    named = {option.name for option in fields(StrategyOptions)}
    settings = {"find_unused_parameters": case.model in BRANCHES, **case.options}
    options = options_of(case.choice, **{
        name: value for name, value in settings.items() if name in named
    })  # fmt: skip
    if case.groups:
        options = replace(options, parameter_groups=weight_decay_groups)
    module, kind = build(case.model, dist.get_rank() if seed is None else seed), load(case.choice)
    if set(case.dims.degrees) == {"dp"}:
        yield kind(module, OPTIMIZERS[case.optimizer], options)
        return
    with mesh_groups(case.dims, models.DEVICE.type) as groups:
        if case.dims.model_size > 1 or {"cp", "ep"} & case.dims.degrees.keys():
            flags = {name: value for name, value in settings.items() if name not in named}
            config = RunConfig(strategy=options, choice=case.choice, mesh=case.mesh, **flags)
            if case.model in PLANS and not {"pp", "cp"} & case.dims.degrees.keys():
                precision = Precision.of(options.precision, options.param_dtype)
                parts = parallelize(
                    module, PLANS[case.model], groups, models.DEVICE, config.sequence_parallel, precision
                )
            else:
                parts = EVERY.load_parallelize(case.choice)(module, config, groups, models.DEVICE)
            options, kind = replace(options, model_parallel=parts), kind.in_stages() if parts.pipeline else kind
        yield kind(module, OPTIMIZERS[case.optimizer], replace(options, shard_groups=groups.shard_groups), groups.data)


def built(choice: str, model: str | torch.nn.Module = "plain", optimizer: str = "sgd", **options: Any) -> Strategy:
    """A strategy over all ranks."""
    settings = options_of(choice, **options)
    return load(choice)(build(model) if isinstance(model, str) else model, OPTIMIZERS[optimizer], settings)


def build_and_step(case: Case) -> Strategy:
    """Over all ranks, whatever the mesh."""
    strategy = built(case.choice, case.model, case.optimizer, **case.options)
    strategy.forward_backward([make_batch(case.model, 2, 0)])
    strategy.step()
    return strategy


def own_step(strategy: Strategy, batches: Sequence[dict[str, Tensor]]) -> Tensor:
    """A step of a loop of one's own. Returns its mean loss over the ranks."""
    weights = strategy.loss_weights([len(next(iter(batch.values()))) for batch in batches])
    total = torch.zeros((), device=models.DEVICE)
    for index, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
        with strategy.micro_batch(last=index == len(batches) - 1):
            loss = strategy(**batch).loss * weight
            strategy.scale_loss(loss).backward()
            total += loss.detach()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    return total


def trained(case: Case) -> dict[str, Any]:
    """`oracle`'s results, of a rank: gradients and state on rank 0 alone. Also `evaluated_state`."""
    with strategy_of(case) as strategy:
        result, rank = records(), strategy.data_parallel_rank
        if case.state or strategy.model_parallel:
            state = case.state or build(case.model).state_dict()
            strategy.load_full_state_dict(state if dist.get_rank() == 0 else {})
        for index, split in enumerate(case.steps):
            batches = batches_of(case, index)[rank]
            is_last, weights = index == len(case.steps) - 1, weights_of(case, batches)
            following = None
            if not is_last:
                next_batches = batches_of(case, index + 1)[rank]
                following = StepData(0, next_batches, weights_of(case, next_batches))
            if is_last:
                strategy.finish_parameter_synchronization()
            with counted() if case.counted and not case.own_loop and is_last and index else nullcontext({}) as issued:
                strategy.zero_grad(set_to_none=not case.fills)
                if case.own_loop:
                    loss = own_step(strategy, batches)
                else:
                    loss = strategy.forward_backward(batches, weights, following=following)
                if index == 0:
                    result["gradients"] = strategy.full_gradients()
                if case.clip is not None:
                    result["norm"].append(strategy.clip_grad_norm_(case.clip).item())
                strategy.step(wait=case.own_loop)
                if is_last:
                    strategy.finish_parameter_synchronization()
            verdict = strategy.verdict
            result["loss"].append(loss.item())
            result["grad_norm"].append(verdict.loss_and_norm[1])
            result["scale"].append(verdict.loss_scale or 0.0)
            result["skipped"].append(verdict.skipped)
            if index == 0:
                result["load"] = verdict.expert_load
            if issued:
                micro_batches = max(sum(size > 0 for size in sizes) for sizes in split)
                result["traffic"] = *announced(strategy, micro_batches, case.clip is not None), issued
        result["state"] = strategy.full_state_dict()
        return result | evaluated_state(case, strategy)


def evaluated_state(case: Case, strategy: Strategy) -> dict[str, Any]:
    """Parameters and answers of this rank in evaluation, and the names of parameters in which ranks may differ."""
    strategy.module.eval()
    parts = strategy.model_parallel
    parameters = {} if parts and parts.pipeline else watch_parameters(strategy.module)
    batch = make_batch(case.model, 8, 7)
    with torch.no_grad():
        loss = strategy(**batch).loss.clone()
        if case.dims.degree("cp") > 1:
            dist.all_reduce(loss, dist.ReduceOp.AVG, strategy.process_group)
        result: dict[str, Any] = {"own_loss": loss.item()}
        if case.model.startswith("lm") and {"cp", "pp"} & case.dims.degrees.keys():
            del batch["labels"]
            result["logits"] = strategy(**batch).logits
    result["cut"] = {*(parts.cuts if parts else ()), *(name for name, p in parameters.items() if is_cut(p))}
    return result | {"own_state": {name: local(tensor) for name, tensor in parameters.items()}}


def is_cut(tensor: Tensor) -> bool:
    """Whether torch has cut it."""
    return isinstance(tensor, DTensor) and any(placement.is_shard() for placement in tensor.placements)


def watch_parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """A dict that the next forward pass fills with full parameters as this rank uses them, sharded at rest or not."""
    tensors: dict[str, Tensor] = dict(module.named_buffers())
    for path, part in module.named_modules():

        def remember(part: torch.nn.Module, args: Any, path: str = path) -> None:
            named = part.named_parameters(path, recurse=False)
            tensors.update({name: p.detach().clone() for name, p in named})

        part.register_forward_pre_hook(remember)
    return tensors


def outcome(case: Case, folder: str = "") -> tuple[dict[str, Any], list[str]]:
    """Results of `trained`, and the names of those that differ under `same_as`."""
    result = trained(case.within(folder))
    if case.same_as is None:
        return result, []
    compared = {"loss", "norm", "scale", "gradients", "state"} | (
        {"own_loss"} if "choice" not in case.same_as else set()
    )
    tensors, references = (
        {keystr(path): torch.as_tensor(leaf) for path, leaf in tree_flatten_with_path({n: run[n] for n in compared})[0]}
        for run in (result, trained(replace(case, **case.same_as)))
    )
    missing = [f"{name} on one side" for name in tensors.keys() ^ references.keys()]
    common = tensors.keys() & references.keys()
    return result, missing + [name for name in common if not is_same(tensors[name], references[name])]


def is_same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)


# Comparison ----------------------------------------------------------------------------------------------------------


def check(ranks: RankPool, case: Case, folder: Path | None = None) -> list[dict[str, Any]]:
    """Train on ranks and in one process, and compare; or check the refusal. Returns each rank's results."""
    with naming(case):
        refusal = case.refused or REFUSALS.get((case.choice, case.model.partition(",")[0]))
        if refusal:
            for message in ranks.run(case.dims.size, message_of, UserError, trained, case):
                assert refusal in message
            return []
        results, differing = zip(*ranks.run(case.dims.size, outcome, case, str(folder), timeout_s=250), strict=True)
        assert not any(differing), differing
        assert_ranks_agree(case, results)
        if case.alone and case.model not in WITH_STATISTICS:
            assert_near(case, results[0], oracle(case), ON_GPU if ranks.config.device == "cuda" else 0.0)
        return list(results)


def check_each(ranks: RankPool, cases: Sequence[Case], folder: Path | None = None) -> None:
    """Check all cases. A failure names its case."""
    assert cases
    each_row("case", cases)(lambda case: check(ranks, case, folder) and None)()


def assert_ranks_agree(case: Case, results: Sequence[dict[str, Any]]) -> None:
    """Ranks are bitwise equal in what several of them hold. Each issues the announced collectives or, if no formula
    gives them, the same as rank 0."""
    first = results[0]
    places = [[case.dims.coordinates(rank).get(name) for name in ("pp", "ep", "tp")] for rank in range(len(results))]
    for place, result in zip(places, results, strict=True):
        assert result["loss"] == first["loss"] and result["skipped"] == first["skipped"]
        near = 1e-5 if {"ep", "cp", "pp", "tp"} & case.dims.degrees.keys() else 0
        for name in ("grad_norm", "norm", "own_loss") if case.model not in WITH_STATISTICS else ():
            assert result[name] == pytest.approx(first[name], rel=near, abs=0, nan_ok=True), name
        for peer_place, peer in zip(places, results, strict=True) if case.model not in WITH_STATISTICS else ():
            for name in peer["own_state"].keys() & result["own_state"].keys():
                if peer_place == place or name not in peer["cut"]:
                    assert is_same(peer["own_state"][name], result["own_state"][name]), f"{name} differs between ranks"
    traffic = [result["traffic"] for result in results if "traffic" in result]
    for expected, least_bytes, issued in traffic:
        if least_bytes is not None:
            assert sent(issued) > least_bytes - 1
            expected = issued if {"pp", "tp"} & case.dims.degrees.keys() else traffic[0][-1]
        pairs = {key: (expected.get(key, (0, 0)), issued.get(key, (0, 0))) for key in expected.keys() | issued.keys()}
        differing = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
        varies = all(kind == "all_to_all" and pair[0][0] == pair[1][0] for (kind, _), pair in differing.items())
        assert varies, f"announced, and issued: {differing}"
    totals = [sum(nbytes for row in traffic for _, nbytes in row[side].values()) for side in (0, 2)]
    assert totals[0] == totals[1] or traffic[0][1] is not None, "what all ranks send to experts"


def assert_near(case: Case, result: dict[str, Any], expected: dict[str, Any], floor: float = 0.0) -> None:
    of_loss, of_gradient, of_state = (None if limit is None else max(limit, floor) for limit in case.tolerances)
    assert of_loss is not None and of_gradient is not None
    assert result["skipped"] == expected["skipped"]
    if case.options.get("precision") == "fp16":
        assert result["scale"] == expected["scale"]
    assert case.choice == "transformers_ep" or result["load"] == expected["load"]
    for name in ("loss", "norm", "grad_norm"):
        for step, (actual, right) in enumerate(zip(result[name], expected[name], strict=True)):
            if name == "loss" or not expected["skipped"][step]:
                limit = (of_loss if step else of_gradient) * max(1.0, abs(right))
                assert abs(actual - right) <= limit, f"{name}: {actual}, not {right}"
    assert_close(result["gradients"], expected["gradients"], of_gradient, "gradient")
    if of_state is not None:
        assert_close(result["state"], expected["state"], of_state, "parameter")
        assert result["own_loss"] == pytest.approx(expected["own_loss"], rel=max(1e-4, 2 * of_state)), "what it answers"
        if "logits" in result:
            mask = make_batch(case.model, 8, 7).get("attention_mask")
            is_token = slice(None) if mask is None else mask == 1
            assert (result["logits"].float() - expected["logits"])[is_token].abs().max() < max(1e-3, of_state), "logits"


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, label: str) -> None:
    """Every element within `tolerance` relative to the largest one of all tensors.

    Not relative to its own tensor: where the terms of a sum cancel, as in the gradient of a 0-d parameter, the rounding
    of the terms is large against the sum, in the oracle too.
    """
    assert actual.keys() == expected.keys(), f"{label}: {set(actual) ^ set(expected)} only on one side"
    scale = max(tensor.abs().max().item() for tensor in expected.values() if tensor.numel())
    for name, tensor in expected.items():
        if tensor.numel():
            assert actual[name].isfinite().all() or not tensor.isfinite().all(), f"{label}: {name} is not finite"
            error = (actual[name].double() - tensor.double()).abs().max().item() / scale
            assert not error > tolerance, f"{label}: {name} is off by {error:.2e}, more than {tolerance:.0e}"


# Checkpoints ---------------------------------------------------------------------------------------------------------


def saved_halfway(case: Case, folder: Path) -> dict[str, Tensor]:
    """The state after four steps; `folder` gets a checkpoint after the second."""
    with strategy_of(case) as strategy:
        for step in range(4):
            if step == 2:
                ddp_lab.save_checkpoint(strategy, folder)
            one_step(strategy, [make_batch(case.model, 2, step)])
        return strategy.full_state_dict()


def gone_on(case: Case, folder: Path) -> dict[str, Tensor]:
    """The state after the last two of these steps, resumed from the checkpoint."""
    with strategy_of(case, seed=3) as strategy:
        ddp_lab.load_checkpoint(strategy, folder)
        for step in (2, 3):
            one_step(strategy, [make_batch(case.model, 2, step)])
        return strategy.full_state_dict()

"""What a checkpoint saves of a strategy, and how it is restored: parameters, optimizer states and buffers.

A rank stores flat tensors under these keys. `<start>` is the number of the first element:
    parameter/<name>/<start>                      values; `<name>@<rank>` of a part (`ddp_lab.runtime.checkpoint.parts`)
    optimizer/<state>/<name>/<start>              an optimizer state with a value for each element
    optimizer_count/<state>/<name>/0              an optimizer state with one value for the parameter, such as `step`
    buffer/<name>/0                               persistent buffers, those of data-parallel rank 0
    loss_scale/<state>/0                          of fp16: scale and growth_tracker, the same on every rank
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lab.runtime.checkpoint.files import DTYPES, TensorFiles
from ddp_lab.runtime.checkpoint.manifest import MANIFEST, Manifest, TensorInfo
from ddp_lab.runtime.checkpoint.parts import OwnParts, StoredParts
from ddp_lab.runtime.errors import UnsupportedError, UserError
from ddp_lab.strategy.account import Piece, share
from ddp_lab.strategy.strategy import Strategy

COUNT = "step"
"""The state that torch's optimizers keep as one number for a parameter, even if the parameter is one number too."""


def describe(
    tensors: Iterable[tuple[str, Tensor]],
    dtypes: Mapping[str, torch.dtype] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, TensorInfo]:
    """Shape and dtype of named tensors, and whether they are trainable. For shards, the shape is that of the whole."""
    dtypes, shapes = dtypes or {}, shapes or {}
    return {
        name: TensorInfo(
            list(shapes.get(name, tensor.shape)),
            str(dtypes.get(name, tensor.dtype)).removeprefix("torch."),
            tensor.requires_grad,
        )
        for name, tensor in tensors
    }


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    saved = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


def describe_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group that are numbers, such as its learning rate."""
    return [{name: value for name, value in group.items() if is_setting(value)} for group in optimizer.param_groups]


def is_setting(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(is_setting, value)) and bool(value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def manifest_of(strategy: Strategy, step: int) -> Manifest:
    """The manifest of a checkpoint of `strategy`, of all stages, without its files. Collective."""
    strategy.parameter_pieces()
    module, parts = strategy.module, OwnParts(strategy)
    parameters = describe(module.named_parameters(), strategy.parameter_dtypes, parts.shapes)
    return Manifest(
        step=step,
        world_size=dist.get_world_size(strategy.groups.everyone),
        data_parallel_size=strategy.data_parallel_size,
        optimizer=type(strategy.updating_optimizer).__name__,
        parameter_groups=describe_groups(strategy.optimizer),
        parameters=parts.of_all_stages(parameters),
        buffers=parts.of_all_stages(describe(persistent_buffers(module).items())),
        cuts=parts.of_all_stages(parts.cuts),
    )


def states_in(files: TensorFiles) -> dict[str, str]:
    """`states` of the manifest."""
    kinds = ("parameter", "buffer")  # whose dtypes are in fields of their own
    return {key: stored[0].dtype for key, stored in files.stored.items() if key.split("/")[0] not in kinds}


# Saving --------------------------------------------------------------------------------------------------------------


def tensors_to_save(strategy: Strategy) -> dict[str, Tensor]:
    """What this rank stores, by key. Most are views, so they must be copied before the next step changes them."""
    strategy.finish_parameter_synchronization()
    tensors: dict[str, Tensor] = {}
    parts = OwnParts(strategy)
    for piece, start, end in own_share(strategy, parts, strategy.parameter_pieces(), "parameters"):
        tensors[f"parameter/{parts.key(piece.name)}/{piece.start + start}"] = flat(strategy, piece.tensor)[start:end]
    for piece, start, end in own_share(strategy, parts, strategy.updated_pieces(), "optimizer_state"):
        key = f"{parts.key(piece.name)}/{piece.start + start}"
        for name, value in strategy.updating_optimizer.state.get(piece.tensor, {}).items():
            if is_elementwise(name, value, piece.tensor):
                tensors[f"optimizer/{name}/{key}"] = flat(strategy, value)[start:end]
            elif piece.start + start == 0 and parts.rank(piece.name) == 0:  # the same for all parts of the parameter
                tensors[f"optimizer_count/{name}/{piece.name}/0"] = value.detach().view(1)
    if strategy.group_rank == parts.tensor_rank == 0:  # of each stage
        buffers = persistent_buffers(strategy.module)
        tensors |= {f"buffer/{name}/0": buffer.detach().reshape(-1) for name, buffer in buffers.items()}
    if dist.get_rank(strategy.groups.everyone) == 0 and strategy.scaler is not None:
        tensors |= {f"loss_scale/{name}/0": value.view(1) for name, value in strategy.scaler.state().items()}
    unknown = [key for key, tensor in tensors.items() if tensor.dtype not in DTYPES]
    if unknown:
        raise UnsupportedError(f"cannot save {unknown[0]}: its dtype is {tensors[unknown[0]].dtype}")
    return tensors


def own_share(
    strategy: Strategy, parts: OwnParts, pieces: Sequence[Piece], component: str
) -> list[tuple[Piece, int, int]]:
    """Which elements of which pieces this rank saves: its share of what its replicas hold too, or all ranks."""
    pieces = [piece for piece in pieces if parts.is_saved_here(piece.name)]
    by_tensor = {piece.tensor: piece for piece in pieces}
    is_shard = component in strategy.saves_shards_of
    elements = []
    for group, tensors in strategy.by_group(by_tensor):
        over = strategy.groups
        rank, size = (over.replica, over.replicas) if is_shard else (dist.get_rank(group), dist.get_world_size(group))
        lengths = [strategy.on_this_rank(tensor).numel() for tensor in tensors]
        elements += [(by_tensor[tensors[index]], start, end) for index, start, end in share(lengths, rank, size)]
    return elements


def flat(strategy: Strategy, tensor: Tensor) -> Tensor:
    return strategy.on_this_rank(tensor).reshape(-1)


def is_elementwise(name: str, value: object, parameter: Tensor) -> bool:
    """Whether an optimizer state has a value for each element of a parameter, rather than one for all."""
    if isinstance(value, Tensor):
        if name != COUNT and value.shape == parameter.shape:
            return True
        if value.ndim == 0:
            return False
    raise UnsupportedError(
        f"checkpoints: the optimizer's state {name!r} is neither a tensor of its parameter's shape nor a single value"
    )


# Restoring -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def fill(strategy: Strategy, files: TensorFiles, manifest: Manifest) -> None:
    """Set this rank's parameters, buffers and optimizer to the stored values. Reads only what this rank holds, if
    parameters are cut over ranks as they are stored."""
    if odd := sorted(states_in(files).items() ^ manifest.states.items()):
        raise UserError(f"the checkpoint is damaged: its files and {MANIFEST} differ in {odd[0][0]!r}")
    strategy.finish_parameter_synchronization()
    # parameters, buffers and the loss scale
    stored = StoredParts(files, manifest.cuts, OwnParts(strategy))
    for piece in strategy.parameter_pieces():
        local = strategy.on_this_rank(piece.tensor)
        if local.numel():
            put(local, stored.read("parameter", piece.name, piece.start, piece.start + local.numel()))
    for name, buffer in persistent_buffers(strategy.module).items():
        put(buffer, files.read(f"buffer/{name}", 0, buffer.numel()))
    for name, value in strategy.scaler.state().items() if strategy.scaler is not None else ():
        if (key := f"loss_scale/{name}") in files.stored:  # not if it was saved in another precision
            put(value, files.read(key, 0, 1))
    # the optimizer
    states, counts = keys_by_parameter(files, "optimizer"), keys_by_parameter(files, "optimizer_count")
    optimizer = strategy.updating_optimizer
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for piece in strategy.updated_pieces():
        state: dict[str, Tensor] = {}
        of_elements, of_all = states[stored.first_key(piece.name)], counts[piece.name]
        for name in of_elements:
            local = strategy.on_this_rank(piece.tensor)
            values = stored.read(f"optimizer/{name}", piece.name, piece.start, piece.start + local.numel())
            state[name] = torch.empty_like(piece.tensor, dtype=values.dtype)
            put(strategy.on_this_rank(state[name]), values)
        for name, key in of_all.items():
            group = group_of[piece.tensor]
            on_device = group.get("fused") or group.get("capturable")  # as torch's optimizers do
            state[name] = files.read(key, 0, 1)[0].clone().to(piece.tensor.device if on_device else "cpu")
        if state:
            optimizer.state[piece.tensor] = state
    restore_groups(strategy.optimizer, manifest.parameter_groups)


def restore_groups(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Set the parameter groups of `optimizer` to the stored settings."""
    own_groups = optimizer.param_groups
    if len(groups) != len(own_groups) or not all(map(takes, own_groups, groups)):
        raise UserError("--resume: the checkpoint's optimizer has other parameter groups, or other settings of them")
    for group, settings in zip(own_groups, groups, strict=True):
        for name, value in settings.items():
            kind = type(group[name])  # JSON has no tuples, and the manifest stores every number as a float
            group[name] = value if kind is int and value % 1 else kind(value)


def takes(group: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a parameter group has settings of these names, each one number or as many as here."""
    return all(
        is_setting(group.get(name)) and np.shape(group[name]) == np.shape(value) for name, value in settings.items()
    )


def put(target: Tensor, values: Tensor) -> None:
    if values.is_floating_point() != target.is_floating_point():
        raise UserError(f"the checkpoint is damaged: values are of {values.dtype}, and {target.dtype} is expected")
    target.copy_(values.view(target.shape))


def keys_by_parameter(files: TensorFiles, kind: str) -> dict[str, dict[str, str]]:
    """For each parameter, the keys of its stored states, by the name of the state."""
    keys: dict[str, dict[str, str]] = defaultdict(dict)
    for key in files.stored:
        if key.startswith(f"{kind}/"):
            _, state, name = key.split("/", 2)
            keys[name][state] = key
    return keys

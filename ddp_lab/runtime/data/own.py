"""A workload from a file of the user: `--workload path/to/file.py:build` (docs/own-workload.md)."""

import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.found import require_function
from ddp_lab.runtime.data.own_checks import in_one_line, require_fields, require_same_lengths, require_trains
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import node_leader_first
from ddp_lab.runtime.errors import OWN_MODULE, UserError
from ddp_lab.runtime.groups import on_every_rank
from ddp_lab.runtime.watch.phases import BUILDING, during


def build(config: RunConfig) -> Workload:
    """What the user's function returns, tried on one batch. Collective.

    The first rank of each node builds before the others, which then find what it has downloaded.

    Raises:
        UserError: on every rank: there is no such file or function, it raises, or what it returns cannot be trained on.
    """
    name = config.workload
    workload = node_leader_first(lambda: _call(_function(name), config))
    on_every_rank(lambda: require_fields(name, workload))
    require_same_lengths(name, workload)
    if workload.loss is not None:
        put_beside(workload.model, workload.loss)
    workload = replace(
        workload,
        train=_first(workload.train, config.train_samples),
        evaluation=_first(workload.evaluation, config.eval_samples),
    )
    on_every_rank(lambda: require_trains(name, workload, torch.device(config.device)))
    return workload


def _function(name: str) -> Callable[..., Any]:
    file, function = require_function(name)
    if str(file.parent.resolve()) not in sys.path:
        sys.path.insert(1, str(file.parent.resolve()))  # it may import its neighbours
    spec = importlib.util.spec_from_file_location(OWN_MODULE, file.resolve())
    assert spec is not None and spec.loader is not None, "the file is Python's"
    module = importlib.util.module_from_spec(spec)
    sys.modules[OWN_MODULE] = module
    if os.environ.get("RANK", "0") == "0":  # what the user's code is warned of, once: of shapes that do not fit, say
        warnings.filterwarnings("default", module=rf"{OWN_MODULE}|torch\.nn\.(functional|modules)\b")
    with in_one_line(f"--workload {name}"):
        spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"--workload {name}: {function} is no function")
    return found


@during(BUILDING)
def _call(build: Callable[..., Any], config: RunConfig) -> Any:
    """`build()`, or `build(config)` if it has an argument without a default, or one named `config`."""
    arguments = inspect.signature(build).parameters
    takes_config = "config" in arguments or any(one.default is one.empty for one in arguments.values())
    if not takes_config and (config.model or config.dataset):
        raise UserError(f"--workload {config.workload}: takes no argument, and so cannot know --model and --dataset")
    with in_one_line(f"--workload {config.workload}"):
        return build(config) if takes_config else build()


def put_beside(model: nn.Module, loss: Callable[[Any, dict[str, Tensor]], Tensor]) -> None:
    """Let `model(**batch)` answer with `.loss`, and `.logits`, where it answers with a tensor or an object that has
    them.

    Of a batch, the model's own `forward` gets what it names. No module is put around it, so the names of its parameters
    stay as they are.
    """
    forward, parameters = model.forward, inspect.signature(model.forward).parameters
    unbound = getattr(forward, "__func__", lambda _, **batch: forward(**batch))
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def answer(self: nn.Module, **batch: Tensor) -> SimpleNamespace:
        output = unbound(self, **{name: value for name, value in batch.items() if takes_all or name in parameters})
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        return SimpleNamespace(loss=loss(output, batch), logits=logits)

    model.forward = MethodType(answer, model)  # that of a copy is bound to the copy


def _first(data: Any, count: int | None) -> Any:
    return data if count is None or count >= len(data) else Subset(data, range(count))

"""A workload from a file of the user: `--workload path/to/file.py:build` (docs/own-workload.md)."""

import importlib.util
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate

from ddp_lab.runtime.config import RunConfig
from ddp_lab.runtime.data.found import require_function
from ddp_lab.runtime.data.workload import Workload
from ddp_lab.runtime.distributed import node_leader_first
from ddp_lab.runtime.errors import OWN_MODULE, UserError, place_in_own_file, traceback_of, words_of
from ddp_lab.runtime.groups import gather_objects, on_every_rank
from ddp_lab.runtime.watch.phases import BUILDING, during

TRIED_SAMPLES = 4
SUM_TOLERANCE = 0.1


def build(config: RunConfig) -> Workload:
    """What the user's function returns, tried on one batch. Collective.

    The first rank of each node builds before the others, which then find what it has downloaded.
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
    attribute = getattr(module, function, None)
    if not callable(attribute):
        raise UserError(f"--workload {name}: {function} is no function")
    return attribute


@during(BUILDING)
def _call(build: Callable[..., Any], config: RunConfig) -> Any:
    """`build()`, or `build(config)` if it has an argument without a default, or one named `config`."""
    arguments = inspect.signature(build).parameters
    takes_config = "config" in arguments or any(
        parameter.default is parameter.empty for parameter in arguments.values()
    )
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


@contextmanager
def in_one_line(prefix: str, hint: str = "") -> Iterator[None]:
    """What the user's code raises within becomes one line that begins with `prefix`, names the line of the file, and
    ends with `hint`.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever it is, it is the user's
        words = error.msg if isinstance(error, SyntaxError) else next(iter(words_of(error).splitlines()), "")
        advice = f"; {hint}" if hint else ""
        mistake = UserError(f"{prefix}: {type(error).__name__}: {words}{place_in_own_file(error)}{advice}")
        mistake.traceback = traceback_of(error)
        raise mistake from error


def require_fields(name: str, workload: Any) -> None:
    if not isinstance(workload, Workload):
        raise UserError(
            f"--workload {name}: returns {_kind(workload)}; it must return a ddp_lab.runtime.data.workload.Workload"
        )
    if not isinstance(workload.model, nn.Module):
        raise UserError(f"--workload {name}: model is {_kind(workload.model)}, not a torch.nn.Module")
    for field in ("train", "evaluation"):
        data = getattr(workload, field)
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise UserError(
                f"--workload {name}: {field} is {_kind(data)}, which has no length or no [index]; read it "
                "into a list or a map-style data set"
            )
        if not len(data):
            raise UserError(f"--workload {name}: {field} is empty")
    for field in ("collate", "count", "loss"):
        function = getattr(workload, field)
        if not callable(function) and not (field == "loss" and function is None):
            raise UserError(f"--workload {name}: {field} is {_kind(function)}; it must be a function")
    rate = workload.learning_rate
    if not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise UserError(f"--workload {name}: learning_rate is {rate!r}; it must be a number above 0")


def require_same_lengths(name: str, workload: Workload) -> None:
    """Collective."""
    lengths = gather_objects((len(workload.train), len(workload.evaluation)))
    for rank, (train, evaluation) in enumerate(lengths):
        if (train, evaluation) != lengths[0]:
            raise UserError(
                f"--workload {name}: rank 0 has {lengths[0][0]} training and {lengths[0][1]} held-out samples, rank "
                f"{rank} has {train} and {evaluation}; give every rank all of them: the run shares them out"
            )


def require_trains(name: str, workload: Workload, device: torch.device) -> None:
    """Try the model on one sample to train on, then on the first held-out samples once, and on the same ones twice.

    A loss that is a mean is the same for both; a loss that is a sum doubles.
    """
    indices = range(min(TRIED_SAMPLES, len(workload.evaluation)))
    with in_one_line(f"--workload {name}: evaluation"):
        samples = [workload.evaluation[index] for index in indices]
    with in_one_line(f"--workload {name}: train[0]"):
        first = workload.train[0]
    model = workload.model.to(device)
    was_training = model.training
    model.eval()  # without dropout, and with fixed statistics, a sample's loss does not depend on the others
    try:
        if not _loss(name, workload, model, [first], device).requires_grad:
            raise UserError(f"--workload {name}: its loss does not depend on a trainable parameter, or is detached")
        with torch.no_grad():
            loss, doubled = (_loss(name, workload, model, samples * times, device).item() for times in (1, 2))
    finally:
        model.train(was_training)
    if abs(doubled - 2 * loss) < SUM_TOLERANCE * abs(loss):
        raise UserError(
            f"--workload {name}: its loss is a sum over samples: {loss:.4g} for {len(samples)} samples, {doubled:.4g} "
            "for the same samples twice; return the mean"
        )


def _loss(name: str, workload: Workload, model: nn.Module, samples: list[Any], device: torch.device) -> Tensor:
    # the batch, and what its loss is a mean over
    is_default = workload.collate is default_collate
    with in_one_line(f"--workload {name}: collate", "give Workload a collate of your own" if is_default else ""):
        batch = workload.collate(samples)
    if not isinstance(batch, Mapping) or not batch or not all(isinstance(value, Tensor) for value in batch.values()):
        raise UserError(
            f"--workload {name}: collate makes {_kind(batch)}; it must make a dict of tensors, by the names of the "
            "model's arguments"
        )
    with in_one_line(f"--workload {name}: count"):
        count = float(workload.count(dict(batch)))
    if not 0 <= count < math.inf:
        raise UserError(f"--workload {name}: count is {count:g} for a batch; it must be a number of at least 0")
    batch = {key: value.to(device) for key, value in batch.items()}
    # the loss
    hint = "" if workload.loss else "without a loss in Workload, the model gets the whole batch and must return .loss"
    with in_one_line(f"--workload {name}: model, on a batch of {', '.join(batch)}", hint):
        output = model(**batch)
    loss = getattr(output, "loss", None)
    if loss is None:
        raise UserError(
            f"--workload {name}: the model returns {_kind(output)} without .loss; give Workload a loss, or return "
            "an object that has .loss"
        )
    if not isinstance(loss, Tensor) or loss.ndim:
        raise UserError(
            f"--workload {name}: its loss is {_kind(loss)}; it must be a scalar tensor, the mean over the batch"
        )
    # predictions, one for each label
    if workload.classifies:
        logits = getattr(output, "logits", None)
        if logits is None or "labels" not in batch:
            raise UserError(f"--workload {name}: to classify, the answer needs .logits, and the batch labels")
        with in_one_line(f"--workload {name}: logits.argmax(-1)"):
            predictions = logits.argmax(-1)
        if not predictions.shape == batch["labels"].shape == (len(samples),):
            raise UserError(
                f"--workload {name}: to classify, each sample has one label; for {len(samples)} samples labels have "
                f"shape {tuple(batch['labels'].shape)} and logits.argmax(-1) {tuple(predictions.shape)}"
            )
    return loss


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "a dict of " + (", ".join(f"{key}: {type(item).__name__}" for key, item in value.items()) or "nothing")
    name = type(value).__name__
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"

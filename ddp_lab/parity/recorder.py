"""Records what a training loop computes, step by step, for `ddp-lab parity`. Works in any loop, with any wrapper."""

import atexit
from collections.abc import Callable, Mapping
from functools import wraps
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from ddp_lab.parity import sketch, store, subject
from ddp_lab.parity.micro_batches import MicroBatches, rows_of
from ddp_lab.strategy.strategy import Strategy


def watch(
    strategy_or_module: "Strategy | nn.Module",
    folder: str | Path,
    steps: int = 3,
    another_rounding: bool = False,
    whole: str | None = None,
) -> "Recorder":
    """Record the next optimizer steps of a loop. On every rank, before the first step; then train as ever.

    Args:
        strategy_or_module: A strategy of this project, or a module as the loop calls it: wrapped by DDP, FSDP2 or
            DeepSpeed, or by nothing.
        folder: Where the records go. One for each run. `ddp-lab parity RUN_A RUN_B` compares two.
        steps: How many steps are recorded. Then the loop goes on as if nothing had been.
        another_rounding: Round the output of each module once more, at random. Such a run shows what rounding alone
            does to each quantity: `ddp-lab parity RUN_A RUN_B --yardstick RUN_C`.
        whole: A module, by name, whose outputs and their gradients are kept whole, too: a list of tensors for each
            kind in `step_<step>.rank_<rank>.pt`, by micro-batch.

    Returns:
        The recorder, whose `close()` ends it earlier.
    """
    recorder = Recorder(strategy_or_module, Path(folder), steps, another_rounding)
    recorder.whole_module = whole
    return recorder


class Recorder:
    """What one rank records."""

    def __init__(self, of: "Strategy | nn.Module", folder: Path, steps: int, another_rounding: bool) -> None:
        self._of, self._folder, self._steps = of, folder, steps
        self._rank, self._ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._module = subject.module_of(of)
        self._step, self._order = 0, 0
        self.run_facts: dict[str, Any] = {}  # more facts of the run
        self.whole_module: str | None = None
        self._undo: list[Callable[[], None]] = []
        self._randomness = torch.Generator().manual_seed(17) if another_rounding else None
        parts = of.model_parallel if isinstance(of, Strategy) else None
        self._micro_batches = MicroBatches(
            isinstance(of, Strategy) and of.is_in_pipeline, parts.part_of_tokens if parts else None
        )
        self._open()
        for _, part in subject.state(of):
            self._add_part(store.START, part)
        self._hook_modules()
        if isinstance(of, Strategy):
            self._hook_strategy(of)
        else:
            self._hook_optimizers()
        self._is_over, self._optimizers = False, 0  # updated, not yet read; optimizers within one another that step
        self._hook_clipping()

    def close(self) -> None:
        """Stop recording, and leave nothing behind in the loop."""
        atexit.unregister(self.close)
        self._end_step()
        while self._undo:
            self._undo.pop()()

    # A step -----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self._rows, self._order, self._tensors = store.Rows(), 0, dict[str, list[Tensor]]()
        self._facts: dict[str, Any] = {"norms": [], "masks": {}}
        self._read = set[str]()  # gradients
        self._micro_batches.begin_step()

    def _before_update(self, optimizer: torch.optim.Optimizer | None) -> None:
        for part in subject.gradients(self._of, optimizer, self._read):  # of a second optimizer: the rest
            self._add_part(store.GRADIENT, part)
            self._read.add(part[0])
        if optimizer is not None:
            of_all = self._facts.setdefault("optimizer", {})
            of_all |= subject.settings(optimizer, self._module)

    def _end_step(self) -> None:
        """Read what the step has made, as late as possible: a loop may send or average parameters after `step()`."""
        if not self._is_over:
            return
        self._is_over = False
        for is_buffer, part in subject.state(self._of):
            self._add_part(store.BUFFER if is_buffer else store.PARAMETER, part)
        facts = (
            self._facts
            | self.run_facts
            | {
                "ranks": self._ranks,
                "keys": [batch.keys for batch in self._micro_batches.of_step],
                "tokens": [batch.tokens for batch in self._micro_batches.of_step],
                "has_positions": self._micro_batches.at(0).has_positions,
                "in_training": sorted(subject.plain(n) for n, m in self._module.named_modules() if m.training),
                "ties": subject.ties(self._module),
                "hooked": subject.hooked(self._of),
                "kinds": {subject.plain(name): type(m).__name__ for name, m in self._module.named_modules()},
                "dtypes": {subject.plain(n): str(p.dtype)[6:] for n, p in self._module.named_parameters()},
                "frozen": [subject.plain(n) for n, p in self._module.named_parameters() if not p.requires_grad],
            }
        )
        facts["norms"] = [float(norm) for norm in facts["norms"]] or subject.norms(self._of)
        facts["masks"] = {name: [int(number) for number in drawn] for name, drawn in facts["masks"].items()}
        store.write(self._folder, self._rank, self._step, self._rows, facts, self._tensors)
        self._step += 1
        self._open()
        if self._step == self._steps:
            self.close()

    def _add_part(self, kind: str, of: subject.Part) -> None:
        name, part, shape, numbers = of
        self._add(numbers[None], [store.WHOLE], kind, name, 0, [prod(shape)], "", part)

    def _add(
        self,
        numbers: Tensor,
        keys: list[int],
        kind: str,
        name: str,
        call: int,
        elements: list[int],
        dtype: str,
        part: int = -1,
    ) -> None:
        self._order += 1
        columns = {"kind": kind, "name": name, "call": call, "micro_batch": self._micro_batches.number, "part": part}
        self._rows.add(numbers, keys, elements, **columns, order=self._order, dtype=dtype)

    # Modules ----------------------------------------------------------------------------------------------------------

    def _hook_modules(self) -> None:
        root = self._module
        self._undo.append(root.register_forward_pre_hook(self._begin_forward, with_kwargs=True, prepend=True).remove)
        inside: set[nn.Module] = set()
        for module in root.modules():
            if getattr(module, "_compiled_call_impl", None) is not None:
                inside |= set(module.modules()) - {module}
        for name, module in root.named_modules():
            if module not in inside:
                hook = torch.compiler.disable(self._forward_hook(subject.plain(name), module))
                self._undo.append(module.register_forward_hook(hook, always_call=False).remove)
        self._undo.append(root.register_forward_hook(lambda *_: self._micro_batches.end()).remove)

    def _begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._end_step()
        if self._is_trained() and self._undo:
            self._micro_batches.begin(args, kwargs)

    def _is_trained(self) -> bool:
        """Whether the call is of training, and no recomputation in backward."""
        return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1

    def _forward_hook(self, name: str, module: nn.Module) -> Callable[..., Any]:
        is_leaf, is_dropout = not any(True for _ in module.children()), type(module).__name__.startswith("Dropout")

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            with torch._C.DisableTorchFunctionSubclass():  # of other stages of a pipeline, too
                return read(module, args, output)

        def read(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not (self._micro_batches.inside and self._is_trained()):
                return None
            if self._randomness is not None and is_leaf and isinstance(output, Tensor):
                output = self._rounded(output)
            call = self._micro_batches.call(name)
            tensors = [value for value in tree_leaves(_values(output)) if isinstance(value, Tensor)]
            number = self._micro_batches.number
            for index, tensor in enumerate(tensors):
                if tensor.is_floating_point():
                    self._add_output(name if index == 0 else f"{name}#{index}", call, tensor, number)
            if tensors and tensors[0].requires_grad and call == 0:
                self._add_shares(name, module, tensors[0], number)
            if is_dropout and tensors and args and module.training:
                drawn = ((tensors[0] == 0) & (args[0] != 0)).flatten()[None].int()
                self._facts["masks"].setdefault(name, []).append(sketch.fingerprints([drawn.T.reshape(1, -1)])[0])
            return output if self._randomness is not None and is_leaf and isinstance(output, Tensor) else None

        return hook

    def _rounded(self, output: Tensor) -> Tensor:
        if not output.is_floating_point() or not output.numel():
            return output
        noise = torch.randint(-1, 2, output.shape, generator=self._randomness, dtype=torch.int8)
        return output * (1 + torch.finfo(output.dtype).eps * noise.to(output.device)).to(output.dtype)

    def _add_output(self, name: str, call: int, tensor: Tensor, number: int) -> None:
        self._add_tensor(store.OUTPUT, name, call, tensor.detach(), number)
        if tensor.requires_grad and tensor.dim():  # of a scalar it says nothing: each rank has one of its own samples
            tensor.register_hook(
                lambda gradient: self._add_tensor(store.OUTPUT_GRADIENT, name, call, gradient.detach(), number)
            )

    def _add_shares(self, name: str, module: nn.Module, output: Tensor, number: int) -> None:
        """What each sample adds to the gradient of a bias, which is the sum of its output's gradients, or of the weight
        of a norm without one, whose output is that weight x something."""
        of = "weight" if getattr(module, "bias", None) is None else "bias"
        parameter = getattr(module, of, None)
        if type(parameter) is not nn.Parameter or output.shape[-1:] != parameter.shape:
            return
        size = parameter.numel()  # an engine may take its elements before backward
        by = None if of == "bias" else (output.detach() / parameter.detach()).nan_to_num(0.0, 0.0, 0.0)

        def add(gradient: Tensor) -> None:
            products = gradient.detach() if by is None else gradient.detach() * by
            rows, keys, _ = rows_of(products, self._micro_batches.at(number))
            if rows.shape[1] % size == 0:  # else of one sample, with as many features as there are samples
                shares = rows.double().view(len(rows), -1, size).sum(1)
                self._add(sketch.of_rows(shares), keys, store.SHARE, f"{name}.{of}", 0, [size] * len(keys), "float64")

        output.register_hook(add)

    def _add_tensor(self, kind: str, name: str, call: int, tensor: Tensor, number: int) -> None:
        local = subject.local(tensor)
        if name == self.whole_module:
            self._tensors.setdefault(kind, []).append(local.cpu().clone())
        rows, keys, elements = rows_of(local, self._micro_batches.at(number))
        now, self._micro_batches.number = self._micro_batches.number, number
        self._add(sketch.of_rows(rows), keys, kind, name, call, elements, str(local.dtype)[6:])
        self._micro_batches.number = now

    # The loop's own calls ---------------------------------------------------------------------------------------------

    def _hook_strategy(self, strategy: Strategy) -> None:
        forward_backward, step, clip = strategy.forward_backward, strategy.step, strategy.clip_grad_norm_

        def watched_forward_backward(micro_batches: Any, *args: Any, **kwargs: Any) -> Tensor:
            self._micro_batches.know(micro_batches)
            loss = forward_backward(micro_batches, *args, **kwargs)
            self._facts["loss"] = float(loss)
            return loss

        def watched_step(*args: Any, **kwargs: Any) -> None:
            self._before_update(strategy.optimizer if isinstance(strategy.optimizer, torch.optim.Optimizer) else None)
            step()
            strategy.finish_parameter_synchronization()
            self._is_over = True
            self._end_step()

        def watched_clip(max_norm: float) -> Tensor:
            norm = clip(max_norm)
            self._facts["norms"].append(norm.detach())
            return norm

        hooks = {"forward_backward": watched_forward_backward, "step": watched_step, "clip_grad_norm_": watched_clip}
        for name, function in hooks.items():
            setattr(strategy, name, function)
            self._undo.append(lambda name=name: delattr(strategy, name))  # type: ignore[misc]

    def _hook_optimizers(self) -> None:
        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._optimizers += 1
            if self._optimizers == 1:  # ZeroRedundancyOptimizer has another within
                self._before_update(optimizer)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._optimizers -= 1
            self._is_over = self._optimizers == 0

        atexit.register(self.close)

        self._undo += [
            register_optimizer_step_pre_hook(before).remove,
            register_optimizer_step_post_hook(after).remove,
        ]

    def _hook_clipping(self) -> None:
        clip = torch.nn.utils.clip_grad_norm_

        @wraps(clip)
        def watched(*args: Any, **kwargs: Any) -> Any:
            norm = clip(*args, **kwargs)
            self._facts["norms"].append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm.detach())
            return norm

        torch.nn.utils.clip_grad_norm_ = watched
        self._undo.append(lambda: setattr(torch.nn.utils, "clip_grad_norm_", clip))


def _values(output: Any) -> Any:
    return list(output.values()) if isinstance(output, Mapping) else vars(output) if hasattr(output, "loss") else output

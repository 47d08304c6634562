"""The tensors in what a module takes and answers."""

from collections.abc import Callable
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in a tree of containers: those that torch knows, dataclasses, and `SimpleNamespace`."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif has_fields(leaf):
            found += tensors_in(vars(leaf))
    return found


def has_fields(leaf: Any) -> bool:
    return isinstance(leaf, SimpleNamespace) or (is_dataclass(leaf) and not isinstance(leaf, type))


def first_of(args: Any, kwargs: dict[str, Any]) -> Any:
    """The first argument of a module, None without any: of a block, the hidden states."""
    return args[0] if args else kwargs[_first_name(kwargs)] if kwargs else None


def with_first(args: Any, kwargs: dict[str, Any], change: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """The same arguments, the first of them changed."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = _first_name(kwargs)
    return args, {**kwargs, name: change(kwargs[name])}


def _first_name(kwargs: dict[str, Any]) -> str:
    return "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))


class TensorsBeside(nn.Module):
    """Answers with the tensors in what `module` answers, and with the answer itself. PyTorch DDP and FSDP2 look for
    tensors that backward begins with in few containers; the list is one of them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> tuple[list[Tensor], Any]:
        answer = self.module(*args, **kwargs)
        return tensors_in(answer), answer

"""The tensors in what a module takes and answers."""

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
        elif isinstance(leaf, SimpleNamespace) or (is_dataclass(leaf) and not isinstance(leaf, type)):
            found += tensors_in(vars(leaf))
    return found


class TensorsBeside(nn.Module):
    """Answers with the tensors in what `module` answers, and with the answer itself. PyTorch DDP and FSDP2 look for
    tensors that backward begins with in few containers; the list is one of them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> tuple[list[Tensor], Any]:
        answer = self.module(*args, **kwargs)
        return tensors_in(answer), answer

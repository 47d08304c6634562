"""Modules: hooks that a strategy leaves in them, what happens to them behind its back, their blocks, and the tensors in
what they take and answer."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._pytree import tree_leaves

from ddp_lab.runtime.errors import UnsupportedError


class NoHook:
    """What a copied module has in place of a hook."""

    def __call__(self, *_: object, **__: object) -> None: ...


class ModuleHook:
    """A hook of a strategy on a module. A copy of the module, and one that is saved by `torch.save`, do not have it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> NoHook:
        return NoHook()

    def __reduce__(self) -> Any:
        return NoHook, ()


class InShards:
    """A hook before `state_dict` of a module whose parameters are in shards. Copying and saving the module is refused,
    too. This package reads names alone: with `keep_vars=True`, or where `names_alone`."""

    names_alone = False

    def __call__(self, _: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not (keep_vars or self.names_alone):
            self.refuse()

    def refuse(self, *_: object) -> NoReturn:
        raise UnsupportedError(
            "the module's parameters are in shards, and NaN between steps: neither state_dict(), a copy nor torch.save "
            "has their values; call strategy.full_state_dict() on all ranks, and load it into a module of its own"
        )

    __deepcopy__ = __reduce__ = refuse


@contextmanager
def names_alone() -> Iterator[None]:
    """Within this context somebody else's code reads the names of `state_dict`, and takes the values from elsewhere."""
    InShards.names_alone = True
    try:
        yield
    finally:
        InShards.names_alone = False


def keep_from_being_read(module: nn.Module) -> None:
    """Refuse to read parameters that are in shards from now on."""
    for part in module.modules():
        if next(part.parameters(recurse=False), None) is not None:
            part.register_state_dict_pre_hook(InShards())


def require_readable(module: nn.Module) -> None:
    """Raises:
    UnsupportedError: another strategy keeps the parameters in shards.
    """
    if any(isinstance(hook, InShards) for part in module.modules() for hook in part._state_dict_pre_hooks.values()):
        raise UnsupportedError(
            "another strategy keeps this module's parameters in shards; build a module of its own for each, and take "
            "the weights over by full_state_dict and load_full_state_dict"
        )


_names: weakref.WeakKeyDictionary[nn.Module, tuple[str, "weakref.ref[Any]"]] = weakref.WeakKeyDictionary()


def refuse_new_parameters(strategy: Any) -> None:
    """Refuse parameters that come into the module of `strategy` from now on, as long as it exists. No rank would
    reduce their gradients."""
    for name, part in strategy.module.named_modules():
        _names[part] = name, weakref.ref(strategy)


def _on_registration(module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
    path, holder = _names.get(module, ("", lambda: None))
    if value is None or (strategy := holder()) is None:
        return
    new = value.parameters() if isinstance(value, nn.Module) else [value]
    if not {*new} <= {*strategy.trainable.values(), *strategy.frozen.values()}:
        raise UnsupportedError(
            f"{path}.{name}".removeprefix(".") + " has parameters that came into the module after the strategy was "
            "built, which would neither reduce nor update them; change the module first, and build the strategy then"
        )


register_module_module_registration_hook(_on_registration)
register_module_parameter_registration_hook(_on_registration)


# The blocks of a model, found without naming any model: the modules that repeat ---------------------------------------


def uses_of_parameters(module: nn.Module) -> Counter[int]:
    """By id of a parameter: how many modules hold it. A tied weight has more than one."""
    return Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))


def find_blocks(module: nn.Module, may_share: bool = False) -> list[nn.Module]:
    """The outermost modules that repeat, in registration order: at least two of a class in one list or sequence, those
    that are on other ranks among them (`stands_for`).

    A module that shares a parameter with a module outside it is not a block: the parameter is needed elsewhere, too.

    Args:
        may_share: It is one if these are others of its list alone, or it stands there twice.
    """
    uses, blocks = uses_of_parameters(module), []
    for holder, block in _repeated_children(module):
        inside = uses_of_parameters(holder if may_share else block)
        if all(uses[key] == inside[key] for key in uses_of_parameters(block)):
            blocks.append(block)
    return blocks


def parts_around(module: nn.Module, blocks: set[nn.Module], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules below `module` that are a block or contain no block, by each of their names."""
    first_names = dict(module.named_children())
    for name, child in module._modules.items():
        if child is not None and (child in blocks or blocks.isdisjoint(child.modules())):
            yield path + name, child
        elif child is not None and name in first_names:
            yield from parts_around(child, blocks, f"{path}{name}.")


def _repeated_children(parent: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
    kinds = {child: getattr(child, "stands_for", type(child)) for child in parent.children()}
    holders = [child for child in kinds if kinds[child] is not type(child) or any(True for _ in child.parameters())]
    members = [child for child in parent._modules.values() if child in holders]
    classes = Counter(kinds[c] for c in members) if isinstance(parent, nn.ModuleList | nn.Sequential) else Counter()
    for child in holders:
        if classes[type(child)] >= 2:
            yield parent, child
        else:
            yield from _repeated_children(child)


# The tensors in what a module takes and answers -----------------------------------------------------------------------


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in a tree of containers: those that torch knows, dataclasses, and `SimpleNamespace`."""
    if isinstance(tree, Tensor):
        return [tree]
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif has_fields(leaf):
            tensors += tensors_in(vars(leaf))
    return tensors


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

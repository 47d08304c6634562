"""What a strategy leaves in its user's module, and what happens to a module behind a strategy's back."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

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


def _on_registration(module: nn.Module, name: str, given: nn.Module | nn.Parameter | None) -> None:
    path, holder = _names.get(module, ("", lambda: None))
    if given is None or (strategy := holder()) is None:
        return
    new = given.parameters() if isinstance(given, nn.Module) else [given]
    if not {*new} <= {*strategy.trainable.values(), *strategy.frozen.values()}:
        raise UnsupportedError(
            f"{path}.{name}".removeprefix(".") + " has parameters that came into the module after the strategy was "
            "built, which would neither reduce nor update them; change the module first, and build the strategy then"
        )


register_module_module_registration_hook(_on_registration)
register_module_parameter_registration_hook(_on_registration)

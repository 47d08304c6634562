"""Strategies by name. A strategy's module is imported only when it is asked for."""

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from ddp_lab.runtime.errors import UserError

if TYPE_CHECKING:
    from ddp_lab.strategy.model_parallel import ModelParallel
    from ddp_lab.strategy.strategy import Strategy

HOOK = "DDP_LAB_HOOK"
"""Names a function, `package.module:function`, that a run calls with its strategy before it trains."""


class Registry:
    """Names in display order, each with where its class is and a sentence on what it does.

    Args:
        entries: `{name: ("package.module:Class", sentence)}`.
        extras: `{name: extra}` for those that need an optional extra of this project. An extra has the name of the
            package that it installs.
        parallelize: `package.module:function` that cuts a model over a mesh (`load_parallelize`), by choice; under ""
            for those that are not named.
        on_legacy_nccl: A sweep also runs these over torch's older NCCL class, where it is not the default: references
            that take another time over the newer one (docs/status.md), and what they are compared with.
        not_swept: Variants that a sweep leaves out.

    Attributes:
        names: The strategies whose packages are installed.
        sentences: For every strategy by name, what `--help` says of it.
        missing: For strategies whose package is not installed, by name: the command that installs it.
    """

    def __init__(
        self,
        entries: Mapping[str, tuple[str, str]],
        extras: Mapping[str, str] | None = None,
        on_legacy_nccl: tuple[str, ...] = (),
        parallelize: Mapping[str, str] | None = None,
        not_swept: tuple[str, ...] = (),
    ) -> None:
        self.on_legacy_nccl, self._not_swept = on_legacy_nccl, not_swept
        self._parallelize = dict(parallelize or {})
        extra_of = (extras or {}).items()
        self.missing = {name: f"uv sync --extra {extra}" for name, extra in extra_of if find_spec(extra) is None}
        self._locations = {name: location for name, (location, _) in entries.items()}
        self.sentences = {
            name: sentence + (f" (not installed: {self.missing[name]})" if name in self.missing else "")
            for name, (_, sentence) in entries.items()
        }
        self.names = tuple(name for name in entries if name not in self.missing)

    def __or__(self, other: "Registry") -> "Registry":
        """The strategies of both. A name in both is `self`'s, but `other` may say how it cuts a model."""
        joined = Registry({}, on_legacy_nccl=(*self.on_legacy_nccl, *other.on_legacy_nccl))
        joined._not_swept = (*self._not_swept, *other._not_swept)
        joined.names = tuple(dict.fromkeys((*self.names, *other.names)))
        joined.sentences = self.sentences | {n: s for n, s in other.sentences.items() if n not in self.sentences}
        joined.missing = other.missing | self.missing
        joined._locations = other._locations | self._locations
        joined._parallelize = {
            name: of._parallelize.get(name, of._parallelize[""])
            for of in (self, other)
            for name in of.sentences
            if name in of._parallelize or "" in of._parallelize
        }
        return joined

    @property
    def swept(self) -> list[str]:
        """What a sweep runs: `names`, but for variants."""
        return [name for name in self.names if name not in self._not_swept]

    def location(self, name: str) -> str:
        """Where the class of a strategy is: `package.module:Class`."""
        return self._locations[name]

    def load(self, name: str) -> "type[Strategy]":
        """The class of a strategy.

        Raises:
            KeyError: no strategy has this name.
            UserError: what it needs is not installed; says how to install it.
        """
        if name in self.missing:
            raise UserError(f"strategy '{name}' is not installed; run: {self.missing[name]}")
        return found_at(self._locations[name])

    def load_parallelize(self, name: str) -> "Callable[..., ModelParallel]":
        """What cuts a model over the ranks of a mesh for this strategy: a `ddp_lab.runtime.build.Parallelize`.

        Raises:
            UserError: nothing does here.
        """
        location = self._parallelize.get(name, self._parallelize.get(""))
        return refuse_tensor_parallelism(name) if location is None else found_at(location)


def refuse_tensor_parallelism(name: str) -> NoReturn:
    """What `Registry.load_parallelize` does where nothing cuts layers."""
    raise UserError(f"--mesh with tp, pp, cp or ep: {name} cuts nothing here; take main_parallel.py")


def found_at(location: str) -> Any:
    """What is at `package.module:name`."""
    module, _, attribute = location.partition(":")
    return getattr(importlib.import_module(module), attribute)

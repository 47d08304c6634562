"""Training starts seconds earlier: torch's compiler, which nobody asked for, is imported when somebody does.

An optimizer of torch imports `torch._dynamo` when it is made, only to tell it that its methods are not to be compiled,
and a profiler imports `torch._inductor` when it begins, to look whether that uses CUDA graphs. Both take about five
seconds of processor time a rank (torch 2.15). Until something else of them is wanted, a stand-in answers what an eager
program needs.
"""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "torch._dynamo"
IMPORTED_UNASKED: set[str] = getattr(torch, "_lazy_modules", set())
"""Modules that `torch.NAME` imports."""


class LazyCompiler(types.ModuleType):
    """Stands for `torch._dynamo` until more is asked of it than not to compile."""

    def graph_break(self, msg: str = "") -> None:
        """There is no graph."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **settings: Any) -> Any:
        """`fn` itself, since nothing is compiled. Where it decorates with other settings, the real one answers."""
        return fn if fn is not None and recursive else self.__getattr__("disable")(fn, recursive, **settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # whoever looks through all modules wants nothing of this one
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            self.leave()
            importlib.import_module(NAME)
        return getattr(sys.modules[NAME], name)

    def enter(self) -> None:
        sys.modules[NAME] = torch._dynamo = self
        IMPORTED_UNASKED.discard("_inductor")

    def leave(self) -> None:
        del sys.modules[NAME], torch._dynamo
        IMPORTED_UNASKED.add("_inductor")


@contextmanager
def compiler_postponed() -> Iterator[None]:
    """Enter before the first optimizer is made, and after the process group: making one asks for the real module if
    there seems to be one. Does nothing where the compiler has been imported."""
    stand_in = LazyCompiler(NAME)
    if NAME not in sys.modules:
        stand_in.enter()
    try:
        yield
    finally:
        if sys.modules[NAME] is stand_in:
            stand_in.leave()

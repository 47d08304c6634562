"""Imports torch's compiler only when something uses it, so that training starts seconds earlier.

A torch optimizer imports `torch._dynamo` when it is created, only to mark its methods as not compiled. A profiler
imports `torch._inductor` when it starts, to see whether it uses CUDA graphs. Together they take about five seconds of
CPU time per rank (torch 2.15). A stand-in answers what an eager program needs, until a program needs the compiler.
"""

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "torch._dynamo"
LAZY_MODULES: set[str] = getattr(torch, "_lazy_modules", set())
"""Names of modules that torch imports when `torch.NAME` is used."""


class LazyCompiler(types.ModuleType):
    """Replaces `torch._dynamo` until a program uses more of it than "do not compile"."""

    def graph_break(self, msg: str = "") -> None:
        """Does nothing: there is no graph."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **settings: Any) -> Any:
        """`fn` itself, since nothing is compiled. With other settings, what the real module returns."""
        return fn if fn is not None and recursive else self.__getattr__("disable")(fn, recursive, **settings)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspection of all modules, not use of this one
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            self.leave()
            importlib.import_module(NAME)
        return getattr(sys.modules[NAME], name)

    def enter(self) -> None:
        sys.modules[NAME] = torch._dynamo = self
        LAZY_MODULES.discard("_inductor")

    def leave(self) -> None:
        del sys.modules[NAME], torch._dynamo
        LAZY_MODULES.add("_inductor")


@contextmanager
def compiler_postponed() -> Iterator[None]:
    """Within this context the compiler is imported only when something uses it.

    Enter it before the first optimizer is created, and after the process group, whose creation would import the real
    module. Does nothing if the compiler is imported already.
    """
    stand_in = LazyCompiler(NAME)
    if NAME not in sys.modules:
        stand_in.enter()
    try:
        yield
    finally:
        if sys.modules[NAME] is stand_in:
            stand_in.leave()

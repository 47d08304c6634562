"""Imports torch's compiler only when something uses it, so that training starts seconds earlier.

A torch optimizer imports `torch._dynamo` when it is created, only to mark its methods as not compiled. transformers
(5.23) marks functions too, and imports one small module of it. A profiler imports `torch._inductor` when it starts, to
see whether it uses CUDA graphs. Together they take about five seconds of CPU time per rank (torch 2.15). A stand-in
answers what an eager program needs, until a program needs the compiler, which then gets the marks.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

NAME = "torch._dynamo"
OF_TRANSFORMERS = f"{NAME}._trace_wrapped_higher_order_op"
"""A module that works without the compiler around it."""
LAZY_MODULES: set[str] = getattr(torch, "_lazy_modules", set())
"""Names of modules that torch imports when `torch.NAME` is used."""


class LazyCompiler(types.ModuleType):
    """Replaces `torch._dynamo` until a program uses more of it than "do not compile", and marks of functions."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._marks: list[tuple[str, Callable[..., Any]]] = []

    def graph_break(self, msg: str = "") -> None:
        """Does nothing: there is no graph."""

    def disable(self, fn: Callable[..., Any] | None = None, recursive: bool = True, **settings: Any) -> Any:
        """`fn` itself, since nothing is compiled; without one, a decorator."""
        if fn is None:
            return lambda later: self.disable(later, recursive)
        return fn if recursive else self._mark("skip", fn)

    def assume_constant_result(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return self._mark("assume_constant_result", fn)

    def allow_in_graph(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return self._mark("allow_in_graph", fn)

    def _mark(self, how: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        self._marks.append((how, fn))
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # inspection of all modules, not use of this one
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            self.leave()
            importlib.import_module(NAME)
            for how, fn in self._marks:
                getattr(sys.modules[f"{NAME}.decorators"], how)(fn)
        return getattr(sys.modules[NAME], name)

    def enter(self) -> None:
        sys.modules[NAME] = torch._dynamo = self
        LAZY_MODULES.discard("_inductor")
        file = Path(torch.__file__).parent / "_dynamo" / f"{OF_TRANSFORMERS.rpartition('.')[2]}.py"
        spec = importlib.util.spec_from_file_location(OF_TRANSFORMERS, file)
        if file.is_file() and spec and spec.loader:
            sys.modules[OF_TRANSFORMERS] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)

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

"""Operators of torch that do what Python tells them to, so that a profile shows them, with shapes, on any thread.

`record_function` shows no shapes, and on threads that torch has not started it needs a profile of all threads
(`profile_all_threads`), as these do.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
NAMESPACE = "paced"
OPERATORS = {
    **dict.fromkeys(
        ("all_reduce", "all_gather", "broadcast", "scatter", "gather", "all_to_all", "barrier", "send", "recv"),
        "Tensor? shown",
    ),
    "_reduce_scatter_base_": "Tensor output, Tensor whole",
}
"""Name and arguments."""
_doing = threading.local()
_library = torch.library.Library(NAMESPACE, "DEF")
for _name, _arguments in OPERATORS.items():
    _library.define(f"{_name}({_arguments}) -> ()")
    _library.impl(_name, lambda *_: _doing.now(), "CompositeExplicitAutograd")


def as_operator(name: str, tensors: tuple[Tensor | None, ...], do: Callable[[], Result]) -> Result:
    """What `do` returns, called within the operator `paced::<name>` of these tensors."""
    results: list[Result] = []
    _doing.now = lambda: results.append(do())
    try:
        getattr(getattr(torch.ops, NAMESPACE), name)(*tensors)
    finally:
        del _doing.now  # it holds tensors
    return results[0]

"""What a regular expression cannot say: predicates over facts from several lines, files and ranks, by name."""

from collections.abc import Callable
from inspect import isfunction

from ddp_lab.doctor.facts import Facts, Match
from ddp_lab.doctor.predicates import answers, failures, local, network, program

PREDICATES: dict[str, Callable[[Facts], Match | None]] = {
    name: value
    for module in (program, failures, network, local, answers)
    for name, value in vars(module).items()
    if isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
}
"""All public functions of the modules."""

"""The table of flags: a flag is a field of a frozen dataclass, and its metadata is all that command line, docs, checks,
checkpoints, records and comparisons know of it.

Imports nothing heavy, so that `--help` answers at once.
"""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_args

from ddp_lab.runtime.errors import UserError, require

GROUPS = ("model and data", "mesh", "batch", "precision", "memory", "communication", "profiling", "checkpoints", "run")
"""The headings of `--help`, in order."""
AUTO = "auto"
MUST_EQUAL, MAY_DIFFER = "must equal", "may differ"
"""For a run that resumes: the flag decides the results of its steps, or only how they are computed, and how many."""
TIME, MEMORY, TRAFFIC, LOSS, TRACES = "step times", "memory", "traffic", "losses", "figures of traces"
EVERYTHING = (TIME, MEMORY, TRAFFIC, LOSS)
T = TypeVar("T")


class Condition(NamedTuple):
    """What a flag may need or exclude.

    Attributes:
        text: The settings under which it holds, as it follows "must be with" or "must be without".
        names: Fields. It holds if `test` does for the value of one of them.
        reason: Why, for the user.
        of: The flag's values that it is about. Default: all but the flag's default.
    """

    text: str
    names: tuple[str, ...]
    test: Callable[[Any], bool]
    reason: str = ""
    of: tuple[Any, ...] = ()

    def because(self, reason: str, of: tuple[Any, ...] = ()) -> "Condition":
        return self._replace(reason=reason, of=of)


def is_given(value: Any) -> bool:
    return value not in (None, False, "none")


def given(*names: str) -> Condition:
    """One of these flags is given."""
    return Condition(" or ".join(map(flag_name, names)), names, is_given)


def has_value(name: str, value: str) -> Condition:
    return Condition(f"{flag_name(name)} {value}", (name,), lambda setting: bool(setting == value))


def flag(
    group: str,
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    at_least: float | None = None,
    normal: Callable[[Any], Any] | None = None,
    metavar: str | None = None,
    alone: Any = None,
    needs: Collection[Condition] = (),
    excludes: Collection[Condition] = (),
    unsupported: str = "",
    resume: str | None = None,
    affects: Collection[str] = (),
    head: str | Mapping[str, str] = "",
    trials: Sequence[Any] = (),
) -> Any:
    """A field, and its flag.

    Args:
        group: One of `GROUPS`.
        choices: The values that it takes, if they are few.
        at_least: The least value. Default: 1 for whole numbers; other numbers are above 0.
        normal: The form in which a value is kept, wherever it comes from. Raises `UserError`.
        metavar: What stands for the value in `--help`. Default: the choices, or by the field's type.
        alone: The value of the flag when no value follows it. Default: a value must follow.
        needs: All of them must hold where the flag has another value than its default; of `excludes`, none.
        unsupported: Of a strategy's option, what a strategy says that cannot take it (`Supports`).
        resume: `MUST_EQUAL` or `MAY_DIFFER`. Default: it changes no step.
        affects: Figures that cannot be compared if it differs.
        head: What a report says of a run that has it, with fields of the record's config in braces; or by value.
        trials: Values that tests try, where choices and limits do not give them.
    """
    metadata = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(settings: Any) -> "list[dataclasses.Field[Any]]":
    """The fields of a dataclass, or of an instance, that are flags."""
    return [field for field in dataclasses.fields(settings) if "group" in field.metadata]


def kind_of(field: "dataclasses.Field[Any]") -> type:
    """The type of a flag's value, where it has one."""
    kind: type = (get_args(field.type) or (field.type,))[0]
    return kind


def flag_name(field_name: str) -> str:
    """The flag of a field."""
    return "--ddp-choice" if field_name == "choice" else "--" + field_name.replace("_", "-")


def check_values(settings: Any) -> None:
    """Bring the values of a frozen dataclass into their normal form, and check each."""
    for field in flags_of(settings):
        value, name, about = getattr(settings, field.name), flag_name(field.name), field.metadata
        if value is None:
            continue
        if about["choices"]:
            require(value in about["choices"], name, value, f"one of {', '.join(about['choices'])}")
        if about["normal"]:
            object.__setattr__(settings, field.name, about["normal"](value))
        elif kind_of(field) is int:
            least, most = 1 if about["at_least"] is None else about["at_least"], 2**32 - 1
            require(least <= value <= most, name, value, f"a whole number from {least} to {most}")
        elif kind_of(field) is float and about["at_least"] is None:
            require(0 < value < float("inf"), name, value, "a number above 0")
        elif kind_of(field) is float:
            least = about["at_least"]
            require(least <= value < float("inf"), name, value, f"a number of at least {least}")


def check_combinations(fields: "Sequence[dataclasses.Field[Any]]", values: Mapping[str, Any]) -> None:
    """Check what `fields` need and exclude. Conditions on what is not in `values` are left out."""
    for field in fields:
        value, about = values[field.name], field.metadata
        for condition in (*about["needs"], *about["excludes"]):
            concerns = value in condition.of if condition.of else value != field.default
            if not concerns or not values.keys() >= {*condition.names}:
                continue
            is_needed = condition in about["needs"]
            if is_needed != any(condition.test(values[name]) for name in condition.names):
                on_mesh = "--mesh and " if "mesh" in condition.names else ""
                requirement = f"with {on_mesh}{condition.text}" if is_needed else f"without {condition.text}"
                requirement += f", {condition.reason}" if condition.reason else ""
                require(False, flag_name(field.name), "" if value is True else value, requirement)


def argument(read: Callable[[str], T]) -> Callable[[str], T]:
    """A type of a flag for argparse, of a function that raises `UserError`."""

    def read_argument(text: str) -> T:
        try:
            return read(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_argument

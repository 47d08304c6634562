"""The labels of a classification data set, found in the data: names or whole numbers, whatever they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_lab.runtime.errors import UserError

LISTED = 10


@dataclass(frozen=True)
class Labels:
    """Labels in the order of the classes.

    Attributes:
        values: As the data have them.
        names: As a person reads them.
    """

    values: tuple[Any, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, data: Any, column: str, where: str) -> "Labels":
        """Those of a column of a `datasets.Dataset`: all that a ClassLabel names, or else the values found, sorted.

        Raises:
            UserError: the column has lists, fractions or fewer than two labels. Begins with `where`.
        """
        from datasets import ClassLabel, Value

        feature = data.features[column]
        if isinstance(feature, ClassLabel):
            names = tuple(feature.names)
            return cls(tuple(range(len(names))), names)
        if not isinstance(feature, Value):
            raise UserError(f"{where}: column {column} holds {feature}; a label is a name or a whole number")
        found = [value for value in data.unique(column) if value is not None]
        if fractions := [value for value in found if isinstance(value, float) and not value.is_integer()]:
            raise UserError(f"{where}: column {column} has {fractions[0]}; a label is a name or a whole number")
        if len(found) < 2:
            raise UserError(f"{where}: column {column} has {cls._line(found)}; classification needs two labels or more")
        values = tuple(sorted(found))
        return cls(values, tuple(str(int(value) if isinstance(value, float) else value) for value in values))

    @property
    def numbers(self) -> dict[Any, int]:
        """The number of each value's class."""
        return {value: number for number, value in enumerate(self.values)}

    def in_order_of(self, head: Mapping[str, int]) -> "Labels":
        """In the order of a model's head if that has the same names, so that a trained head is kept as it is."""
        if set(head) != set(self.names):
            return self
        pairs = sorted(zip(self.values, self.names, strict=True), key=lambda pair: head[pair[1]])
        return Labels(tuple(value for value, _ in pairs), tuple(name for _, name in pairs))

    def listing(self) -> str:
        """The values, or the first few of them."""
        return self._line(self.values)

    @staticmethod
    def _line(values: Any) -> str:
        shown = ", ".join(map(repr, values[:LISTED])) or "no label"
        return shown + (f" and {len(values) - LISTED} others" if len(values) > LISTED else "")

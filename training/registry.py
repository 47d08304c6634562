"""Strategies by name. A strategy's module is imported only when it is asked for."""

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.strategy import Strategy


class Registry:
    """Names in display order, each with where its class is and a sentence on what it does.

    Args:
        entries: `{name: ("package.module:Class", sentence)}`.
    """

    def __init__(self, entries: Mapping[str, tuple[str, str]]) -> None:
        self._locations = {name: location for name, (location, _) in entries.items()}
        self.sentences = {name: sentence for name, (_, sentence) in entries.items()}
        self.names = tuple(entries)

    def location(self, name: str) -> str:
        """Where the class of a strategy is: `package.module:Class`."""
        return self._locations[name]

    def load(self, name: str) -> "type[Strategy]":
        """The class of a strategy.

        Raises:
            KeyError: no strategy has this name.
        """
        module, _, attribute = self._locations[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

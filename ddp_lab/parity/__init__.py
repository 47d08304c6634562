"""Which quantity of a run differs first from that of another: `ddp-lab parity`, and `watch` for loops of your own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_lab.parity.recorder import watch

__all__ = ["watch"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ddp_lab.parity' has no attribute '{name}'")
    from ddp_lab.parity import recorder  # takes torch

    return getattr(recorder, name)

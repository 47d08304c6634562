"""What is known of a collective at one size, once it has been measured. Imports nothing heavy: every rank makes it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """A collective at one size.

    Attributes:
        type_name: Empty for a barrier.
        size: Payload in bytes, by nccl-tests' definition; 0 for a barrier.
        count: Elements, in nccl-tests' sense.
        seconds: Of each timed call, on its slowest rank.
        wrong: Elements over all ranks; None for a barrier.
        pair: Sender and receiver; None where all ranks take part.
    """

    collective: str
    type_name: str
    redop: str
    size: int
    count: int
    seconds: Sequence[float]
    wrong: int | None
    pair: tuple[int, int] | None = None

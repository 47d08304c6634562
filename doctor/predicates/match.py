"""What an evidence-finding function answers."""

from dataclasses import dataclass, field

from doctor.texts import Line


@dataclass(frozen=True)
class Match:
    """Lines to quote, and sentences that say what they mean in this case."""

    lines: list[Line]
    details: list[str] = field(default_factory=list)

"""What `--activation-checkpointing` takes. Imports nothing heavy."""

import argparse
import re
from dataclasses import dataclass

from ddp_lab.runtime.errors import UserError

NONE, SELECTIVE, OP = "none", "selective", "op"
BY_POLICY = (SELECTIVE, OP)
FORMS = "none, block, every:N, selective, op, torch:block or torch:every:N"


@dataclass(frozen=True)
class Recomputation:
    """Which blocks compute again in backward, what, and by whose code.

    Attributes:
        every: Each so many blocks, the first of them; 1: all.
        policy: Which results are kept of what is computed again: one of `BY_POLICY`, or none.
        by_torch: With `torch.utils.checkpoint`, instead of `ddp_lab.strategy.recompute.checkpoint`.
    """

    every: int = 1
    policy: str | None = None
    by_torch: bool = False

    @classmethod
    def parse(cls, text: str) -> "Recomputation | None":
        """What `text` names; None for `none`.

        Raises:
            UserError: it names nothing.
        """
        if text == NONE:
            return None
        if text in BY_POLICY:
            return cls(policy=text, by_torch=True)
        parts = re.fullmatch(r"(torch:)?(?:block|every:([1-9][0-9]*))", text)
        if parts is None:
            raise UserError(f"--activation-checkpointing {text}: must be one of {FORMS}")
        return cls(every=int(parts[2] or 1), by_torch=parts[1] is not None)


def text(given: str) -> str:
    """What the flag takes.

    Raises:
        argparse.ArgumentTypeError: it names nothing.
    """
    try:
        Recomputation.parse(given)
    except UserError:
        raise argparse.ArgumentTypeError(f"'{given}' is none of {FORMS}") from None
    return given

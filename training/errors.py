"""Errors that end a run, and whether every rank raises them."""


class AgreedError(Exception):
    """Raised on every rank alike, or on one that speaks for all: one line says it, and no rank looks for a cause.

    Attributes:
        rank: Where it began, if that is one rank's.
        collective: In which it shows, if it is about one.
        is_said: Whether rank 0 has told the user.
    """

    rank: int | None = None
    collective: str | None = None
    is_said: bool = False


class UserError(AgreedError):
    """Something that the user can put right.

    The message says what is wrong, where, and what to do. Entrypoints print it as one line, without a traceback.
    """


class UnsupportedError(UserError, ValueError):
    """A module or a batch that a strategy cannot train, found before it trains anything wrong."""


class OneRankError(UserError):
    """Raised on one rank, for which the others wait: so that rank prints it, whichever it is, and takes them down."""


class NonFiniteError(AgreedError, RuntimeError):
    """The loss or a gradient is NaN or infinite; raised on every rank, before the optimizer step."""


class SequenceError(AgreedError, RuntimeError):
    """Ranks issued different collectives; raised on every rank, before the optimizer step."""

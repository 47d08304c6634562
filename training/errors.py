"""Errors that a person can act on."""


class UserError(Exception):
    """Something that the user can put right.

    The message says what is wrong, where, and what to do. Entrypoints print it as one line, without a traceback.
    """


class UnsupportedError(UserError, ValueError):
    """A module or a batch that a strategy cannot train, found before it trains anything wrong."""


class OneRankError(UserError):
    """Raised on one rank, for which the others wait: so that rank prints it, whichever it is, and takes them down."""

"""Errors that a person can act on."""


class TraceError(Exception):
    """A trace or run record that cannot be used. The message names the file, what is wrong and what to do."""

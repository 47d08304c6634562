"""One test case for a whole table, where a row takes a moment."""

import inspect
from collections.abc import Callable

import pytest

Test = Callable[..., None]


def by_default(rows, *tried):
    """Parameters of a test, of which all but `tried` are exhaustive."""
    return [pytest.param(row, marks=[pytest.mark.exhaustive] * (row not in tried)) for row in rows]


def each_row(names, table):
    """Takes what `pytest.mark.parametrize` takes, but makes one case, which names every row that fails.

    Each row has its own `tmp_path` and `monkeypatch`. Rows share all other fixtures, so no row may depend on what
    another changed in them.
    """
    fields, rows = (names.split(", ") if isinstance(names, str) else list(names)), list(table)
    assert rows, "no rows"

    def decorate(test):
        def all_rows(**fixtures):
            failures = []
            for index, row in enumerate(rows):
                values = dict(zip(fields, row if len(fields) > 1 else (row,), strict=True))
                row_fixtures = {}
                if "tmp_path" in fixtures:
                    row_fixtures["tmp_path"] = fixtures["tmp_path"] / f"row-{index}"
                    row_fixtures["tmp_path"].mkdir()
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in fixtures:
                        row_fixtures["monkeypatch"] = patch
                    try:
                        test(**values, **{**fixtures, **row_fixtures})
                    except Exception as error:
                        failures.append((values, error))
                        if isinstance(error, TimeoutError):
                            break  # each later row may take as long
            if failures:
                shown = "\n".join(f"{values}\n  {type(error).__name__}: {error}" for values, error in failures[:20])
                raise AssertionError(f"{len(failures)} of {len(rows)} rows fail:\n{shown}") from failures[0][1]

        all_rows.__dict__.update(test.__dict__)  # marks
        all_rows.__name__, all_rows.__doc__, all_rows.__module__ = test.__name__, test.__doc__, test.__module__
        of_test = inspect.signature(test)
        fixtures_only = [parameter for name, parameter in of_test.parameters.items() if name not in fields]
        all_rows.__signature__ = of_test.replace(parameters=fixtures_only)  # type: ignore[attr-defined]
        return all_rows

    return decorate

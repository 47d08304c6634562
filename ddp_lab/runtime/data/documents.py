"""Text of the user's as documents of token ids: files, folders, `save_to_disk` folders and data sets of the hub.

A row of column `text` is a document, and so is a `.txt` file. Rows with columns `prompt` and `completion` are documents
whose prompts are no targets.
"""

from itertools import islice
from math import inf
from typing import Any, NamedTuple

import numpy as np

from ddp_lab.runtime.data import hub
from ddp_lab.runtime.data.packing import Documents
from ddp_lab.runtime.errors import UserError

ROWS_AT_ONCE = 1000
PROMPT_COLUMNS = ("prompt", "completion")


class Source(NamedTuple):
    """A data set by its name. `streams`: read row by row, and no more rows than needed."""

    name: str
    text_column: str
    streams: bool

    def tokenized(self, tokenizer: Any, seed: int, length: int, most: tuple[int | None, int]) -> "TokenizedText":
        """All documents as tokens, for sequences of `length`.

        `most`: of a stream, read no more than so many sequences, or rows with prompts: to train on, and held out.
        """
        train, *held_out = [(data, self._columns(data)) for data in hub.load_splits(self.name, self.streams).values()]
        count, eval_count = most
        if not held_out and count:
            count += eval_count
        has_prompts = train[1] == PROMPT_COLUMNS
        unit = 1 if has_prompts else length
        documents = self._documents(*train, tokenizer, count and count * unit, seed)
        return TokenizedText(
            documents, [self._documents(*part, tokenizer, eval_count * unit) for part in held_out], has_prompts
        )

    def _columns(self, data: Any) -> tuple[str, ...]:
        """Those that are text: one, or prompt and completion."""
        names = _names(data)
        if self.text_column in names:
            return (self.text_column,)
        if all(column in names for column in PROMPT_COLUMNS):
            return PROMPT_COLUMNS
        raise UserError(
            f"--dataset {self.name}: no column {self.text_column} (it has {', '.join(names)}); give --text-column, or "
            "columns prompt and completion"
        )

    def texts(self, most: int) -> list[str]:
        """At most so many training texts, for a tokenizer to be trained on."""
        data = next(iter(hub.load_splits(self.name, self.streams).values()))
        columns, rows = self._columns(data), enumerate(islice(data, most))
        return [text_in(self.name, row[column], column, index) for index, row in rows for column in columns]

    def _documents(
        self, data: Any, columns: tuple[str, ...], tokenizer: Any, enough: int | None, seed: int | None = None
    ) -> Documents:
        """All documents, each ended by an end-of-text token, shuffled by `seed`. `datasets` caches what is not
        streamed. Of a stream, read no more than `enough` tokens, or rows with prompts."""
        from datasets import Dataset

        name, end = self.name, tokenizer.eos_token_id  # what `datasets` tells a cache by

        def encode(batch: Any, rows: list[int]) -> dict[str, Any]:
            parts = [
                [text_in(name, text, column, row) for row, text in zip(rows, batch[column], strict=True)]
                for column in columns
            ]
            first = tokenizer(parts[0])["input_ids"]
            first = [ids[:-1] if ids and ids[-1] == end else ids for ids in first]  # some tokenizers end every text
            tails = tokenizer(parts[1], add_special_tokens=False)["input_ids"] if len(parts) == 2 else [[]] * len(rows)
            return {
                "input_ids": [[*a, *b, end] for a, b in zip(first, tails, strict=True)],
                "prefix_lengths": [len(ids) if len(parts) == 2 else 1 for ids in first],
            }

        batches = {"batched": True, "with_indices": True, "remove_columns": _names(data)}
        if isinstance(data, Dataset):
            encoded = data.map(encode, **batches)
            return collected(encoded if seed is None else encoded.shuffle(seed=seed), ROWS_AT_ONCE, inf, by_rows=True)
        encoded = data.map(encode, batch_size=1, **batches)
        return collected(encoded, 1, enough or inf, by_rows=columns == PROMPT_COLUMNS)


class TokenizedText(NamedTuple):
    """Tokens to train on, and held-out ones in a list, if there is such a split; of prompts and completions, or not."""

    train: Documents
    held_out: list[Documents]
    has_prompts: bool


def _names(data: Any) -> list[str]:
    return data.column_names or list(next(iter(data), {}))


def text_in(name: str, text: Any, column: str, row: int) -> str:
    if not isinstance(text, str):
        raise UserError(f"--dataset {name}: row {row} (from 0), column {column}: {text!r} is not text")
    return text


def collected(data: Any, rows_at_once: int, enough: float, by_rows: bool) -> Documents:
    """The first rows of an encoded data set, until there are `enough` tokens, or rows."""
    parts: list[Documents] = []
    for table in data.with_format("arrow").iter(batch_size=rows_at_once):
        ids = table["input_ids"].combine_chunks()
        lengths = np.diff(ids.offsets.to_numpy())
        parts.append(Documents(ids.flatten().to_numpy().astype(np.int32), lengths, table["prefix_lengths"].to_numpy()))
        enough -= len(lengths) if by_rows else lengths.sum()
        if enough <= 0:
            break
    return Documents.joined(parts)

"""Text of the user's as documents of token ids: files, folders, `save_to_disk` folders and data sets of the hub.

A row of column `text` is a document, and so is a `.txt` file. Rows with columns `prompt` and `completion` are documents
whose prompts are no targets.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ddp_lab.runtime.data import hub
from ddp_lab.runtime.data.packing import Documents
from ddp_lab.runtime.errors import UserError

ROWS_AT_ONCE = 1000
PROMPT_COLUMNS = ("prompt", "completion")


class Source(NamedTuple):
    """A data set by its name.

    Attributes:
        name: As `--dataset` takes it.
        text_column: Where the text is.
        streams: Read row by row, and no more rows than needed.
    """

    name: str
    text_column: str
    streams: bool

    def tokenized(self, tokenizer: Any, seed: int, length: int, most: tuple[int | None, int]) -> "Text":
        """All documents as tokens.

        Args:
            length: Tokens in a sequence.
            most: Of a stream, read no more than so many sequences, or rows with prompts: to train on, and held out.

        Raises:
            UserError: as `parts`, or names the row that is not text.
        """
        train, held_out = self.parts(seed)
        wanted, others = most
        if held_out is None and wanted:
            wanted += others
        each = 1 if train.has_prompts else length
        return Text(
            train.tokenized(tokenizer, wanted and wanted * each),
            held_out.tokenized(tokenizer, others * each) if held_out is not None else None,
            train.has_prompts,
        )

    def parts(self, seed: int) -> tuple["Part", "Part | None"]:
        """The documents to train on, shuffled unless they are streamed; and those held out, if there is such a split.

        Raises:
            UserError: the data cannot be read, or lacks a column.
        """
        train, held_out = hub.training_and_held_out(self.name, self.streams)
        return self._part(train, None if self.streams else seed), self._part(held_out) if held_out is not None else None

    def _part(self, data: Any, seed: int | None = None) -> "Part":
        names = data.column_names or list(next(iter(data), {}))
        if self.text_column in names:
            return Part(self.name, data, (self.text_column,), seed)
        if all(column in names for column in PROMPT_COLUMNS):
            return Part(self.name, data, PROMPT_COLUMNS, seed)
        raise UserError(
            f"--dataset {self.name}: no column {self.text_column} (it has {', '.join(names)}); give --text-column, or "
            "columns prompt and completion"
        )

    def texts(self, most: int) -> list[str]:
        """At most so many training texts, for a tokenizer to be trained on.

        Raises:
            UserError: as `parts`, or names the row that is not text.
        """
        part, _ = self.parts(seed=0)
        rows: Iterator[tuple[int, dict[str, Any]]] = zip(range(most), part.data, strict=False)
        return [text_in(self.name, row[column], column, index) for index, row in rows for column in part.columns]


class Text(NamedTuple):
    """Tokens to train on and held-out ones, if there is such a split; of prompts and completions, or not."""

    train: Documents
    held_out: Documents | None
    has_prompts: bool


class Part(NamedTuple):
    """Rows of a data set, of which `columns` are text: one, or prompt and completion."""

    name: str
    data: Any
    columns: tuple[str, ...]
    seed: int | None

    @property
    def has_prompts(self) -> bool:
        return self.columns == PROMPT_COLUMNS

    def tokenized(self, tokenizer: Any, enough: int | None) -> Documents:
        """All documents, each with an end-of-text token behind it. `datasets` caches what is not streamed.

        Args:
            enough: Of a stream, read no more than so many tokens, or so many rows with prompts.

        Raises:
            UserError: names the row that is not text.
        """
        from datasets import Dataset

        name, end, columns = self.name, tokenizer.eos_token_id, self.columns  # what `datasets` tells a cache by

        def encode(batch: Any, rows: list[int]) -> dict[str, Any]:
            parts = [
                [text_in(name, text, column, row) for row, text in zip(rows, batch[column], strict=True)]
                for column in columns
            ]
            first = tokenizer(parts[0])["input_ids"]
            first = [ids[:-1] if ids and ids[-1] == end else ids for ids in first]  # some tokenizers end every text
            rest = tokenizer(parts[1], add_special_tokens=False)["input_ids"] if len(parts) == 2 else [[]] * len(rows)
            return {
                "input_ids": [[*a, *b, end] for a, b in zip(first, rest, strict=True)],
                "given": [len(ids) if len(parts) == 2 else 1 for ids in first],
            }

        names = self.data.column_names or list(next(iter(self.data), {}))
        how = {"batched": True, "with_indices": True, "remove_columns": names}
        if isinstance(self.data, Dataset):
            data = self.data.map(encode, **how)
            return from_table(data if self.seed is None else data.shuffle(seed=self.seed))
        return from_stream(self.data.map(encode, batch_size=1, **how), enough, by_rows=self.has_prompts)


def text_in(name: str, text: Any, column: str, row: int) -> str:
    """`text`, if it is text.

    Raises:
        UserError: names the data set, the row and the column.
    """
    if not isinstance(text, str):
        raise UserError(f"--dataset {name}: row {row} (from 0), column {column}: {text!r} is not text")
    return text


def from_table(data: Any) -> Documents:
    """All rows of an encoded data set."""
    parts = []
    for table in data.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        ids = table["input_ids"].combine_chunks()
        lengths = np.diff(ids.offsets.to_numpy())
        parts.append(Documents(ids.flatten().to_numpy().astype(np.int32), lengths, table["given"].to_numpy()))
    return Documents.joined(parts)


def from_stream(rows: Any, enough: int | None, by_rows: bool) -> Documents:
    """The first rows of an encoded stream, until there are `enough` tokens or rows."""
    documents: list[list[int]] = []
    given: list[int] = []
    read = 0
    for row in rows:
        documents.append(row["input_ids"])
        given.append(row["given"])
        read += 1 if by_rows else len(row["input_ids"])
        if enough is not None and read >= enough:
            break
    return Documents.of(documents, given)

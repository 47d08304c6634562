"""Documents of token ids as sequences of one length for a causal language model.

Documents follow one another without gaps, and are cut wherever a sequence is full. They stay apart nevertheless:
positions begin anew with each document, from which the attention mask is made (`masks`), and its first
token is no target. What ends a document, or begins the rest of it in the next sequence, sees nothing of the other.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_lab.runtime.data.masks import without_useless_mask
from ddp_lab.runtime.data.workload import Collate
from ddp_lab.strategy.batches import IGNORED


class Documents(NamedTuple):
    """Token ids of documents, one after the other: `tokens` of shape (tokens,), and by document its length, and how
    many tokens at its beginning are no targets: at least the first, or a prompt."""

    tokens: np.ndarray
    lengths: np.ndarray
    prefix_lengths: np.ndarray

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], prefix_lengths: Iterable[int] | None = None) -> "Documents":
        ids = [np.asarray(document, dtype=np.int32) for document in documents]
        lengths = np.array([len(document) for document in ids], dtype=np.int64)
        tokens = np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)
        return cls(tokens, lengths, np.ones_like(lengths) if prefix_lengths is None else np.array([*prefix_lengths]))

    @classmethod
    def joined(cls, parts: Sequence["Documents"]) -> "Documents":
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else cls.of([])


class TokenSequences(Sequence[dict[str, Tensor]]):
    """Sequences of at most `length` tokens. A sample has `input_ids`, `labels` and `position_ids`, each of shape
    (tokens,). Sequences without a target are left out.

    `packs`: documents follow one another, so all sequences but the last are full; otherwise a sequence holds tokens of
    one document. `cuts`: a longer document goes on in the next sequence; otherwise its end is left out.
    """

    def __init__(self, documents: Documents, length: int, packs: bool = True, cuts: bool = True) -> None:
        self._tokens, lengths, prefix_lengths = documents
        begins = np.cumsum(lengths) - lengths
        total = len(self._tokens)
        if packs:
            starts = np.arange(0, total, length)
            ends = np.minimum(starts + length, total)
        else:
            pieces = -(-lengths // length) if cuts else np.minimum(lengths, 1)
            nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts = np.repeat(begins, pieces) + nth * length
            ends = np.minimum(starts + length, np.repeat(begins + lengths, pieces))
        self._begins = np.zeros(total, dtype=bool)
        self._begins[begins[lengths > 0]] = True
        place = np.arange(total) - np.repeat(begins, lengths)
        self._is_target = place >= np.maximum(np.repeat(prefix_lengths, lengths), 1)
        self._is_target[starts] = False
        targets = np.concatenate([[0], np.cumsum(self._is_target)])
        self.targets = targets[ends] - targets[starts]
        is_target = self.targets > 0
        self.left_out = int((~is_target).sum())
        self._bounds = np.stack([starts, ends], axis=1)[is_target]
        self.targets = self.targets[is_target]

    def __len__(self) -> int:
        return len(self._bounds)

    def without_short_last(self) -> "TokenSequences":
        """All sequences if the last one is as long as the first, else those before it."""
        lengths = np.diff(self._bounds)
        return self[:-1] if len(self) and lengths[-1] < lengths[0] else self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = object.__new__(TokenSequences)
            part.__dict__ = {**self.__dict__, "_bounds": self._bounds[index], "targets": self.targets[index]}
            return part
        start, end = self._bounds[index]
        ids = torch.from_numpy(self._tokens[start:end].astype(np.int64))
        place, begins = np.arange(end - start), self._begins[start:end]
        positions = place - np.maximum.accumulate(np.where(begins, place, 0))
        labels = ids.where(torch.from_numpy(self._is_target[start:end]), IGNORED)
        return {"input_ids": ids, "labels": labels, "position_ids": torch.from_numpy(positions.astype(np.int32))}


def collate_sequences(pad_token: int) -> Collate:
    """Pads sequences on the right to the longest of a batch.

    The batch has `position_ids` only if a sequence holds several documents, and then no attention mask: padding is one
    more document. Otherwise it has an `attention_mask` where there is padding. Labels of padding are ignored.
    """
    fill = {"input_ids": pad_token, "labels": IGNORED, "position_ids": 0, "attention_mask": 0}

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        masked = [sample | {"attention_mask": torch.ones_like(sample["input_ids"])} for sample in samples]
        batch = {
            name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in masked], True, padding_value=value)
            for name, value in fill.items()
        }
        if any((sample["position_ids"][1:] == 0).any() for sample in samples):
            del batch["attention_mask"]
            return batch
        del batch["position_ids"]
        return without_useless_mask(batch)

    return collate


def target_count(batch: dict[str, Tensor]) -> int:
    """Tokens over which a causal language model's loss is a mean: those with a label, without the first of a row."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())

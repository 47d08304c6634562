"""Text as documents of tokens: what the second start finds of the first."""

from unittest import mock

import datasets
import pytest

from ddp_lab.runtime.data.documents import Source
from ddp_lab.runtime.data.text import load_trained_tokenizer, train_tokenizer


@pytest.mark.parametrize("saved", [False, True], ids=["files", "save_to_disk"])
def test_a_second_start_does_not_tokenize_again(saved, tmp_path, monkeypatch):
    """Another text or another tokenizer does."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "texts"
    rows = [{"text": text} for text in ("one two three", "four", "five six")]
    if saved:
        datasets.Dataset.from_list(rows).save_to_disk(folder)
    else:
        folder.mkdir()
        datasets.Dataset.from_list(rows).to_json(folder / "train.jsonl")

    def start(vocabulary, source=folder):
        tokenizer = load_trained_tokenizer(train_tokenizer(["one two"], vocabulary, "<end>"), "<end>")
        with mock.patch.object(
            type(tokenizer), "__call__", autospec=True, side_effect=type(tokenizer).__call__
        ) as call:
            text = Source(str(source), "text", streams=False).tokenized(tokenizer, 1, 8, (None, 4))
        return call.call_count, [part.tolist() for part in text.train]

    (calls, documents), (calls_again, documents_again) = start(260), start(260)
    assert calls and not calls_again and documents == documents_again and len(documents[1]) == 3
    assert start(262)[0]
    two_rows = tmp_path / "other.jsonl"
    datasets.Dataset.from_list(rows[:2]).to_json(two_rows)
    assert start(260, two_rows)[0]

"""What a run keeps of text for the next, by content. Damaged files: `tests/test_damage.py`."""

import numpy as np
import pytest

from ddp_lab.runtime.data.documents import Source
from ddp_lab.runtime.data.kept import cache_folder, kept

VALUES = np.arange(1000, dtype=np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def test_keys_are_told_apart_and_no_folder_is_needed(cache, monkeypatch):
    keys = [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""]]
    for number, key in enumerate(keys):
        kept(key, lambda number=number: VALUES[:number])
    assert [len(kept(key, lambda: VALUES)[0]) for key in keys] == [0, 1, 2, 3]
    assert len(list(cache.iterdir())) == len(keys)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert kept(keys[0], lambda: VALUES) == (pytest.approx(VALUES), None)


def test_tokens_are_kept_by_the_content_of_text_and_tokenizer(tmp_path):
    from ddp_lab.runtime.data.text import load_trained_tokenizer, train_tokenizer

    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one two three"}\n{"text": "four"}\n{"text": "five six"}\n')
    (folder / "test.jsonl").write_text('{"text": "seven"}\n')
    tokenizer, other = (load_trained_tokenizer(train_tokenizer(["one two"], n, "<end>"), "<end>") for n in (260, 262))

    def read(source=str(folder), tokenizer=tokenizer, seed=1):
        text, path = Source(source, "text", streams=False).tokenized(tokenizer, seed, 8, (None, 4))
        return text, path is not None

    def plain(text):
        return [[part.tolist() for part in documents] for documents in text[:2] if documents] + [text.has_prompts]

    (made, was_kept), (found, is_kept) = read(), read()
    assert (was_kept, is_kept) == (False, True) and plain(made) == plain(found)
    assert found.held_out is not None and len(found.train.lengths) == 3
    folder.rename(tmp_path / "moved")
    assert read(str(tmp_path / "moved"))[1]
    for changed in ({"tokenizer": other}, {"seed": 2}, {"source": str(tmp_path / "moved" / "train.jsonl")}):
        answers = [read(**{"source": str(tmp_path / "moved")} | changed)[1] for _ in range(2)]
        assert answers == [False, True], changed
    (tmp_path / "moved" / "train.jsonl").write_text('{"text": "one two thref"}\n{"text": "four"}\n')
    text, is_kept = read(str(tmp_path / "moved"))
    assert not is_kept and len(text.train.lengths) == 2

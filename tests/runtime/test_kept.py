"""What a run keeps of text for the next: by content, and never believed if damaged."""

import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_lab.runtime.data.documents import Source, Text
from ddp_lab.runtime.data.kept import cache_folder, kept
from tests.tables import each_row

VALUES = np.arange(1000, dtype=np.int32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


class Evil:
    def __reduce__(self) -> Any:
        return pytest.fail, ("unpickled",)


def saved(array: np.ndarray) -> bytes:
    path = cache_folder() / "other.npy"
    np.save(path, array)
    return path.read_bytes()


@each_row(
    "what, damage",
    [
        ("empty", lambda whole: b""),
        ("cut off", lambda whole: whole[:-5]),
        ("a bit", lambda whole: whole[:600] + bytes([whole[600] ^ 4]) + whole[601:]),
        ("no array", lambda whole: b"x" * 5000),
        ("a pickle", lambda whole: pickle.dumps(Evil())),
        ("pickled objects", lambda whole: saved(np.array([Evil()], dtype=object))),
        ("others", lambda whole: saved(np.ones((3, 3)))),
        ("too short", lambda whole: saved(np.ones(0, dtype=np.int32))),
    ],
)
def test_what_is_damaged_is_made_anew(what: str, damage: Any) -> None:
    made: list[str] = []

    def make() -> np.ndarray:
        made.append(what)
        return VALUES

    first, of_no_file = kept(["key", what], make)
    again, path = kept(["key", what], make)
    assert made == [what] and of_no_file is None and path is not None
    assert again.tolist() == first.tolist() == VALUES.tolist() and again.dtype == np.int32
    path.write_bytes(damage(path.read_bytes()))
    assert kept(["key", what], make)[0].tolist() == VALUES.tolist() and made == [what, what]
    assert kept(["key", what], make)[1] == path and made == [what, what]


def test_keys_are_told_apart_and_no_folder_is_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""]]
    for number, key in enumerate(keys):
        kept(key, lambda number=number: VALUES[:number])
    assert [len(kept(key, lambda: VALUES)[0]) for key in keys] == [0, 1, 2, 3]
    assert len(list(cache.iterdir())) == len(keys)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert kept(keys[0], lambda: VALUES) == (pytest.approx(VALUES), None)


def test_writers_at_once_leave_one_whole_file(cache: Path) -> None:
    meet = threading.Barrier(4)

    def make() -> np.ndarray:
        meet.wait()  # so that none finds what another has written
        return VALUES

    threads = [threading.Thread(target=kept, args=(["key"], make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.suffix for path in cache.iterdir()] == [".npy"]
    assert kept(["key"], lambda: VALUES[:1])[0].tolist() == VALUES.tolist()


def test_tokens_are_kept_by_the_content_of_text_and_tokenizer(tmp_path: Path) -> None:
    from ddp_lab.runtime.data.text import load_trained_tokenizer, train_tokenizer

    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one two three"}\n{"text": "four"}\n{"text": "five six"}\n')
    (folder / "test.jsonl").write_text('{"text": "seven"}\n')
    tokenizer, other = (load_trained_tokenizer(train_tokenizer(["one two"], n, "<end>"), "<end>") for n in (260, 262))

    def read(source: str = str(folder), tokenizer: Any = tokenizer, seed: int = 1) -> tuple[Text, bool]:
        text, path = Source(source, "text", streams=False).tokenized(tokenizer, seed, 8, (None, 4))
        return text, path is not None

    def plain(text: Text) -> list[Any]:
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

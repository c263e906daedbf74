from pathlib import Path

import pytest
from official_layouts import write_wikitext

from mgk.data import DataError, Vocabulary, load, prepare, vocabulary


def test_symbols_of_listops() -> None:
    symbols = vocabulary("listops")
    assert symbols == vocabulary("synthetic-listops")
    assert symbols.tokens is not None
    assert symbols.tokens[:2] == ("<pad>", "0")
    assert symbols.tokens[10:] == ("9", "[MIN", "[MAX", "[MED", "[SM", "]")
    assert (symbols.unit, symbols.size, symbols.pad_id) == ("symbol", 16, 0)


@pytest.mark.parametrize("name", ["text", "retrieval", "synthetic-text"])
def test_bytes(name: str) -> None:
    assert vocabulary(name) == Vocabulary("byte", 257, shift=1, pad_id=0)


@pytest.mark.parametrize("name", ["image", "pathfinder", "mnist", "fashion-mnist"])
def test_pixels(name: str) -> None:
    assert vocabulary(name) == Vocabulary("pixel", 256)


def test_words_are_those_of_the_prepared_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="wikitext-2 is not prepared"):
        vocabulary("wikitext-2", folder=tmp_path)
    prepare("wikitext-2", write_wikitext(tmp_path), out=tmp_path)
    words = vocabulary("wikitext-2", folder=str(tmp_path))
    assert words.tokens is not None
    assert (words.unit, words.size, words.pad_id, words.eos_id) == ("word", 11, None, 0)
    assert words.tokens[words.unk_id or 0] == "<unk>"
    assert set(words.tokens) == {
        "<eos>",
        "<unk>",
        *["=", "Title", "the", "cat", "sat", "on", "mat", "dog", "."],
    }


def test_a_plain_file(tmp_path: Path) -> None:
    assert vocabulary("synthetic-plain", folder=tmp_path) == Vocabulary("byte", 256)
    book = tmp_path / "book.txt"
    book.write_text("a few words\n" * 50)
    prepare("plain", book, out=tmp_path, options={"unit": "word"})
    assert vocabulary("plain", folder=tmp_path).tokens == ("<eos>", "a", "few", "words", "<unk>")


@pytest.mark.parametrize("name", ["listops", "text", "retrieval", "image", "mnist", "wikitext-2", "plain"])
def test_the_ids_of_a_data_set_are_in_its_vocabulary(tmp_path: Path, name: str) -> None:
    data = load(f"synthetic-{name}", "validation", folder=tmp_path)
    ids = vocabulary(f"synthetic-{name}", folder=tmp_path)
    assert (data.vocab_size, data.pad_id) == (ids.size, ids.pad_id)
    assert all(int(data[i]["input_ids"].min()) >= 0 for i in range(len(data)))
    assert all(int(data[i]["input_ids"].max()) < ids.size for i in range(len(data)))

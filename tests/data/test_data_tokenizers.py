"""A tokenizer gives the tokens that mgk.data has for the same text, before and after it was saved."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mgk.data import (
    byte_tokenizer,
    listops,
    listops_tokenizer,
    load,
    load_tokens,
    prepare,
    tokenizer_for,
    word_tokenizer,
)
from mgk.data.listops import official_source

WORDS = ("<eos>", "the", "river", "<unk>", "é")
# Everything that UTF-8 can write.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def reloaded(tokenizer, place):
    tokenizer.save_pretrained(place)
    return AutoTokenizer.from_pretrained(place)


@pytest.fixture(scope="module", params=[0, 1])
def by_bytes(request, tmp_path_factory):
    tokenizer = byte_tokenizer(shift=request.param, model_max_length=4000)
    return request.param, reloaded(tokenizer, tmp_path_factory.mktemp("bytes"))


@given(text=TEXTS)
def test_bytes_are_their_own_ids_and_come_back(by_bytes, text):
    shift, tokenizer = by_bytes
    ids = tokenizer(text).input_ids
    assert ids == [byte + shift for byte in text.encode()]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["\0", "a\0b <pad> <eos>", "  two  spaces , and ' s\n", "é☃𝄞Ā"])
def test_bytes_that_tokenizers_like_to_change(by_bytes, text):
    shift, tokenizer = by_bytes
    assert tokenizer(text).input_ids == [byte + shift for byte in text.encode()]
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_sizes_padding_and_limits_are_saved(tmp_path):
    text = reloaded(byte_tokenizer(model_max_length=5), tmp_path / "text")
    assert (len(text), text.pad_token_id, text.padding_side, text.model_max_length) == (257, 0, "right", 5)
    batch = text(["abcdefgh", "a"], padding=True, truncation=True)
    assert batch.input_ids == [[98, 99, 100, 101, 102], [98, 0, 0, 0, 0]]
    assert batch.attention_mask == [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]

    running = reloaded(byte_tokenizer(shift=0), tmp_path / "running")
    assert (len(running), running.pad_token_id, running.padding_side) == (256, 0, "left")
    # the byte 0 ends texts; the letter that stands for it in the vocabulary is a letter
    assert running.eos_token_id == 0
    for text in ("Ā\0ā", running.eos_token):
        assert bytes(running(text).input_ids) == text.encode()
        assert running.decode(running(text).input_ids) == text

    words = reloaded(word_tokenizer(WORDS, model_max_length=7), tmp_path / "words")
    assert (len(words), words.eos_token_id, words.unk_token_id, words.model_max_length) == (5, 0, 3, 7)
    batch = words(["the river", "é"], padding=True)
    assert (batch.input_ids, batch.attention_mask) == ([[1, 2], [0, 4]], [[1, 1], [0, 1]])

    symbols = reloaded(listops_tokenizer(model_max_length=9), tmp_path / "symbols")
    assert (len(symbols), symbols.pad_token_id, symbols.padding_side) == (len(listops.VOCABULARY), 0, "right")


@given(
    text=st.lists(st.sampled_from([*WORDS, "bridge", "a<unk>b", "\u2003", "\n", "\t", "\r", "\x0b"])).map(
        " ".join
    )
)
def test_words_are_split_as_the_data_are(text):
    ids = {word.encode(): number for number, word in enumerate(WORDS)}
    wanted = [ids.get(word, 3) for word in text.encode().replace(b"\n", b" <eos> ").split()]
    assert word_tokenizer(WORDS)(text).input_ids == wanted


def test_symbols_of_listops_with_and_without_parentheses(tmp_path):
    tokenizer = reloaded(listops_tokenizer(), tmp_path)
    ids = tokenizer("[MAX 2 9 [SM 4 7 ] 0 ]").input_ids
    assert tokenizer.decode(ids) == "[MAX 2 9 [SM 4 7 ] 0 ]"
    assert tokenizer(official_source(bytes(ids))).input_ids == ids


def test_prepared_texts(folder, tmp_path):
    for task, names in (("text", ["input_ids"]), ("retrieval", ["input_ids", "input_ids_2"])):
        data = load(f"synthetic-{task}", "test", folder=folder)
        tokenizer = reloaded(tokenizer_for(f"synthetic-{task}", folder), tmp_path / task)
        assert tokenizer.model_max_length == 4000
        for name in names:
            ids = data[3][name].tolist()
            assert tokenizer(bytes(token - 1 for token in ids).decode()).input_ids == ids


def test_prepared_listops(folder):
    tokens = load("synthetic-listops", "test", folder=folder)[0]["input_ids"].tolist()
    tokenizer = tokenizer_for("synthetic-listops", folder, model_max_length=64)
    assert tokenizer(official_source(bytes(tokens))).input_ids == tokens
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize("unit", ["byte", "word"])
def test_prepared_running_text(unit, tmp_path):
    lines = [f"the river number {n} is é and <unk> .\n" for n in range(200)]
    source = tmp_path / "book.txt"
    source.write_text("".join(lines))
    prepare("plain", source, out=tmp_path / "data", options={"unit": unit})
    tokenizer = reloaded(tokenizer_for("plain", tmp_path / "data"), tmp_path / "saved")
    train = load_tokens("plain", "train", folder=tmp_path / "data")
    ids = np.array(tokenizer(source.read_text()).input_ids)
    assert ids[: len(train)].tolist() == train.tolist()
    # a word of the other parts that the training part does not have is <unk> to both
    test = load_tokens("plain", "test", folder=tmp_path / "data")
    assert ids[-len(test) :].tolist() == test.tolist()


def test_pixels_have_none(folder):
    assert tokenizer_for("synthetic-image", folder) is None


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: byte_tokenizer(shift=4), "shift must be 0 or 1, got 4"),
        (lambda: word_tokenizer(["<eos>", "a"]), "vocabulary must have '<unk>'"),
        (lambda: word_tokenizer(["<eos>", "<unk>", "<unk>"]), "vocabulary has 1 words twice"),
    ],
)
def test_bad_arguments(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()

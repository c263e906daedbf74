"""Fast tokenizers with the ids of the data sets, for ``AutoTokenizer``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers import models as algorithms
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode
except ModuleNotFoundError as error:
    message = "tokenizers need Hugging Face transformers: pip install 'mgk[train]'"
    raise ImportError(message, name=error.name) from None

from mgk.data import listops
from mgk.data.preparation import prepared
from mgk.data.task_registry import find_task
from mgk.data.text import BYTES
from mgk.data.words import EOS, UNKNOWN, VOCABULARY_FILE

PAD = "<pad>"

# The whitespace of bytes.split(); str.split() has more.
_SPACES = r" \t\n\r\x0b\x0c"


def byte_tokenizer(
    *, shift: int = BYTES["shift"], model_max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Bytes of UTF-8: id = byte + ``shift``; any text comes back exactly.

    Args:
        shift: 1 leaves the id 0 to ``<pad>``, as in LRA; 0 for language models, where the
            byte 0 ends a text and pads a batch.
        model_max_length: Where ``truncation=True`` cuts; None: no limit.
    """
    if shift not in (0, 1):
        raise ValueError(f"shift must be 0 or 1, got {shift!r}")
    vocabulary = {symbol: byte + shift for byte, symbol in bytes_to_unicode().items()}
    if shift:
        vocabulary[PAD] = 0
    tokenizer = Tokenizer(algorithms.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = bytes_to_unicode()[0]
    special = {"eos_token": end, "pad_token": end, "padding_side": "left"}
    return _fast(tokenizer, model_max_length, **({"pad_token": PAD} if shift else special))


def listops_tokenizer(*, model_max_length: int | None = None) -> PreTrainedTokenizerFast:
    """Symbols of ListOps between spaces; parentheses are dropped."""
    ids = {token: number for number, token in enumerate(listops.VOCABULARY)}
    tokenizer = Tokenizer(algorithms.WordLevel(ids))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{_SPACES}()]+"), "removed")
    return _fast(tokenizer, model_max_length, pad_token=PAD)


def word_tokenizer(
    vocabulary: Sequence[str], *, model_max_length: int | None = None
) -> PreTrainedTokenizerFast:
    """Words between spaces: id = index in ``vocabulary``; a line end is ``<eos>``.

    Other words are ``<unk>``. Batches are padded on the left with ``<eos>``.
    """
    ids = {word: number for number, word in enumerate(vocabulary)}
    if len(ids) < len(vocabulary):
        raise ValueError(f"vocabulary has {len(vocabulary) - len(ids)} words twice")
    end, unknown = EOS.decode(), UNKNOWN.decode()
    for word in (end, unknown):
        if word not in ids:
            raise ValueError(f"vocabulary must have {word!r}")
    tokenizer = Tokenizer(algorithms.WordLevel(ids, unk_token=unknown))
    tokenizer.normalizer = normalizers.Replace("\n", f" {end} ")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{_SPACES}]+"), "removed")
    special = {"unk_token": unknown, "eos_token": end, "pad_token": end}
    return _fast(tokenizer, model_max_length, padding_side="left", **special)


def tokenizer_for(
    task: str, folder: Path | None = None, *, model_max_length: int | None = None
) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a prepared task; None for images.

    ``model_max_length`` is by default the paper's.
    """
    kind = find_task(task)
    if kind.kind == "image":
        return None
    place, manifest = prepared(task, folder)
    length = kind.max_length if model_max_length is None else model_max_length
    if "vocabulary" in manifest.facts:
        return listops_tokenizer(model_max_length=length)
    if manifest.facts.get("unit") == "word":
        text = (place / manifest.build / VOCABULARY_FILE).read_bytes().decode()
        words = text.removesuffix("\n").split("\n")
        return word_tokenizer(words, model_max_length=length)
    return byte_tokenizer(shift=manifest.facts["shift"], model_max_length=length)


def _fast(tokenizer: Tokenizer, model_max_length: int | None, **options: Any) -> PreTrainedTokenizerFast:
    if model_max_length is not None:
        options["model_max_length"] = model_max_length
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        split_special_tokens=True,  # <pad> in a text is not padding
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **options,
    )

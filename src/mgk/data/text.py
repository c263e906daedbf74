"""Text: IMDb reviews (Maas 2011) as bytes; label 1 is positive.

Long Range Arena has no validation split and evaluates on the test reviews;
``validation`` holds out training reviews instead, half of each label.
"""

from typing import Any

from mgk.data.errors import UsageError, check_text, fail
from mgk.data.preparation import Job
from mgk.data.random_bits import permutation
from mgk.data.sources import BYTE_ORDER_MARK, Source
from mgk.data.writer import Example, SetWriter

# Token id = byte + 1; 0 pads.
BYTES: dict[str, Any] = {"unit": "byte", "vocab_size": 257, "pad_id": 0, "shift": 1}

_Key = tuple[str, int, int]


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official folder or archive."""
    reviews = _read(job.source)
    train = [key for key in reviews if key[0] == "train"]
    held_out = _held_out(train, job.options["validation"], job.options["seed"])
    writer.facts.update(BYTES)
    writer.append_examples(
        Example("validation" if key in held_out else key[0], (text,), key[1]) for key, text in reviews.items()
    )


def _read(source: Source) -> dict[_Key, bytes]:
    """The reviews in order of split, label and number."""
    reviews: dict[_Key, bytes] = {}
    for file in source.files(r"(train|test)/(pos|neg)/(\d+)_(\d+)\.txt"):
        split, sign, number, rating = file.match.groups()
        label = int(sign == "pos")
        lowest, highest = (7, 10) if label else (1, 4)
        if not lowest <= int(rating) <= highest:
            fail(file.where, f"a rating of {rating} is out of range for a review in {sign!r}")
        data = file.content().removeprefix(BYTE_ORDER_MARK)
        check_text(data, file.where)
        if not data:
            fail(file.where, "the review is empty")
        if reviews.setdefault((split, label, int(number)), data) != data:
            advice = "give the folder of one of them as the source"
            fail(file.where, f"a second review of the number {number}; {advice}")
    for split in ("train", "test"):
        for label, sign in enumerate(("neg", "pos")):
            if not any(key[:2] == (split, label) for key in reviews):
                fail(str(source.path), f"no review {split}/{sign}/ID_RATING.txt found")
    return dict(sorted(reviews.items()))


def _held_out(keys: list[_Key], count: int, seed: int) -> set[_Key]:
    held_out: set[_Key] = set()
    for label in (0, 1):
        mine = [key for key in keys if key[1] == label]
        wanted = (count + label) // 2
        if wanted >= len(mine):
            there = f"the {len(mine)} training reviews with label {label}"
            raise UsageError(f"cannot hold out {wanted} of {there}")
        held_out.update(mine[place] for place in permutation(len(mine), seed, label)[:wanted])
    return held_out

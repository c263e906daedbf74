"""Text: IMDb reviews (Maas 2011) as bytes; label 1 is positive.

Long Range Arena trains on all 25,000 training reviews and evaluates on the test reviews while it trains;
``validation`` holds some training reviews out instead, half of each label.
"""

from typing import Any

from mgk.data.errors import UsageError, check_text, fail
from mgk.data.preparation import Job
from mgk.data.random_bits import permutation
from mgk.data.sources import Source
from mgk.data.writer import Example, SetWriter

# Token id = byte + 1; 0 pads.
BYTES: dict[str, Any] = {"unit": "byte", "vocab_size": 257, "pad_id": 0, "shift": 1}

_Key = tuple[str, int, int]


def prepare(writer: SetWriter, job: Job) -> None:
    """Read the official folder or archive."""
    reviews = _read(job.source)
    held_out = _held_out([key for key in reviews if key[0] == "train"], job.options["validation"], job.options["seed"])
    writer.facts.update(BYTES)
    writer.append_examples(
        Example("validation" if key in held_out else key[0], (data,), key[1]) for key, data in reviews.items()
    )


def _read(source: Source) -> dict[_Key, bytes]:
    """The reviews by split, label and number: an order that does not depend on that of an archive."""
    reviews: dict[_Key, bytes] = {}
    for file in source.files(r"(train|test)/(pos|neg)/(\d+)_(\d+)\.txt"):
        split, sign, number, rating = file.match.groups()
        label = int(sign == "pos")
        if not (7 <= int(rating) <= 10 if label else 1 <= int(rating) <= 4):
            fail(file.where, f"a rating of {rating} is out of range for a review in {sign!r}")
        data = file.read()
        check_text(data, file.where)
        if not data:
            fail(file.where, "the review is empty")
        if reviews.setdefault((split, label, int(number)), data) != data:
            fail(file.where, f"a second review of the number {number}; give the folder of one of them as the source")
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
            raise UsageError(f"cannot hold out {wanted} of the {len(mine)} training reviews with label {label}")
        held_out.update(mine[place] for place in permutation(len(mine), seed, label)[:wanted])
    return held_out

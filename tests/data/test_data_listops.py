import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgk.data import DataError, UsageError, load, prepare
from mgk.data.listops import (
    VOCABULARY,
    Shape,
    generate,
    generate_block,
    official_source,
    read,
    value_of,
    write_official,
)
from mgk.data.sources import Source

# Of block 7 of seed 0: what any machine must generate.
GOLDEN = "38b7b6677ffe1ac65fdaf269d3ab91fdbfe3c1b00689f2b00b48cdc166317bc9"
SMALL = {
    "train": 60,
    "validation": 10,
    "test": 10,
    "min_length": 10,
    "max_length": 80,
    "max_depth": 6,
    "max_args": 5,
}


@dataclass
class Evaluated:
    value: int
    depth: int
    most_arguments: int


def evaluate(tokens: list[str]) -> Evaluated:
    """An evaluator that shares nothing with the generator: a recursive descent over the tokens."""

    def expression(at: int) -> tuple[Evaluated, int]:
        token = tokens[at]
        if token.isdigit():
            return Evaluated(int(token), 1, 0), at + 1
        arguments = []
        at += 1
        while tokens[at] != "]":
            argument, at = expression(at)
            arguments.append(argument)
        numbers = sorted(argument.value for argument in arguments)
        middle = len(numbers) // 2
        value = {
            "[MIN": numbers[0],
            "[MAX": numbers[-1],
            "[MED": numbers[middle] if len(numbers) % 2 else (numbers[middle - 1] + numbers[middle]) // 2,
            "[SM": sum(numbers) % 10,
        }[token]
        depth = 1 + max(argument.depth for argument in arguments)
        most = max(len(arguments), *(argument.most_arguments for argument in arguments))
        return Evaluated(value, depth, most), at + 1

    result, end = expression(0)
    assert end == len(tokens)
    return result


def words(tokens: bytes) -> list[str]:
    return [VOCABULARY[token] for token in tokens]


def options(**changes: int) -> dict[str, int]:
    return {"seed": 0, **SMALL, **changes}


def make(**changes: int) -> list[tuple[str, bytes, int]]:
    return [
        (e.split, e.sequences[0], e.label) for e in generate(options(**changes), 1, lambda done, total: None)
    ]


def test_the_evaluator_knows_the_operators() -> None:
    assert evaluate(["[MAX", "2", "9", "[MIN", "4", "7", "]", "0", "]"]) == Evaluated(9, 3, 4)
    assert evaluate(["[MED", "1", "4", "9", "]"]).value == 4
    assert evaluate(["[MED", "1", "4", "]"]).value == 2
    assert evaluate(["[SM", "9", "9", "]"]).value == 8


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    min_length=st.integers(0, 30),
    span=st.integers(15, 200),
    max_depth=st.integers(3, 10),
    max_args=st.integers(3, 10),
)
def test_every_label_and_limit(seed: int, min_length: int, span: int, max_depth: int, max_args: int) -> None:
    shape = Shape(min_length, min_length + span, max_depth, max_args)
    block = generate_block(seed, shape, 0)
    ends = block.lengths.cumsum()
    assert block.lengths.sum() == len(block.tokens)
    chosen = list(zip(ends, block.lengths, block.values, strict=True))[:200]
    for end, length, value in chosen:
        result = evaluate(words(block.tokens[end - length : end].tobytes()))
        assert result.value == value
        assert result.depth <= max_depth
        assert result.most_arguments <= max_args
        assert min_length < length < min_length + span


def test_the_published_setting() -> None:
    block = generate_block(0, Shape(500, 2000, 10, 10), 0)
    assert len(block.lengths) > 1000
    assert block.lengths.min() > 500
    assert block.lengths.max() < 2000
    ends = block.lengths.cumsum()
    results = [
        evaluate(words(block.tokens[end - length : end].tobytes()))
        for end, length in zip(ends, block.lengths, strict=True)
    ]
    assert [result.value for result in results] == block.values.tolist()
    assert max(result.depth for result in results) == 10
    assert max(result.most_arguments for result in results) == 10
    assert set(np.unique(block.tokens)) == set(range(1, 16))


def test_operators_are_a_quarter_of_the_nodes_that_may_be_one() -> None:
    """Of the roots of all trees, 1/4 are operators: those of at least 4 tokens."""
    block = generate_block(0, Shape(0, 10**6, 2, 10), 0)
    share = (block.lengths > 1).mean()
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / len(block.lengths)) ** 0.5


def test_the_same_on_every_machine() -> None:
    block = generate_block(0, Shape(500, 2000, 10, 10), 7)
    assert hashlib.sha256(block.tokens.tobytes() + block.values.tobytes()).hexdigest() == GOLDEN


def test_sizes_and_no_duplicates() -> None:
    rows = make(max_length=40, min_length=3)
    assert [sum(row[0] == split for row in rows) for split in ("train", "validation", "test")] == [60, 10, 10]
    assert len({row[1] for row in rows}) == len(rows)
    assert all(evaluate(words(row[1])).value == row[2] for row in rows)


def test_duplicates_are_not_counted_and_too_narrow_limits_end() -> None:
    with pytest.raises(UsageError, match="of 600020 expressions found within"):
        make(min_length=2, max_length=5, max_depth=2, max_args=2, train=600_000)
    with pytest.raises(UsageError, match="no length is above 10 and below 11"):
        make(min_length=10, max_length=11)
    with pytest.raises(UsageError, match="at least 2"):
        make(max_depth=1)


def test_any_number_of_workers_and_seeds(tmp_path: Path) -> None:
    one = prepare("listops", out=tmp_path / "one", options=SMALL)
    two = prepare("listops", out=tmp_path / "two", options=SMALL, workers=2)
    other = prepare("listops", out=tmp_path / "other", options={**SMALL, "seed": 1})
    assert one.manifest.files == two.manifest.files
    assert one.manifest.files != other.manifest.files


def test_official_files_round_trip(tmp_path: Path) -> None:
    rows = list(generate(options(), 1, lambda done, total: None))
    write_official(iter(rows), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "basic_test.tsv",
        "basic_train.tsv",
        "basic_val.tsv",
    ]
    assert (tmp_path / "basic_val.tsv").read_bytes().startswith(b"Source\tTarget\r\n( ( ")
    assert sorted(read(Source(tmp_path))) == sorted(rows)
    made, from_files = (
        prepare("listops", out=tmp_path / "a", options=SMALL),
        prepare("listops", tmp_path, out=tmp_path / "b"),
    )
    assert {n: f for n, f in made.manifest.files.items() if n != "sources.json"} == {
        n: f for n, f in from_files.manifest.files.items() if n != "sources.json"
    }
    example = load("listops", "test", folder=tmp_path / "b")[0]
    assert bytes(example["input_ids"].tolist()) == next(row.sequences[0] for row in rows if row.split == "test")


def test_official_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"cannot write '.*file/below': Not a directory"):
        write_official(iter([]), tmp_path / "file" / "below")


def test_official_source_nests_as_the_published_writer_does() -> None:
    ids = bytes(VOCABULARY.index(token) for token in ["[MAX", "2", "[SM", "1", "3", "]", "9", "]"])
    assert official_source(ids) == "( ( ( ( [MAX 2 ) ( ( ( [SM 1 ) 3 ) ] ) ) 9 ) ] )"


def test_the_value_of_a_read_expression_is_that_of_a_generated_one() -> None:
    block = generate_block(7, Shape(3, 60, 5, 5), 0)
    starts = np.concatenate([[0], np.cumsum(block.lengths)]).tolist()
    tokens = block.tokens.tobytes()
    for number, value in enumerate(block.values[:500].tolist()):
        assert value_of(tokens[starts[number] : starts[number + 1]]) == value


def test_a_byte_order_mark_is_no_token(tmp_path: Path) -> None:
    for name in ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv"):
        (tmp_path / name).write_text(GOOD, encoding="utf-8-sig")
    assert prepare("listops", tmp_path, out=tmp_path / "out").manifest.examples("train") == 1


GOOD = "Source\tTarget\n( ( [MIN 1 ) ] )\t1\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Source\tTarget\n[MIN 1 2 ]\n", "basic_val.tsv, line 2: 1 columns instead of 2"),
        (GOOD + "[MIN 1 2 ]\t1\t1\n", "basic_val.tsv, line 3: 3 columns instead of 2"),
        (GOOD + "[MIN 1 2 ]\t10\n", "basic_val.tsv, line 3: the value of the expression is 1, not '10'"),
        (
            GOOD + "[MED 1 4 [SM 9 9 ] ]\t5\n",
            "basic_val.tsv, line 3: the value of the expression is 4, not '5'",
        ),
        (GOOD + "[MIN 1 [MAX 2 ]\t1\n", "line 3: the expression is not well-formed: 1 brackets are not closed"),
        (GOOD + "[MIN 1 ] ]\t1\n", "line 3: the expression is not well-formed: a bracket is closed that"),
        (
            GOOD + "[MIN [MAX ] 1 ]\t1\n",
            "line 3: the expression is not well-formed: an operator has no arguments",
        ),
        (GOOD + "1 2\t1\n", "line 3: one expression is wanted, got 2"),
        (GOOD + "( [MIN 1 2 ]\t1\n", "line 3: the parentheses of the expression are not balanced"),
        (GOOD + "[MIN 1 12 ]\t1\n", "basic_val.tsv, line 3: b'12' is not a token of ListOps"),
        (GOOD + "( )\t1\n", "basic_val.tsv, line 3: the expression is empty"),
        ("[MIN 1 2 ]\t1\n", "basic_val.tsv, line 1: the header must be Source, Target"),
        ("Source\tTarget\n", "basic_val.tsv: there is no expression after the header"),
        (None, "basic_val.tsv not found"),
    ],
)
def test_bad_files(tmp_path: Path, text: str | None, reason: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("basic_train.tsv", "basic_test.tsv"):
        (source / name).write_text(GOOD)
    if text is not None:
        (source / "basic_val.tsv").write_text(text)
    with pytest.raises(DataError) as error:
        prepare("listops", source, out=tmp_path / "out")
    assert reason in str(error.value)
    assert list((tmp_path / "out" / "listops").iterdir()) == []

"""ListOps: nested list expressions over digits, and their value.

    [MAX 2 9 [MIN 4 7 ] 0 ]  =  9

As in Long Range Arena, a node is an operator with probability 1/4, with 2 to
``max_args`` arguments, otherwise, and at ``max_depth``, a digit. No expression occurs
twice. MED is the median rounded down, SM the sum mod 10.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mgk._util.files import atomic_path
from mgk.data.errors import UsageError, fail
from mgk.data.ordered_pool import in_order
from mgk.data.preparation import Job, OnStep
from mgk.data.random_bits import Stream
from mgk.data.sources import Source
from mgk.data.writer import Example, SetWriter, named_errors

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
# The id of a token is its place; 0 pads.
VOCABULARY = ("<pad>", *"0123456789", *OPERATORS, "]")
FACTS: dict[str, Any] = {
    "unit": "symbol",
    "vocab_size": len(VOCABULARY),
    "pad_id": 0,
    "shift": 0,
    "vocabulary": list(VOCABULARY),
}
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}

_IDS = {token.encode(): number for number, token in enumerate(VOCABULARY)}
_DIGIT, _OPERATOR, _END = 1, 11, 15
_TREES_PER_BLOCK = 1 << 14
_BLOCKS_WITHOUT_NEWS = 64
_Int = NDArray[np.int64]


class Shape(NamedTuple):
    """Limits; ``min_length`` < length < ``max_length``, brackets counted."""

    min_length: int
    max_length: int
    max_depth: int
    max_args: int


class Block(NamedTuple):
    """Expressions of one random stream; all their tokens in a row."""

    tokens: NDArray[np.uint8]
    lengths: _Int
    values: NDArray[np.uint8]


def prepare(writer: SetWriter, job: Job) -> None:
    """Generate the set, or read the official files."""
    writer.facts.update(FACTS)
    given, options = job.given, job.options
    writer.append_examples(read(given) if given else generate(options, job.workers, job.on_step))


def generate(options: Mapping[str, Any], workers: int, on_step: OnStep) -> Iterator[Example]:
    """Every expression and its value; the same for any number of workers."""
    shape = Shape(*(options[name] for name in Shape._fields))
    if shape.max_depth < 2 or shape.max_args < 2:
        given = f"{shape.max_depth} and {shape.max_args}"
        raise UsageError(f"depth and arguments must be at least 2, got {given}")
    if shape.max_length - shape.min_length < 2:
        raise UsageError(f"no length is above {shape.min_length} and below {shape.max_length}")
    sizes = [(split, options[split]) for split in FILES]
    total = sum(size for _, size in sizes)
    splits = (split for split, size in sizes for _ in range(size))
    seen: set[bytes] = set()
    without_news = 0
    with closing(in_order(partial(generate_block, options["seed"], shape), workers)) as blocks:
        for block in blocks:
            before = len(seen)
            for tokens, value in _expressions(block):
                digest = hashlib.blake2b(tokens, digest_size=16).digest()
                if len(seen) < total and digest not in seen:
                    seen.add(digest)
                    yield Example(next(splits), (tokens,), value)
            on_step(len(seen), total)
            if len(seen) == total:
                return
            without_news = 0 if len(seen) > before else without_news + 1
            if without_news == _BLOCKS_WITHOUT_NEWS:
                found = f"{len(seen)} of {total} expressions"
                raise UsageError(f"only {found} found within {shape}: widen the limits")


def generate_block(seed: int, shape: Shape, number: int) -> Block:
    """Block ``number``: grown level by level, all trees at once."""
    levels = _grow(seed, shape, number)
    sizes, values = _measure(levels)
    lengths = sizes[0]
    keep = (lengths > shape.min_length) & (lengths < shape.max_length)
    ends = (lengths * keep).cumsum()
    starts = np.where(keep, ends - lengths, -1)
    tokens = np.zeros(int(ends[-1]), np.uint8)
    for depth, level in enumerate(levels):
        is_kept = starts >= 0
        is_operator = level.operator >= 0
        own = np.where(is_operator, _OPERATOR + level.operator, _DIGIT + level.digit)
        tokens[starts[is_kept]] = own[is_kept]
        ends = is_kept & is_operator
        tokens[starts[ends] + sizes[depth][ends] - 1] = _END
        if depth + 1 < len(levels):
            starts = _child_starts(starts, level, sizes[depth + 1])
    return Block(tokens, lengths[keep], values[keep])


class _Level(NamedTuple):
    """The nodes of one depth, children of one parent side by side."""

    operator: NDArray[np.int8]  # -1 for a digit
    digit: NDArray[np.uint8]
    arguments: _Int  # 0 for a digit


def _grow(seed: int, shape: Shape, number: int) -> list[_Level]:
    levels: list[_Level] = []
    tree = np.arange(_TREES_PER_BLOCK)
    alive = np.zeros(_TREES_PER_BLOCK, np.int64)  # tokens so far
    while len(tree):
        depth = len(levels) + 1
        # Bits of a node: 16 whether an operator, 2 which, 20 digit, 20 arguments.
        bits = Stream(seed, number, depth).bits(len(tree))
        is_operator = (bits & np.uint64(0xFFFF)) < 0x4000
        is_operator &= (depth < shape.max_depth) & (alive[tree] < shape.max_length)
        which = (bits >> np.uint64(16) & np.uint64(3)).astype(np.int8)
        operator = np.where(is_operator, which, np.int8(-1))
        digit = _below(bits >> np.uint64(18), 10).astype(np.uint8)
        arguments = np.where(is_operator, 2 + _below(bits >> np.uint64(38), shape.max_args - 1), 0)
        levels.append(_Level(operator, digit, arguments))
        alive += np.bincount(tree, 1 + is_operator, len(alive)).astype(np.int64)
        tree = np.repeat(tree, arguments)
    return levels


def _below(bits: NDArray[np.uint64], limit: int) -> _Int:
    return ((bits & np.uint64(0xFFFFF)) * np.uint64(limit) >> np.uint64(20)).astype(np.int64)


def _measure(levels: list[_Level]) -> tuple[list[_Int], NDArray[np.uint8]]:
    """The length of every node's expression by level, and the roots' values."""
    sizes: list[_Int] = []
    child_sizes, child_values = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    for level in reversed(levels):
        size, value = np.ones(len(level.digit), np.int64), level.digit.copy()
        parents = np.flatnonzero(level.arguments)
        if len(parents):
            counts = level.arguments[parents]
            starts = counts.cumsum() - counts
            size[parents] = 2 + np.add.reduceat(child_sizes, starts)
            value[parents] = _apply(level.operator[parents], child_values, starts, counts)
        sizes.insert(0, size)
        child_sizes, child_values = size, value
    return sizes, child_values


def _apply(
    operator: NDArray[np.int8], arguments: NDArray[np.uint8], starts: _Int, counts: _Int
) -> NDArray[np.uint8]:
    run = np.repeat(np.arange(len(starts)), counts)
    ordered = np.sort(run * 10 + arguments) % 10  # every run in itself
    low, high = ordered[starts + (counts - 1) // 2], ordered[starts + counts // 2]
    total = np.add.reduceat(arguments.astype(np.int64), starts)
    results = np.stack([ordered[starts], ordered[starts + counts - 1], (low + high) // 2, total % 10])
    return results[operator, np.arange(len(operator))].astype(np.uint8)


def _child_starts(starts: _Int, level: _Level, sizes: _Int) -> _Int:
    """Where the children begin; -1 in trees not kept."""
    parents = np.flatnonzero(level.arguments)
    counts = level.arguments[parents]
    before = sizes.cumsum() - sizes
    first = np.repeat(before[counts.cumsum() - counts], counts)
    parent_starts = np.repeat(starts[parents], counts)
    return np.where(parent_starts >= 0, parent_starts + 1 + before - first, -1)


def _expressions(block: Block) -> Iterator[tuple[bytes, int]]:
    tokens, end = block.tokens.tobytes(), 0
    for length, value in zip(block.lengths.tolist(), block.values.tolist(), strict=True):
        end += length
        yield tokens[end - length : end], value


def read(source: Source) -> Iterator[Example]:
    """Every line of the official files; parentheses are dropped."""
    splits = {name: split for split, name in FILES.items()}
    for name, file in source.parts(r"(basic_(?:train|val|test)\.tsv)", splits):
        number = -1  # of expressions, after the header
        for line, where in file.lines():
            columns = line.split(b"\t")
            if len(columns) != 2:
                fail(where, f"{len(columns)} columns instead of 2 (Source, Target)")
            if number < 0 and columns != [b"Source", b"Target"]:
                fail(where, "the header must be Source, Target")
            if number >= 0:
                yield _parsed(splits[name], columns[0], columns[1], where)
            number += 1
        if number < 1:
            fail(file.where, "there is no expression after the header")


def _parsed(split: str, expression: bytes, value: bytes, where: str) -> Example:
    try:
        symbols = [token for token in expression.split() if token not in (b"(", b")")]
        tokens = bytes(_IDS[token] for token in symbols)
    except KeyError as error:
        fail(where, f"{error.args[0]!r} is not a token of ListOps")
    if not tokens:
        fail(where, "the expression is empty")
    if expression.count(b"(") != expression.count(b")"):
        fail(where, "the parentheses of the expression are not balanced")
    try:
        found = value_of(tokens)
    except ValueError as error:
        fail(where, str(error))
    if value != b"%d" % found:
        given = value[:20].decode("utf-8", "replace")
        fail(where, f"the value of the expression is {found}, not {given!r}")
    return Example(split, (tokens,), found)


def value_of(tokens: bytes) -> int:
    """The value of an expression; ``ValueError`` where it is not well-formed."""
    lists: list[list[int]] = [[]]  # arguments of the open operators
    operators: list[int] = []
    for token in tokens:
        if token < _OPERATOR:
            lists[-1].append(token - _DIGIT)
        elif token < _END:
            operators.append(token - _OPERATOR)
            lists.append([])
        elif not operators or not lists[-1]:
            what = "a bracket is closed that was not opened"
            if operators:
                what = "an operator has no arguments"
            raise ValueError(f"the expression is not well-formed: {what}")
        else:
            arguments = lists.pop()
            lists[-1].append(_VALUES[operators.pop()](arguments))
    if operators:
        what = f"{len(operators)} brackets are not closed"
        raise ValueError(f"the expression is not well-formed: {what}")
    if len(lists[0]) != 1:
        raise ValueError(f"one expression is wanted, got {len(lists[0])}")
    return lists[0][0]


_VALUES: tuple[Callable[[list[int]], int], ...] = (
    min,
    max,
    lambda values: int(median(values)),
    lambda values: sum(values) % 10,
)


def official_source(tokens: bytes) -> str:
    """An expression as the official files have it: ``( ( ( [MAX 2 ) 9 ) ] )``."""
    parts: list[list[str]] = [[]]
    for token in tokens:
        text = VOCABULARY[token]
        if token == _END:
            operator, *arguments = parts.pop()
            opening = "( " * (len(arguments) + 1)
            closed = "".join(f" {argument} )" for argument in arguments)
            text = f"{opening}{operator}{closed} ] )"
        if _OPERATOR <= token < _END:
            parts.append([text])
        else:
            parts[-1].append(text)
    return " ".join(parts[0])


def write_official(examples: Iterable[Example], folder: Path) -> None:
    """Write ``basic_{train,val,test}.tsv``; each appears whole or not at all."""
    with named_errors(folder), ExitStack() as stack:
        files = {}
        for split, name in FILES.items():
            path = stack.enter_context(atomic_path(folder / name))
            files[split] = stack.enter_context(path.open("w", newline=""))
            files[split].write("Source\tTarget\r\n")
        for split, (tokens,), value in examples:
            files[split].write(f"{official_source(tokens)}\t{value}\r\n")

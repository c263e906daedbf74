"""Quantities with their formula: one text is shown and evaluated, so the two cannot differ."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_SYMBOL = re.compile(r"[A-Za-z_]+")


class Term(NamedTuple):
    """A summand: what it stands for, and its formula."""

    name: str
    formula: str


@dataclass(frozen=True)
class Quantity:
    """A named sum of terms, and the value of every symbol in their formulas."""

    name: str
    terms: tuple[Term, ...]
    symbols: Mapping[str, int]

    @property
    def value(self) -> int:
        """The sum of all terms."""
        return sum(map(self.term_value, self.terms))

    def term_value(self, term: Term) -> int:
        """The value of one term."""
        # The formulas are constants of this package: arithmetic on integers and nothing else.
        return int(eval(term.formula, {"__builtins__": {}}, dict(self.symbols)))

    def with_numbers(self, term: Term) -> str:
        """A term's formula with its symbols replaced by their values."""
        return _SYMBOL.sub(lambda match: str(self.symbols[match[0]]), term.formula)

    def explain(self) -> str:
        """The value, then a line per term: its formula in symbols, in numbers, and its value."""
        lines = [f"{self.name} = {self.value:,}"]
        for term in self.terms:
            lines.append(f"  {term.name}: {term.formula} = {self.with_numbers(term)} = {self.term_value(term):,}")
        return "\n".join(lines)

    def __add__(self, other: "Quantity") -> "Quantity":
        """The terms of both, under the name of the first."""
        return Quantity(self.name, (*self.terms, *other.terms), self.symbols)

    def times(self, factor: str, *, name: str | None = None) -> "Quantity":
        """Every term times a factor in the same symbols."""
        terms = (Term(term.name, f"{factor} * {_parenthesised(term.formula)}") for term in self.terms)
        return Quantity(name or self.name, tuple(terms), self.symbols)


def _parenthesised(formula: str) -> str:
    """The formula in parentheses, unless it is a product."""
    depth = 0
    for character in formula:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character in "+-":
            return f"({formula})"
    return formula

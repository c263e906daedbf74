"""Quantities with their formula: one text is shown and evaluated."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_SYMBOL = re.compile(r"[A-Za-z_]+")


class Term(NamedTuple):
    """A summand."""

    name: str
    formula: str


@dataclass(frozen=True)
class Quantity:
    """A sum of terms, and the value of every symbol in them."""

    name: str
    terms: tuple[Term, ...]
    symbols: Mapping[str, int]

    @property
    def value(self) -> int:
        """The sum of all terms."""
        return sum(map(self.term_value, self.terms))

    def term_value(self, term: Term) -> int:
        """The value of one term."""
        # formulas are constants of this package: arithmetic on integers
        return int(eval(term.formula, {"__builtins__": {}}, dict(self.symbols)))

    def with_numbers(self, term: Term) -> str:
        """A formula, with values for symbols."""
        return _SYMBOL.sub(lambda match: str(self.symbols[match[0]]), term.formula)

    def explain(self) -> str:
        """The value, then a line per term: in symbols, in numbers, its value."""
        lines = [f"{self.name} = {self.value:,}"]
        for term in self.terms:
            numbers, value = self.with_numbers(term), self.term_value(term)
            lines.append(f"  {term.name}: {term.formula} = {numbers} = {value:,}")
        return "\n".join(lines)

    def __add__(self, other: "Quantity") -> "Quantity":
        """The terms of both, by the first name."""
        return Quantity(self.name, (*self.terms, *other.terms), self.symbols)

    def times(self, factor: str, *, name: str | None = None) -> "Quantity":
        """Every term times a factor in the same symbols."""
        terms = tuple(Term(term.name, f"{factor} * {_parenthesised(term.formula)}") for term in self.terms)
        return Quantity(name or self.name, terms, self.symbols)


def _parenthesised(formula: str) -> str:
    """The formula in parentheses if it is a sum."""
    node = ast.parse(formula, mode="eval").body
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)
    return f"({formula})" if is_sum else formula

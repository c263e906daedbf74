"""Numbers that know the formula they came from: one text is shown and evaluated, so the two cannot drift apart."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_SYMBOL = re.compile(r"[A-Za-z_]+")


@dataclass(frozen=True)
class Term:
    """One summand: what it stands for, and its formula in the symbols of the quantity."""

    name: str
    formula: str


@dataclass(frozen=True)
class Quantity:
    """The sum of some terms at given sizes.

    Attributes:
        name: what is counted.
        unit: of the value.
        terms: the summands.
        symbols: the value of every symbol.
    """

    name: str
    unit: str
    terms: tuple[Term, ...]
    symbols: Mapping[str, int]

    @property
    def value(self) -> int:
        """The sum of all terms."""
        return sum(self.term_value(term) for term in self.terms)

    def term_value(self, term: Term) -> int:
        """One term at these sizes."""
        # The formulas are constants of this package: arithmetic on whole numbers and nothing else.
        return int(eval(term.formula, {"__builtins__": {}}, dict(self.symbols)))

    @property
    def formula(self) -> str:
        """The whole formula in symbols."""
        return " + ".join(term.formula for term in self.terms) or "0"

    def with_numbers(self, term: Term) -> str:
        """A term's formula with the numbers put in."""
        return _SYMBOL.sub(lambda match: str(self.symbols[match[0]]), term.formula)

    def explain(self) -> str:
        """The value, and each term in symbols, in numbers, and its own value; a line each."""
        lines = [f"{self.name} = {self.value:,} {self.unit}".rstrip()]
        for term in self.terms:
            lines.append(f"  {term.name}: {term.formula} = {self.with_numbers(term)} = {self.term_value(term):,}")
        return "\n".join(lines)

    def __add__(self, other: "Quantity") -> "Quantity":
        """Both together, under the name of the first."""
        return Quantity(self.name, self.unit, (*self.terms, *other.terms), {**self.symbols, **other.symbols})

    def times(self, factor: str, *, name: str | None = None) -> "Quantity":
        """Every term times a factor in the same symbols."""
        terms = tuple(Term(term.name, f"{factor} * {_bracketed(term.formula)}") for term in self.terms)
        return Quantity(name or self.name, self.unit, terms, self.symbols)


def _bracketed(formula: str) -> str:
    """The formula in brackets, unless it is a product already."""
    depth = 0
    for character in formula:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character in "+-":
            return f"({formula})"
    return formula

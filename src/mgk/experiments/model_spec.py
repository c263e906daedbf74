"""Who takes part in a comparison: a variant of attention and its heads. Free of torch."""

from dataclasses import dataclass
from difflib import get_close_matches

from mgk.variants import VARIANTS


@dataclass(frozen=True)
class Contender:
    """One kind of model."""

    attention: str
    heads: int

    @property
    def name(self) -> str:
        """As the command line has it: ``mgk:4``."""
        return f"{self.attention}:{self.heads}"

    @property
    def title(self) -> str:
        """For people: ``mgk with 4 heads``."""
        return f"{self.attention} with {self.heads} head{'' if self.heads == 1 else 's'}"


def parse_contender(text: str) -> Contender:
    """``mgk:4`` -> mgk with 4 heads; ``ValueError`` with the nearest name otherwise."""
    attention, colon, heads = text.strip().partition(":")
    if attention not in VARIANTS:
        near = get_close_matches(attention, VARIANTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(VARIANTS)}"
        raise ValueError(f"there is no attention {attention!r}; {hint}")
    if not colon or not heads.isdecimal() or int(heads) < 1:
        raise ValueError(f"{text!r} must name the attention and its heads, as in {attention}:4")
    return Contender(attention, int(heads))

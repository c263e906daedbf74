"""What measurements say of a claim: confirmed, not seen at this scale, or contradicted.

The rules, with d the difference of a candidate to a baseline (above 0: the candidate is better) and its 95% interval
[low, high]: in points of accuracy, the mean over the paper's tasks, paired by seed and test example; of language models
in per cent of the baseline's perplexity, paired by seed.

- "better" is confirmed where low > 0, contradicted where high < 0, and not seen otherwise.
- "comparable or better" is confirmed where low > -margin, contradicted where high < -margin, and not seen otherwise.
  The margin is 1 point of accuracy, or 2 per cent of perplexity: about what two seeds of one model differ by.
- A task on which neither model is better than answering without looking says nothing and is left out.
- A claim about several pairs of models is confirmed where it is for all of them, contradicted where it is for at least
  one, and not seen otherwise.
- A claim about costs is a matter of formulas: confirmed or contradicted.
- "throughout training" is confirmed where the mean over seeds is better at every evaluation, contradicted where the 95%
  interval of the difference, paired by seed, lies below 0 at one of them, and not seen otherwise.

Free of torch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from mgk.analysis.confidence_intervals import Interval
from mgk.experiments.evidence.effects import Measured
from mgk.experiments.model_analysis import ModelAnalysis
from mgk.experiments.model_spec import ModelSpec

Word = Literal["confirmed", "not seen at this scale", "contradicted", "not measured"]
CONFIRMED, NOT_SEEN, CONTRADICTED, NOT_MEASURED = get_args(Word)

MARGIN_POINTS, MARGIN_PERPLEXITY = 1.0, 2.0


@dataclass(frozen=True)
class Evidence:
    """What one comparison says.

    Attributes:
        word: the verdict on it alone.
        sentence: the measurement.
        interval: of the difference, where there is one.
    """

    word: Word
    sentence: str
    interval: Interval | None = None


@dataclass(frozen=True)
class Verdict:
    """What all comparisons of a claim say together."""

    word: Word
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Findings:
    """All that verdicts are made from.

    Attributes:
        preset: of the trials.
        measured: their records.
        inside: what is seen in models, by task and model; a model of each seed that was looked into.
    """

    preset: str
    measured: Measured
    inside: Mapping[tuple[str, ModelSpec], tuple[ModelAnalysis, ...]]


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        id: a name.
        text: what is claimed.
        where: it stands in the paper.
        experiments: whose trials test it.
        rule: that its verdict follows from.
    """

    id: str
    text: str
    where: str
    experiments: tuple[str, ...]
    rule: Callable[[Findings], Iterator[Evidence]]

    def verdict(self, findings: Findings) -> Verdict:
        """The verdict on what was found."""
        evidence = tuple(self.rule(findings))
        words = [item.word for item in evidence]
        if CONTRADICTED in words:
            return Verdict(CONTRADICTED, evidence)
        if not words or NOT_MEASURED in words:
            return Verdict(NOT_MEASURED, evidence)
        return Verdict(CONFIRMED if set(words) == {CONFIRMED} else NOT_SEEN, evidence)


def judge(interval: Interval, *, margin: float = 0.0) -> Word:
    """Better (no margin), or comparable or better (within the margin), by the rules above."""
    if interval.low > -margin:
        return CONFIRMED
    return CONTRADICTED if interval.high < -margin else NOT_SEEN

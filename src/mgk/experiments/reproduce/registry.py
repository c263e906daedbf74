"""Every table and figure of the paper, and ours, as an experiment: which models, on which tasks. Free of torch.

On the laptop the tables have the rows with 2 and 1 heads, and what the paper shows with 8 and 4 heads (Table 3 and the
figures that go with it) or with 4 and 2 (Fig. 2 and 8) is 2 and 1 there, WikiText-2 in place of WikiText-103.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from mgk.experiments.reproduce.published import EXTRA_TASKS, LRA, SEEDS, TABLES
from mgk.experiments.trials import ModelSpec, Trial
from mgk.training.errors import RecipeError
from mgk.training.recipe import PRESETS

Kind = Literal["table", "curves", "maps", "cost"]

SEEDS_OF_PRESET = {"paper": SEEDS, "laptop": 3, "smoke": 1}
ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One table or figure.

    Attributes:
        id: the name on the command line.
        kind: a table; curves over training; maps, ranks and heads of trained models; or costs by formula.
        title: one line.
        claim: what the paper says it shows; of ours, what is asked.
        models: as in the paper, from top to bottom.
        tasks: by default.
        more_tasks: that can be chosen besides.
        is_language: whether the task is WikiText: 103 in the paper, 2 on the laptop.
        shrink: on the laptop, by which heads are divided; None keeps the rows with 2 and 1 heads.
        is_ours: whether the paper has no such table.
    """

    id: str
    kind: Kind
    title: str
    claim: str
    models: tuple[ModelSpec, ...] = ()
    tasks: tuple[str, ...] = LRA
    more_tasks: tuple[str, ...] = ()
    is_language: bool = False
    shrink: int | None = None
    is_ours: bool = False

    def models_at(self, preset: str) -> tuple[ModelSpec, ...]:
        """The models at a preset."""
        if preset == "paper":
            return self.models
        if self.shrink is not None:
            return tuple(model.scaled(1 / self.shrink) for model in self.models)
        return tuple(model for model in self.models if model.heads <= (1 if model.is_mixture else 2))

    def published(self, model: ModelSpec, preset: str) -> ModelSpec:
        """The model of the paper that stands for one at a preset."""
        return model if preset == "paper" or self.shrink is None else model.scaled(self.shrink)

    def reference(self, model: ModelSpec, preset: str) -> ModelSpec | None:
        """What a model is compared to: the baseline with twice the heads, or with as many where that is all there is.

        In our own tables: the same model with the paper's setting; of feature maps, linear attention with the same map.
        """
        if not model.is_mixture:
            return None
        if self.is_ours:
            plain = ModelSpec(model.attention, model.heads)
            if self.id == "feature-maps":
                return replace(model, attention=model.baseline(model.heads).attention)
            return plain if plain != model else None
        twice, equal = (model.baseline(heads) for heads in (2 * model.heads, model.heads))
        models = self.models_at(preset)
        return equal if twice not in models and equal in models else twice

    def tasks_at(self, preset: str, wanted: Sequence[str] | None = None) -> tuple[str, ...]:
        """The tasks at a preset; of those that are wanted, the ones that it has."""
        if self.is_language:
            language = "wikitext-103" if preset == "paper" else "wikitext-2"
            return (language,) if wanted is None or language in wanted else ()
        if wanted is None:
            return self.tasks
        return tuple(task for task in (*self.tasks, *self.more_tasks) if task in wanted)

    def seeds_at(self, preset: str, seeds: int | None = None) -> int:
        """How many seeds: the preset's unless told; one where models are looked into, as in the paper."""
        return seeds or (1 if self.kind == "maps" else SEEDS_OF_PRESET[preset])

    def trials(self, preset: str, *, seeds: int | None = None, tasks: Sequence[str] | None = None) -> list[Trial]:
        """All trials, seed by seed, so that a first whole table is there early."""
        return [
            Trial(preset, task, model, seed)
            for seed in range(self.seeds_at(preset, seeds))
            for task in self.tasks_at(preset, tasks)
            for model in self.models_at(preset)
        ]

    def command(self, preset: str, *, seeds: int | None = None, tasks: Sequence[str] | None = None) -> str:
        """The command that makes it."""
        options = f" --preset {preset}"
        if seeds is not None:
            options += f" --seeds {seeds}"
        if tasks is not None:
            options += f" --tasks {','.join(tasks)}"
        return f"mgk reproduce {self.id}{options}"


def _family(single: str, mixture: str, heads: Sequence[int]) -> tuple[ModelSpec, ...]:
    """A baseline with the most heads, then the mixture with each number of heads."""
    return (ModelSpec(single, heads[0]), *(ModelSpec(mixture, number) for number in heads))


_EXPERIMENTS = (
    Experiment(
        id="table1",
        kind="table",
        title="Table 1: test accuracy of softmax, mgk and smgk",
        claim="With half the heads, mgk and smgk are at least as accurate as softmax; with the same heads, better.",
        models=tuple(TABLES["table1"].rows),
        more_tasks=EXTRA_TASKS,
    ),
    Experiment(
        id="table2",
        kind="table",
        title="Table 2: test accuracy of linear, mlk and smlk",
        claim="With half the heads, mlk and smlk are comparable to linear attention or better.",
        models=tuple(TABLES["table2"].rows),
        more_tasks=EXTRA_TASKS,
    ),
    Experiment(
        id="table3",
        kind="table",
        title="Table 3: perplexity of language models",
        claim="mgk with half the heads has the lower test perplexity; with the same heads all mixtures improve.",
        models=tuple(TABLES["table3"].rows),
        is_language=True,
        shrink=4,
    ),
    Experiment(
        id="table4",
        kind="table",
        title="Table 4: inference and learning: settings A, B (Soft-E) and C (Hard-E)",
        claim="smgk with a hard E-step, the most efficient model, is comparable to the best.",
        models=tuple(TABLES["table4"].rows),
        more_tasks=EXTRA_TASKS,
    ),
    Experiment(
        id="fig1",
        kind="curves",
        title="Figure 1: training loss and accuracy on Retrieval",
        claim="mgk and mlk are better than their baselines throughout training.",
        models=(*_family("softmax", "mgk", [2, 1]), *_family("linear", "mlk", [2, 1])),
        tasks=("retrieval",),
        shrink=1,
    ),
    Experiment(
        id="fig2",
        kind="maps",
        title="Figure 2: attention maps and ranks on Retrieval",
        claim="Attention matrices of mgk have higher ranks than those of softmax and more diverse patterns.",
        models=_family("softmax", "mgk", [4, 2]),
        tasks=("retrieval",),
        shrink=2,
    ),
    Experiment(
        id="fig3",
        kind="cost",
        title="Figure 3: FLOPs and parameters over heads",
        claim="Half the heads cost fewer FLOPs and parameters, and the advantage grows with the heads.",
        tasks=("retrieval",),
    ),
    Experiment(
        id="fig4",
        kind="curves",
        title="Figure 4: validation perplexity while training",
        claim="With the same heads mixtures are below their baselines, with half the heads on par.",
        models=tuple(TABLES["table3"].rows),
        is_language=True,
        shrink=4,
    ),
    Experiment(
        id="fig5",
        kind="maps",
        title="Figure 5: attention maps of language models",
        claim="Queries of mgk attend to more diverse positions, in all heads and layers.",
        models=_family("softmax", "mgk", [8, 4]),
        is_language=True,
        shrink=4,
    ),
    Experiment(
        id="fig6",
        kind="maps",
        title="Figure 6: ranks of language models' attention matrices",
        claim="Attention matrices of mgk have higher ranks than those of softmax.",
        models=_family("softmax", "mgk", [8, 4]),
        is_language=True,
        shrink=4,
    ),
    Experiment(
        id="fig7",
        kind="cost",
        title="Figure 7: FLOPs and parameters of the inference and learning techniques",
        claim="Their FLOPs are nearly the same; smgk has the fewest parameters.",
        tasks=("retrieval",),
    ),
    Experiment(
        id="fig8",
        kind="maps",
        title="Figure 8: attention maps of linear attention on Retrieval",
        claim="Maps of linear attention and of mlk with the same and with half the heads.",
        models=_family("linear", "mlk", [4, 2]),
        tasks=("retrieval",),
        shrink=2,
    ),
    Experiment(
        id="mixtures",
        kind="table",
        title="Ours: M = 1, 2, 3 and 4 components a key, one head",
        claim="How much does a component add, at fixed heads?",
        models=tuple(ModelSpec(name, 1, mixtures=m) for name in ("mgk", "smgk") for m in (1, 2, 3, 4)),
        tasks=("listops",),
        more_tasks=("text", "retrieval", *EXTRA_TASKS),
        is_ours=True,
    ),
    Experiment(
        id="variances",
        kind="table",
        title="Ours: constant, learned and M-step variances, one head",
        claim="The paper fixes the variance and leaves learning it as future work: does it help?",
        models=tuple(ModelSpec(name, 1, variance=v) for name in ("mgk", "smgk") for v in ("constant", "learned", "em")),
        tasks=("listops",),
        more_tasks=("text", "retrieval", *EXTRA_TASKS),
        is_ours=True,
    ),
    Experiment(
        id="feature-maps",
        kind="table",
        title="Ours: mlk with the feature maps of linear attention, Performer and DPFP, one head",
        claim="The paper says that mixtures fit other linear attentions as well: do they?",
        models=tuple(ModelSpec(name, 1, feature_map=f) for name in ("linear", "mlk") for f in ("elu", "favor", "dpfp")),
        tasks=("text",),
        more_tasks=("listops", "retrieval", *EXTRA_TASKS),
        is_ours=True,
    ),
)

EXPERIMENTS = {experiment.id: experiment for experiment in _EXPERIMENTS}
TASKS = (*LRA, *EXTRA_TASKS, "wikitext-2", "wikitext-103")


def find_experiments(name: str) -> list[Experiment]:
    """The experiment of a name, or all of them; the error suggests the nearest one."""
    if name == ALL:
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        near = get_close_matches(name.lower(), [*EXPERIMENTS, ALL], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(EXPERIMENTS)} or {ALL}"
        raise RecipeError(f"there is no experiment {name!r}; {hint}")
    return [EXPERIMENTS[name]]


def check_choice(preset: str, tasks: Sequence[str] | None) -> None:
    """Raise for a preset or a task that does not exist."""
    for what, name, known in (("preset", preset, PRESETS), *(("task", task, TASKS) for task in tasks or ())):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(known)}"
            raise RecipeError(f"there is no {what} {name!r}; {hint}")

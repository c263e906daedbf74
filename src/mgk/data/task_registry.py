"""What data sets there are. Free of torch and NumPy, so that the command line can list them at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal

from mgk.data.errors import UsageError

Kind = Literal["sequence", "pair", "image", "language"]

SYNTHETIC = "synthetic-"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One data set.

    Attributes:
        name: what the command line calls it.
        title: one line for people.
        kind: what an example is: tokens with a label, two token sequences with a label, an image, or running text.
        module: the module of ``mgk.data`` whose ``prepare`` reads or generates it.
        layout: what to fetch; an archive's folder serves as well.
        url: where from.
        licence: theirs.
        size: of the download, or of the prepared set where there is none.
        max_length: tokens an example keeps, as in the paper's settings.
        num_labels: how many classes; 0 for running text.
        splits: that a full preparation gives.
        options: of the preparation, with their defaults.
        source_options: those that count when files are read instead of generated; None for all.
        hub: the name and configuration at the Hugging Face hub, where it is there.
        hub_files: those of them that are the official files themselves.
        is_generated: whether it needs no source.
        is_synthetic: whether it is a made-up sample.
    """

    name: str
    title: str
    kind: Kind
    module: str
    layout: str
    url: str
    licence: str
    size: str
    max_length: int
    num_labels: int = 0
    splits: tuple[str, ...] = ("train", "validation", "test")
    options: Mapping[str, Any] = field(default_factory=dict)
    source_options: tuple[str, ...] | None = None
    hub: tuple[str, str | None] | None = None
    hub_files: tuple[str, ...] = ()
    is_generated: bool = False
    is_synthetic: bool = False

    def how_to_get(self) -> str:
        """One sentence: what to fetch, from where, and the command to run then."""
        if self.is_generated:
            return f"run: mgk data prepare {self.name}"
        return f"fetch {self.layout} from {self.url}, then run: mgk data prepare {self.name} --source PATH"


# Its address has been reported to answer "403 Forbidden" since 2026; whoever has the file can still use it.
_LRA = "LRA's lra_release.gz (https://storage.googleapis.com/long-range-arena/lra_release.gz, if it answers)"
_AAN = "https://huggingface.co/datasets/OpenNLPLab/lra"
_IDX = "{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]"

_REAL = (
    Task(
        name="listops",
        title="ListOps: the value of a nested list expression (LRA)",
        kind="sequence",
        module="listops",
        layout="basic_{train,val,test}.tsv",
        url=_LRA,
        licence="generated here; the published generator is Apache-2.0",
        size="100 MB prepared",
        max_length=2000,
        num_labels=10,
        options={
            "seed": 0,
            "train": 96_000,
            "validation": 2_000,
            "test": 2_000,
            "min_length": 500,
            "max_length": 2_000,
            "max_depth": 10,
            "max_args": 10,
        },
        source_options=(),
        is_generated=True,
    ),
    Task(
        name="text",
        title="Text: is an IMDb review positive, byte by byte (LRA)",
        kind="sequence",
        module="text",
        layout="aclImdb_v1.tar.gz",
        url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        licence="cite Maas 2011; not to be redistributed",
        size="84 MB",
        max_length=4000,
        num_labels=2,
        splits=("train", "test"),
        options={"seed": 0, "validation": 0},
        hub=("stanfordnlp/imdb", None),
    ),
    Task(
        name="retrieval",
        title="Retrieval: does one paper cite the other, byte by byte (LRA, AAN)",
        kind="pair",
        module="retrieval",
        layout="new_aan_pairs.{train,eval,test}.tsv",
        url=f"{_AAN} (folder data/aan) or {_LRA}",
        licence="none is stated for the pairs; the ACL Anthology's papers before 2016 are CC BY-NC-SA 3.0",
        size="10.6 GB",
        max_length=4000,
        num_labels=2,
        hub=("OpenNLPLab/lra", None),
        hub_files=tuple(f"data/aan/new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")),
    ),
    Task(
        name="image",
        title="Image: CIFAR-10 as 1,024 grey pixels (LRA), and in colour",
        kind="image",
        module="image",
        layout="cifar-10-binary.tar.gz (or cifar-10-python.tar.gz)",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        licence="cite Krizhevsky 2009; no licence is stated",
        size="170 MB",
        max_length=1024,
        num_labels=10,
        options={"validation": 5_000},
        hub=("uoft-cs/cifar10", None),
    ),
    Task(
        name="pathfinder",
        title="Pathfinder-32: are the two dots joined by a dashed path (LRA)",
        kind="image",
        module="pathfinder",
        layout="lra_release.gz or its folder pathfinder32",
        url=_LRA,
        licence="generated here; none is stated for the official images",
        size="205 MB prepared; lra_release.gz, of all LRA tasks, 7.7 GB",
        max_length=1024,
        num_labels=2,
        options={"seed": 0, "train": 160_000, "validation": 20_000, "test": 20_000, "difficulty": "hard"},
        source_options=("seed", "difficulty"),
        is_generated=True,
    ),
    Task(
        name="mnist",
        title="MNIST as 784 grey pixels",
        kind="image",
        module="image",
        layout=_IDX,
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        licence="CC BY-SA 3.0",
        size="11.6 MB",
        max_length=784,
        num_labels=10,
        options={"validation": 6_000},
        hub=("ylecun/mnist", None),
    ),
    Task(
        name="fashion-mnist",
        title="Fashion-MNIST as 784 grey pixels",
        kind="image",
        module="image",
        layout=_IDX,
        url="https://github.com/zalandoresearch/fashion-mnist/tree/master/data/fashion",
        licence="MIT",
        size="31 MB",
        max_length=784,
        num_labels=10,
        options={"validation": 6_000},
        hub=("zalando-datasets/fashion_mnist", None),
    ),
    Task(
        name="wikitext-2",
        title="WikiText-2: words of Wikipedia articles, 33,278 of them",
        kind="language",
        module="wikitext",
        layout="wikitext-2-v1.zip",
        url="https://wikitext.smerity.com/wikitext-2-v1.zip",
        licence="CC BY-SA",
        size="4.5 MB",
        max_length=256,
        hub=("Salesforce/wikitext", "wikitext-2-v1"),
    ),
    Task(
        name="wikitext-103",
        title="WikiText-103: words of Wikipedia articles, 267,735 of them",
        kind="language",
        module="wikitext",
        layout="wikitext-103-v1.zip",
        url="https://wikitext.smerity.com/wikitext-103-v1.zip",
        licence="CC BY-SA",
        size="190 MB",
        max_length=256,
        hub=("Salesforce/wikitext", "wikitext-103-v1"),
    ),
    Task(
        name="plain",
        title="Any text file, by bytes or by words",
        kind="language",
        module="plain",
        layout="a text file in UTF-8",
        url="your own disk",
        licence="yours",
        size="yours",
        max_length=256,
        options={"unit": "byte", "validation_percent": 5, "test_percent": 5},
    ),
)


def _sample(task: Task) -> Task:
    return replace(
        task,
        name=SYNTHETIC + task.name,
        title=f"A tiny made-up sample in the form of {task.name}; not the real task",
        module="samples",
        layout="nothing",
        url="generated here",
        licence="generated here",
        size="below 1 MB prepared",
        splits=("train", "validation", "test"),
        options={"seed": 0},
        source_options=None,
        hub=None,
        hub_files=(),
        is_generated=True,
        is_synthetic=True,
    )


TASKS: Mapping[str, Task] = {task.name: task for task in (*_REAL, *map(_sample, _REAL))}


def find_task(name: str) -> Task:
    """The task of this name; the error suggests the nearest one."""
    task = TASKS.get(name)
    if task is None:
        near = get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": choose one of {', '.join(TASKS)}"
        raise UsageError(f"there is no task {name!r}{hint}")
    return task

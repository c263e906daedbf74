"""What ``mgk bench train`` measures. Free of torch, so that the command line can check its options at once."""

from dataclasses import dataclass

SHAPES = ("listops", "text")
# Tokens that an example keeps at most, as in the Long Range Arena.
LENGTHS = {"listops": 2000, "text": 4000}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The shapes and options of one benchmark of training steps.

    Attributes:
        shapes: some of ``SHAPES``: the model of the Long Range Arena on batches whose lengths are drawn as in the task.
        heads: h, of the mixtures; softmax and linear have twice as many.
        batch: examples of a step; the paper has 32.
        mixtures: M.
        max_length: where examples are cut; the task's own limit if None.
        attention_dropout: the paper has 0.1, with which PyTorch's softmax attention has no fast path on the CPU.
        trainer_steps: steps that are timed for what ``Trainer`` adds to a bare loop; 0 leaves that out.
        memory_limit_gb: the mixture as it is usually written is left out where it would need more (10^9 bytes).
        threads: of the CPU; None leaves them as torch has them.
        rounds: how often each alternative is timed.
    """

    shapes: tuple[str, ...] = SHAPES
    heads: tuple[int, ...] = (1, 2, 4)
    batch: int = 4
    mixtures: int = 2
    max_length: int | None = None
    attention_dropout: float = 0.0
    trainer_steps: int = 20
    memory_limit_gb: float = 8.0
    threads: int | None = None
    rounds: int = 5

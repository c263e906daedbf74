"""What ``mgk bench generate`` measures. Free of torch, so that the command line can check its options at once."""

from dataclasses import dataclass

VARIANTS = ("mgk", "smgk", "linear", "mlk", "smlk")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings:
    """The shapes and options of one benchmark of generation.

    Attributes:
        batch: sequences at a time.
        prompt: tokens in the cache before the clock starts.
        tokens: generated while it runs.
        layers: of every model.
        width: of every model; the feed-forward network has four times as much, as in GPT-2.
        head_dim: D, of every model.
        heads: H, of the variants; softmax has as many as fill the width, as has GPT-2.
        mixtures: M.
        vocab_size: of every model.
        variants: some of ``VARIANTS``, measured beside softmax and GPT-2.
        positions: where the time for a token of ``mlk`` is measured; none leaves that out.
        position_tokens: tokens decoded at each of these.
        device: "cpu", "cuda", "cuda:1", ...
        threads: of the CPU; None leaves them as torch has them.
        rounds: how often each alternative is timed.
    """

    batch: int = 4
    prompt: int = 1536
    tokens: int = 512
    layers: int = 8
    width: int = 256
    head_dim: int = 32
    heads: int = 4
    mixtures: int = 2
    vocab_size: int = 256
    variants: tuple[str, ...] = ("smgk", "mgk")
    positions: tuple[int, ...] = (1_000, 2_000, 5_000, 10_000, 20_000)
    position_tokens: int = 64
    device: str = "cpu"
    threads: int | None = None
    rounds: int = 5

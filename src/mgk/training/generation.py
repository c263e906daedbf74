"""Text from the language model of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import AutoTokenizer, TextStreamer

from mgk.data.task_registry import find_task
from mgk.training.distributed import choose_device
from mgk.training.errors import RecipeError, TrainingError
from mgk.training.run_dir import MODEL, finished_recipe
from mgk.training.tasks import load_model, quiet

if TYPE_CHECKING:
    from mgk.models import MgkForCausalLM

_LINE_END = "<eos>"


def generate(
    run: Path,
    prompt: str = "",
    *,
    on_text: Callable[[str], None] = lambda text: None,
    max_new_tokens: int = 100,
    temperature: float = 1.0,
    top_k: int = 50,
    top_p: float = 1.0,
    greedy: bool = False,
    seed: int = 0,
    on_note: Callable[[str], None] = lambda text: None,
) -> str:
    """The prompt, the end of a line if empty, and its continuation.

    Args:
        on_text: called with each piece of the text as soon as it is final.
        top_k: sample from the most likely tokens only; 0 for all.
        top_p: sample from the most likely tokens of this total probability.
        on_note: called with notes, such as words that the model does not know.
    """
    recipe = finished_recipe(run)
    task = find_task(recipe.data.name)
    if task.kind != "language":
        raise RecipeError(f"{run}: a model of {recipe.task} classifies, it does not generate text")
    device = choose_device(recipe.training.device)
    model = cast("MgkForCausalLM", load_model(run, task)).to(device).eval()
    try:
        tokenizer = AutoTokenizer.from_pretrained(run / MODEL)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{run / MODEL}: the tokenizer cannot be loaded ({error})") from None
    ids = tokenizer(prompt or "\n", return_tensors="pt")["input_ids"]
    given, unk_id = ids.shape[1], tokenizer.unk_token_id
    if unk_id is not None and (unknown := int((ids == unk_id).sum())):
        on_note(f"{unknown} of {given} words of the prompt are not in the vocabulary")
    length, limit = given + max_new_tokens, model.config.max_position_embeddings
    if length > limit:
        if model.config.position == "learned" and length - 1 > limit:
            sizes = f"{given} tokens of the prompt and {max_new_tokens} new ones"
            raise RecipeError(f"{sizes} exceed {limit} positions")
        on_note(f"beyond {limit} tokens the model is outside of what it was trained on")
    options: dict[str, Any] = {"do_sample": False}
    if not greedy:
        options = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    streamer = _TextPieces(tokenizer, on_text, skip_prompt=not prompt)
    torch.manual_seed(seed)
    with quiet():
        model.generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=max_new_tokens,
            eos_token_id=None,  # it ends a line, not the text
            pad_token_id=0,
            streamer=streamer,
            **options,
        )
    return "".join(streamer.pieces)


class _TextPieces(TextStreamer):
    """Passes text on as soon as it is final: whole words, whole characters."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], *, skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt)
        self.pieces: list[str] = []
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text.replace(f"{_LINE_END} ", "\n").replace(_LINE_END, "\n"))
        self._on_text(self.pieces[-1])

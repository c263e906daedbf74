"""A model of a run or of a folder, and the example that it reads."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import mgk.models
from mgk._util.errors import UsageError, first_line
from mgk.analysis.attention_maps import inference
from mgk.analysis.explorer import ModelInput, Pixels
from mgk.analysis.model_source import ModelSource
from mgk.data.task_registry import find_task
from mgk.training.run_dir import read_run_recipe
from mgk.training.tasks import open_data, quiet

# What a model of a folder reads unless the user says otherwise.
DEFAULT_TEXT = (
    "A key with two components can be near to two kinds of queries: one head then does the work of two."
)
_SPACE = "▁"  # of SentencePiece, before a word


@dataclass(frozen=True)
class Content:
    """What a model is to read: a text, two texts, a picture, or the tensors of an image."""

    texts: tuple[str, ...] = ()
    image: dict[str, Tensor] | None = None
    picture: Image.Image | None = None


def load_model(source: ModelSource) -> Any:
    """The model in float32; nothing is downloaded or run from the folder."""
    folder, options = source.folder, {"local_files_only": True}
    with _errors(folder, "the configuration cannot be read", OSError, ValueError, KeyError):
        config = AutoConfig.from_pretrained(folder, **options)
    for name in config.architectures or ("AutoModel",):
        is_ours = name in mgk.models.__all__
        found: Any = getattr(mgk.models if is_ours else transformers, name, None)
        if found is not None:
            kind = {} if is_ours else {"attn_implementation": "eager", "use_safetensors": True}
            with _errors(folder, "the model cannot be loaded", OSError, ValueError), quiet():
                model = found.from_pretrained(folder, dtype=torch.float32, **options, **kind)
            return model.eval()
    names = " or ".join(config.architectures)
    raise UsageError(f"{folder}: neither mgk nor transformers has a class {names}")


def choose_content(
    source: ModelSource,
    texts: Sequence[str],
    *,
    image: Path | None = None,
    example: int | None,
    max_tokens: int,
) -> Content:
    """The user's picture or text, else a test example of the run, else ours.

    Without ``example``, from 1, the one nearest to ``max_tokens`` long.
    """
    if image is not None:
        if texts or example is not None:
            raise UsageError("--image stands alone: no --text and no --example beside it")
        with _errors(image, "the picture cannot be read", OSError, ValueError):
            return Content(picture=Image.open(image).convert("RGB"))
    if texts or source.run is None:
        if example is not None:
            raise UsageError("--example is one of a run's test split: it needs a RUN and no --text")
        return Content(tuple(texts) or (DEFAULT_TEXT,))
    recipe = read_run_recipe(source.run)
    with quiet():
        data = open_data(recipe.data)
        rows = data.split("test")
        count = len(rows)  # type: ignore[arg-type]  # all have a length
        if example is not None and not 1 <= example <= count:
            raise UsageError(f"--example must be from 1 to {count}, got {example}")
        row = rows[_nearest(rows, min(count, 1000), max_tokens) if example is None else example - 1]
        tokenizer = data.tokenizer()
    if find_task(recipe.data.name).kind == "image":
        return Content(image={name: x for name, x in row.items() if name in ("input_ids", "pixel_values")})
    assert tokenizer is not None
    names = [name for name in ("input_ids", "input_ids_2") if name in row]
    return Content(tuple(str(tokenizer.decode(row[name].tolist())) for name in names))


def read_content(
    source: ModelSource, model: Any, content: Content, *, max_tokens: int
) -> tuple[ModelInput, str]:
    """What the model reads, and a note where that is not all of the content."""
    is_ours = isinstance(model, mgk.models.MgkForImageClassification)
    reads_images = is_ours or model.main_input_name == "pixel_values"
    if reads_images != (not content.texts):
        sentence = "the model reads images, got text" if reads_images else "the model reads text, got an image"
        advice = "give --image FILE, or a RUN of an image task" if reads_images else "give --text"
        raise UsageError(f"{source.path}: {sentence}: {advice}")
    if reads_images and not is_ours:
        return _processed_picture(source, model, content.picture), ""
    if reads_images:
        image = _tensors(content.picture, model.config) if content.picture else content.image
        return _image_input(source, model, image or {}), ""
    is_pair = isinstance(model, mgk.models.MgkForDocumentRetrieval)
    wanted = 2 if is_pair else 1
    if len(content.texts) != wanted:
        reads = f"the model reads {wanted} text{'s' if is_pair else ''}"
        advice = f"give {' '.join(['--text ...'] * wanted)}"
        raise UsageError(f"{source.path}: {reads}, got {len(content.texts)}: {advice}")
    # transformers raises a dozen kinds of errors, by what is missing
    with _errors(source.folder, "the tokenizer cannot be loaded", Exception):
        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
    limit = min(max_tokens, getattr(model.config, "max_position_embeddings", None) or max_tokens)
    inputs: dict[str, Tensor] = {}
    note = ""
    for suffix, text in zip(("", "_2"), content.texts, strict=False):
        found, total = _tokenized(tokenizer, text, limit, source)
        inputs |= {f"{name}{suffix}": values for name, values in found.items()}
        if not suffix and total > limit:
            note = f"The first {limit:,} of {total:,} tokens."
    name_of = lambda index: token_text(tokenizer, index)  # noqa: E731
    tokens = [name_of(index) for index in inputs["input_ids"].tolist()]
    if getattr(model.config, "pooling", None) == "cls":
        tokens.insert(0, "[cls]")
    if is_pair:
        note = f"{note} Attention within the first text; the prediction is of both.".strip()
    return ModelInput(inputs, tuple(tokens), name_of), note


def token_text(tokenizer: Any, index: int) -> str:
    """A token as in a text: with its space; bytes in hexadecimal."""
    piece = tokenizer.convert_ids_to_tokens(index)
    if piece is None:
        return f"<{index}>"
    text = str(tokenizer.decode([index], clean_up_tokenization_spaces=False))
    if "\ufffd" in text or not text:
        codes = bytes_to_unicode()
        values = {symbol: value for value, symbol in codes.items()}
        is_bytes = bool(text) and all(symbol in values for symbol in piece)
        return "".join(f"\\x{values[symbol]:02x}" for symbol in piece) if is_bytes else piece
    return f" {text}" if piece.startswith(_SPACE) and not text.startswith(" ") else text


def _nearest(rows: Any, count: int, length: int) -> int:
    """The first of ``count`` examples whose length is nearest to ``length``."""
    lengths = np.array([len(next(iter(rows[place].values()))) for place in range(count)])
    return int(np.abs(lengths - length).argmin())


def _tokenized(tokenizer: Any, text: str, limit: int, source: ModelSource) -> tuple[dict[str, Tensor], int]:
    """The inputs of at most ``limit`` tokens, and how many the text has."""
    try:
        with quiet():
            total = len(tokenizer(text, verbose=False)["input_ids"])
            found = tokenizer(text, truncation=True, max_length=limit, return_tensors="pt")
    except Exception as error:  # the tokenizers' own errors have no common class
        why = f"the tokenizer does not know this text ({first_line(error)})"
        raise UsageError(f"{source.path}: {why}: give another --text") from None
    if not total:
        raise UsageError(f"{source.path}: the text has no token: give another --text")
    return {name: values[0] for name, values in found.items()}, total


def _image_input(source: ModelSource, model: Any, image: dict[str, Tensor]) -> ModelInput:
    """An image as pixels from 0 to 255, or as patches of their mean colour."""
    wanted = "input_ids" if getattr(model.config, "patch_size", None) is None else "pixel_values"
    if wanted not in image:
        there = ", ".join(image)
        raise UsageError(f"{source.path}: the model reads {wanted}, and the example has {there}")
    width = model.config.image_size // (model.config.patch_size or 1)
    if wanted == "input_ids":
        values = image[wanted].tolist()
        tokens = [str(value) for value in values]
        colours = [f"#{value:02x}{value:02x}{value:02x}" for value in values]
    else:
        colours = _patch_colours(image[wanted], model.config.patch_size)
        tokens = _patch_names(len(colours), width)
    if getattr(model.config, "pooling", None) == "cls":
        tokens.insert(0, "[cls]")
    return ModelInput({wanted: image[wanted]}, tuple(tokens), None, Pixels(width, tuple(colours)))


def _patch_colours(pixels: Tensor, size: int) -> list[str]:
    """The mean colours of an image (C, H, W) of values from 0 to 1, patch by patch."""
    means = torch.nn.functional.avg_pool2d(pixels.float(), size).flatten(1).T  # (patches, channels)
    shades = (means.expand(-1, 3) * 255).round().int().clamp(0, 255).tolist()
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in shades]


def _patch_names(count: int, width: int) -> list[str]:
    """Row and column, from 1."""
    return [f"{place // width + 1},{place % width + 1}" for place in range(count)]


def _tensors(picture: Image.Image, config: Any) -> dict[str, Tensor]:
    """A picture as image tasks give it: grey pixels, and values from 0 to 1."""
    colour = picture.resize((config.image_size, config.image_size))
    grey = torch.from_numpy(np.array(colour.convert("L")))
    values = torch.from_numpy(np.array(colour)).permute(2, 0, 1)
    pixels = values if config.num_channels == 3 else grey[None]
    return {"input_ids": grey.flatten().long(), "pixel_values": pixels / 255}


def _processed_picture(source: ModelSource, model: Any, picture: Image.Image | None) -> ModelInput:
    """A picture as the model's own processor makes it: a token a patch, others before them."""
    if picture is None:
        raise UsageError(f"{source.path}: the model has its own image processor: give --image FILE")
    # transformers raises a dozen kinds of errors, by what is missing
    with _errors(source.folder, "the image processor cannot be used", Exception):
        processor = AutoImageProcessor.from_pretrained(source.folder, local_files_only=True)
        inputs = {"pixel_values": processor(picture, return_tensors="pt")["pixel_values"][0]}
        with inference(model) as batch:
            maps = model(**batch(inputs), output_attentions=True).attentions
    size = getattr(model.config, "patch_size", None)
    if not isinstance(size, int) or not maps:
        raise UsageError(f"{source.path}: this model's attention is not one of patches")
    values = inputs["pixel_values"]
    scale = torch.tensor([processor.image_std, processor.image_mean])[..., None, None]
    colours = _patch_colours(values * scale[0] + scale[1], size)
    width, length = values.shape[-1] // size, maps[0].shape[-1]
    first = ["[cls]", *("[extra]" for _ in range(length))][: length - len(colours)]
    tokens = (*first, *_patch_names(len(colours), width))
    return ModelInput(inputs, tokens, None, Pixels(width, tuple(colours)))


@contextmanager
def _errors(folder: Path, what: str, *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kinds as error:
        raise UsageError(f"{folder}: {what}: {first_line(error)}") from None

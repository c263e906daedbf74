"""Inspect the heads of a model: attention maps, ranks, similarity of heads, and the components of their keys.

    python examples/inspect_heads.py                                     # trains two small models first, in seconds
    python examples/inspect_heads.py --model FOLDER --text "of a saved model, any text that it can read"

FOLDER is what ``save_pretrained`` wrote, with its tokenizer: that of ``classify_your_text.py``, or the ``model`` of a
run by ``mgk train`` (for which ``mgk analyze maps|ranks|redundancy|mixtures RUN`` are the same by command).
"""

# %%
import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mgk.analysis.attention_maps import attention_maps, attention_spread, draw_grid
from mgk.analysis.attention_rank import rank_distributions
from mgk.analysis.explorer import ModelInput, explore
from mgk.analysis.mixture_usage import mixture_usage
from mgk.analysis.redundancy import redundancy
from mgk.data import Collator, EpochBatches, listops_tokenizer, load
from mgk.experiments.render.explorer_page import explorer_page
from mgk.models import MgkConfig, MgkForSequenceClassification

parser = argparse.ArgumentParser(description="Inspect the heads of a model.")
parser.add_argument("--model", type=Path, help="a saved classifier; two are trained on ListOps if not given")
parser.add_argument("--text", action="append", help="with --model: what it reads; may be given several times")
parser.add_argument("--out", type=Path, help="the folder of the images; a temporary one if not given")
parser.add_argument("--epochs", type=int, default=8, help="of training, without --model")
options = parser.parse_args()
if bool(options.model) != bool(options.text):
    parser.error("--model and --text go together")
folder = options.out or Path(tempfile.mkdtemp(prefix="mgk-"))
folder.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)


# %% 1. The models: a saved one, or softmax with 4 heads and mgk with 2, trained on short synthetic ListOps.
def trained(attention: str, heads: int) -> Any:
    """A model after few steps, whose heads have begun to differ."""
    data = load("synthetic-listops", "train", folder=folder / "data")
    config = MgkConfig(
        attention=attention,
        vocab_size=data.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=heads,
        head_dim=16,
        intermediate_size=128,
        num_labels=10,
    )
    model = MgkForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = EpochBatches(len(data), 32, lengths=data.lengths)
    for epoch in range(options.epochs):
        batches.set_epoch(epoch)
        for batch in DataLoader(data, batch_sampler=batches, collate_fn=Collator(data.pad_id)):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"{attention}, {heads} heads: {options.epochs} epochs, loss {loss:.2f}", flush=True)
    return model


if options.model:
    saved = AutoModelForSequenceClassification.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    models = {saved.config.attention: saved}
    examples = [{"input_ids": tokenizer(text, return_tensors="pt")["input_ids"][0]} for text in options.text]
else:
    models, tokenizer = {"softmax": trained("softmax", 4), "mgk": trained("mgk", 2)}, listops_tokenizer()
    test = load("synthetic-listops", "test", folder=folder / "data")
    examples = sorted((test[place] for place in range(16)), key=lambda example: -len(example["input_ids"]))

# %% 2. Maps: row i has the attention weights of query i. An image has a row per layer and a column per head.
print("\nAttention of the average query of the first example:")
for name, model in models.items():
    (maps,) = attention_maps(model, examples[:1])
    draw_grid(maps, title=name, file=folder / f"{name}.png")
    for title, weights in maps.items():
        spread = attention_spread(weights)
        print(f"  {name}, {title}: {spread.positions:.1f} effective positions, {spread.nearby:.0%} nearby")

# %% 3. Ranks, as the paper counts them, and effective ranks: 1 where all rows are equal.
print("\nRanks of the maps, means over examples and heads:")
for name, model in models.items():
    for ranks in rank_distributions(model, examples):
        mean, most, effective = ranks.ranks.mean(), ranks.lengths.mean(), ranks.effective.mean()
        print(f"  {name}, layer {ranks.layer + 1}: {mean:.1f} of {most:.1f}, effective {effective:.1f}")

# %% 4. Redundancy: 1 for identical heads, 0 for heads that never attend to the same keys.
print("\nSimilarity of the heads, means over pairs:")
for name, model in models.items():
    similarity = redundancy(model, examples)
    for where, value in (
        ("one layer", similarity.within_layers),
        ("different layers", similarity.across_layers),
    ):
        print(f"  {name}, of {where}: {'there is no pair' if value is None else f'{value:.2f}'}")

# %% 5. Components of a key: the share of the attention through each, and their distance in standard deviations.
print("\nUse of the components of a key:")
for name, model in models.items():
    for usage in mixture_usage(model, examples) if name not in ("softmax", "linear") else []:
        for head, (share, apart) in enumerate(
            zip(usage.share.tolist(), usage.distance.amax((1, 2)), strict=True)
        ):
            shares = " and ".join(f"{part:.0%}" for part in share)
            print(
                f"  {name}, layer {usage.layer + 1}, head {head + 1}: {shares} of the attention, {apart:.1f} apart"
            )

# %% 6. A page for the browser, both models on the first example: the same by mgk explore RUN --compare OTHER.
ids = examples[0]["input_ids"]
read = ModelInput({"input_ids": ids}, tuple(tokenizer.convert_ids_to_tokens(ids.tolist())))
page = folder / "explore.html"
page.write_text(explorer_page([explore(model, read, name=name) for name, model in models.items()]))
print(f"\npage: {page}")
print(f"images: {', '.join(str(folder / f'{name}.png') for name in models)}")

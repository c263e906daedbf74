"""A synthetic comparison for the tests of its page."""

import numpy as np

from mgk.analysis import cost_model
from mgk.analysis.attention_maps import AttentionMaps
from mgk.analysis.confidence_intervals import (
    mean_accuracy,
    mean_difference,
    mean_over_blocks,
    paired_difference,
)
from mgk.experiments.compare.result import Comparison, Result
from mgk.experiments.model_analysis import Inspection
from mgk.experiments.model_spec import ModelSpec

SHAPE = {"head_dim": 32, "hidden": 64, "layers": 2, "intermediate": 128, "length": 20, "labels": 10}


def example(seeds=1, metric="accuracy", names=("softmax:2", "smgk:1", "mgk:1")):
    """Models that get a little better from one to the next."""
    generator = np.random.default_rng(0)
    difficulty = generator.random((seeds, 400))
    tables = [difficulty < 0.5 + 0.04 * place for place in range(len(names))]
    perplexities = [tuple(40.0 - place + seed for seed in range(seeds)) for place in range(len(names))]
    results, flops = [], {}
    for place, name in enumerate(names):
        model = ModelSpec.parse(name)
        sizes = cost_model.Sizes(attention=model.attention, heads=model.heads, head="classification", **SHAPE)
        flops[name] = cost_model.forward_flops(sizes)
        is_accuracy = metric == "accuracy"
        values = tuple(tables[place].mean(1).tolist()) if is_accuracy else perplexities[place]
        blocks = np.array(perplexities)[..., None] + generator.normal(0, 0.01, (len(names), seeds, 32))
        score, gap = mean_difference(values, [0.0] * seeds), mean_difference(values, perplexities[0])
        if metric == "bits_per_byte":
            score, gap = mean_over_blocks(blocks[place]), mean_over_blocks(blocks[place] - blocks[0])
        results.append(
            Result(
                name=name,
                title=model.phrase,
                parameters=80_000 - 9_000 * place,
                flops=flops[name].value,
                flops_formula=flops[name].explain(),
                seconds_per_step=0.02 + 0.003 * place,
                peak_memory_bytes=None if place == 2 else 100_000_000,
                values=values,
                score=mean_accuracy(tables[place]) if is_accuracy else score,
                losses=tuple(tuple((10.0 * n, 2.3 / n) for n in range(1, 60)) for _ in range(seeds)),
                validation=tuple(
                    tuple((100.0 * n, 0.1 * n + 0.01 * s) for n in range(1, 6)) for s in range(seeds)
                ),
                paired=paired_difference(tables[place], tables[0]) if is_accuracy and place else None,
                gap=None if is_accuracy or not place else gap,
                runs=tuple(f"run-{place}-{seed}" for seed in range(seeds)),
            )
        )
    comparison = Comparison(
        task="listops",
        data="listops",
        preset="laptop",
        metric=metric,
        chance=0.2 if metric == "accuracy" else None,
        test_examples=400,
        length=20,
        steps=600,
        seeds=tuple(range(seeds)),
        results=tuple(results),
        command="mgk compare listops --baseline softmax:2",
        machine="a machine with <angle brackets> & two cores",
        date="2026-01-01T00:00:00+00:00",
        recipe="format: 1\ntask: listops\n",
    )
    maps = {}
    for name in names:
        weights = generator.random((2, ModelSpec.parse(name).heads, 12, 12), np.float32)
        maps[name] = AttentionMaps(
            weights / weights.sum(-1, keepdims=True), (0, 1), tuple(range(weights.shape[1]))
        )
    return comparison, Inspection(flops, 20, maps, "[MAX 2 9 ]", 4)

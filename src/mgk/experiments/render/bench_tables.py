"""Tables and sentences of documents from the files of the benchmarks."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mgk.experiments.render.numbers import text
from mgk.experiments.render.tables import DASH, markdown_table
from mgk.experiments.reproduce.published import TITLES
from mgk.training.errors import TrainingError

BENCH = "bench"

Bench = Mapping[str, Any]

# The command that writes each file.
_COMMANDS = {
    "generate": "mgk bench generate",
    "kernels": "mgk bench kernels",
    "roofline": "mgk bench roofline",
    "sdpa": "mgk bench attention --variants mgk,smgk --backends sdpa",
    "steps": "mgk bench steps",
    "steps_since_17c4eca": "its settings say how: not by mgk bench",
    "train": "mgk bench train",
    "triton": "python -m mgk.bench.triton_compile",
}
_SOFTMAX = "softmax, 8 heads, torch"
_MODELS = (_SOFTMAX, "mgk soft, 4 heads", "mgk hard, 4 heads", "smgk soft, 4 heads", "smgk hard, 4 heads")
_UNFUSED = "mgk unfused, 4 heads"
_PASSES = ("forward", "forward+backward")


class _Rows:
    """The rows of a benchmark, found by the values of their fields."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = rows

    def where(self, **fields: Any) -> "_Rows":
        """The rows with these values."""
        return _Rows(
            [row for row in self.rows if all(row.get(name) == value for name, value in fields.items())]
        )

    def value(self, name: str, **fields: Any) -> float:
        """The value of the first such row, or ``KeyError``."""
        found = self.where(**fields).rows
        if not found:
            raise KeyError(f"a row of {fields}")
        return float(found[0][name])

    def text(self, name: str, digits: int = 2, **fields: Any) -> str:
        """The value of the first such row, or a dash."""
        found = self.where(**fields).rows
        return f"{found[0][name]:,.{digits}f}" if found else DASH


def read_bench(folder: Path) -> Bench:
    """The files of the benchmarks that exist, by name."""
    reports = {}
    for name in _COMMANDS:
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                reports[name] = json.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                raise TrainingError(f"{path}: this is not the file of a benchmark ({error})") from None
    return reports


def bench_parts(bench: Bench, results: str) -> Mapping[str, Callable[[], str]]:
    """What makes each generated part of a document, by the part's name.

    Args:
        bench: as :func:`read_bench` gives it.
        results: the folder of all results, as the document cites it.
    """
    return {part: partial(_part, bench, results, *_PARTS[part]) for part in _PARTS}


def _part(bench: Bench, results: str, name: str, make: Callable[[Bench, str], str]) -> str:
    file = f"{results}/{BENCH}/{name}.json"
    if name not in bench:
        return f"Not measured yet: `{_COMMANDS[name]} --json {file}`."
    try:
        return make(bench, file)
    except KeyError as error:
        raise TrainingError(f"{results}/{BENCH}: a file of the benchmarks lacks {error}") from None


def _rows(bench: Bench, name: str, **fields: Any) -> _Rows:
    return _Rows(bench[name]["rows"]).where(**fields)


def _with_source(file: str, *parts: str) -> str:
    return "\n\n".join([f"From `{file}`:", *parts])


# The columns of tables of times: their names, and the fields of their rows.
_SHAPES = {f"{p}, D={d}": {"experiment": "table", "passes": p, "D": d} for d in (32, 64) for p in _PASSES}
_MASKS = {f"{e}, {p}": {"experiment": e, "passes": p} for e in ("causal", "padding") for p in _PASSES}
_LENGTHS = {
    f"{p}, N={n:,}": {"experiment": "length", "passes": p, "N": n} for p in _PASSES for n in (512, 2048, 16384)
}


def _ratios(columns: Mapping[str, Mapping[str, Any]], bench: Bench, file: str) -> str:
    """Times relative to the baseline, a row per model."""
    return _with_source(file, _ratio_table(columns, bench))


def _ratio_table(columns: Mapping[str, Mapping[str, Any]], bench: Bench) -> str:
    rows = _rows(bench, "kernels")
    return markdown_table(
        ["", *columns],
        [
            [name, *(rows.text("ratio", alternative=name, **fields) for fields in columns.values())]
            for name in _MODELS
        ],
    )


def _memory(bench: Bench, file: str) -> str:
    """Megabytes beyond the inputs, a row per length."""
    rows = _rows(bench, "kernels", experiment="length", passes=_PASSES[1])
    cells = [
        [f"N={n:,}", *(rows.text("peak_extra_mb", 0, N=n, alternative=model) for model in _MODELS)]
        for n in sorted({row["N"] for row in rows.rows})
    ]
    return _with_source(file, markdown_table(["MB", *_MODELS], cells))


def _unfused(bench: Bench, file: str) -> str:
    rows = _rows(bench, "kernels", experiment="unfused")
    unfused, fused = (
        [rows.value("ratio", alternative=name, passes=passes) for passes in _PASSES]
        for name in (_UNFUSED, _MODELS[1])
    )
    speedups = " and ".join(f"{slow / fast:.0f}" for slow, fast in zip(unfused, fused, strict=True))
    forward, both = unfused
    return text("bench_unfused", forward=forward, both=both, speedups=speedups, file=file)


def _decoding(bench: Bench, file: str) -> str:
    return f"{_decoding_line(bench).removesuffix('.')} (`{file}`)."


def _decoding_line(bench: Bench) -> str:
    rows = _rows(bench, "kernels", experiment="decoding")
    mgk, smgk = (rows.text("ratio", alternative=f"{model} soft, 4 heads") for model in ("mgk", "smgk"))
    return f"One token against {rows.rows[0]['N']:,} cached ones: mgk {mgk}, smgk {smgk}."


def _linear(bench: Bench, file: str) -> str:
    rows = _rows(bench, "kernels", experiment="linear")
    mlk, smgk = (rows.value("ratio", alternative=f"{name}, 4 heads") for name in ("mlk", "smgk soft"))
    return text("bench_linear", length=rows.rows[0]["N"], mlk=mlk, speedup=smgk / mlk, file=file)


# Experiments of any number of heads, and what their rows say beside sizes.
_MORE = {
    "short": "",
    "language model": ", causal",
    "half": ", bfloat16",
    "wide": ", causal",
    "tiny": ", one thread",
    "decoded token": ", one thread",
}


def _more(bench: Bench, file: str) -> str:
    """Ratios of short, wide, half-precision and tiny calls, then of windows."""
    cells = []
    for experiment, note in _MORE.items():
        rows = _rows(bench, "kernels", experiment=experiment)
        for case in rows.where(alternative="softmax").rows:
            sizes = {name: case[name] for name in ("B", "H", "N", "D", "passes")}
            shape = ", ".join(f"{name}={case[name]:,}" for name in ("B", "N", "D"))
            heads = f"{case['H']} vs {2 * case['H']} heads"
            ratios = (rows.text("ratio", alternative=name, **sizes) for name in ("mgk", "smgk"))
            cells.append([f"{experiment}: {shape}, {heads}{note}, {case['passes']}", *ratios])
    for case in _rows(bench, "kernels", experiment="window", alternative="smgk").rows:
        kind = ", causal" if case["causal"] else ""
        label = f"window {case['window']} of {case['N']:,} keys{kind}, vs no window"
        cells.append([f"{label}, {case['passes']}", DASH, f"{case['ratio']:.2f}"])
    return _with_source(file, markdown_table(["", "mgk", "smgk"], cells))


def _steps(bench: Bench, file: str) -> str:
    """The share of each part in a step, a row per recipe; the speed of packed rows."""
    rows = _rows(bench, "steps")
    parts = ("attention", "products", "dropout", "normalisation", "activation", "loss", "optimizer", "rest")
    cells = [
        [row["task"], f"{row['milliseconds']:.0f}", *(f"{row[f'{part}_share']:.2f}" for part in parts)]
        for row in rows.where(experiment="parts").rows
    ]
    table = markdown_table(["", "ms", *parts], cells)
    packing = {row["rows"]: row for row in rows.where(experiment="packing").rows}
    values: dict[str, float] = {}
    for name in ("grouped", "padded"):
        values[name] = packing["packed"]["tokens_per_second"] / packing[name]["tokens_per_second"]
        values[f"{name}_padding"] = 1 - packing[name]["token_share"]
    return _with_source(file, table, text("bench_packing", **values))


def _steps_since(bench: Bench, file: str) -> str:
    """Milliseconds of a step of earlier code and of today's, a row per recipe."""
    cells = [
        [
            f"{row['task']}, {row['attention']}:{row['heads']}",
            *(f"{row[name]:.0f}" for name in ("before_ms", "after_ms")),
            *(f"{row[name]:.2f}" for name in ("times_faster", "least", "most")),
        ]
        for row in bench["steps_since_17c4eca"]["rows"]
    ]
    columns = ["", "before, ms", "now, ms", "times faster", "least", "most"]
    return _with_source(file, markdown_table(columns, cells))


def _roofline(bench: Bench, file: str) -> str:
    """The forward by parts, beside its products at the peak rate."""
    rows, settings = _rows(bench, "roofline"), bench["roofline"]["settings"]
    rates = {row["operation"].replace("-", " "): row for row in rows.where(experiment="rate").rows}
    columns = {
        "all": "milliseconds",
        "score products": "score_products_milliseconds",
        "softmax": "softmax_milliseconds",
        "value product": "value_product_milliseconds",
        "rest": "rest_milliseconds",
        "all products at peak": "products_milliseconds_at_peak",
        "share of peak": "share_of_peak",
    }
    table = [
        [row["variant"], *(f"{row[name]:.2f}" for name in columns.values())]
        for row in rows.where(experiment="forward").rows
    ]
    opening = text("bench_roofline", file=file, settings=settings, rates=rates)
    shown = markdown_table(["forward, ms", *columns], table)
    return f"{opening}\n\n{shown}"


def _triton(bench: Bench, file: str) -> str:
    """The modelled time of half the heads on GPUs, overlapped and in turn."""
    rows = _rows(bench, "triton")
    model = rows.where(experiment="model", dtype="float16")
    shapes = dict.fromkeys((row["target"], row["width"]) for row in model.rows)
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in model.rows):
        for name in ("forward", "backward"):
            cells = [f"{variant}, {name}"]
            for target, width in shapes:
                where = {"target": target, "width": width, "variant": variant, "pass": name}
                cells.append(" / ".join(model.text(bound, **where) for bound in ("overlapped", "in_turn")))
            lines.append(cells)
    counted = len(rows.where(experiment="kernel").rows)
    shown = markdown_table(["half the heads", *(f"{target}, D = {width}" for target, width in shapes)], lines)
    notes = "\n".join(f"- {note}" for note in bench["triton"]["notes"])
    opening = text("bench_triton", file=file, counted=counted)
    return f"{opening}\n\n{shown}\n\n{notes}".rstrip()


def _generate(bench: Bench, file: str) -> str:
    by_model = {row["model"]: row for row in _rows(bench, "generate", experiment="speed").rows}
    smgk, mgk = by_model["smgk"], by_model["mgk"]
    caches = ", ".join(
        f"{name} {by_model[name]['cache_bytes'] / 1e6:.1f} MB" for name in ("softmax", "mgk", "smgk")
    )
    positions = _rows(bench, "generate", experiment="position", model="mlk").rows
    times, places = (sorted(row[name] for row in positions) for name in ("milliseconds", "position"))
    ranges = {"times": (times[0], times[-1]), "places": (places[0], places[-1])}
    return text("bench_generate", smgk=smgk, mgk=mgk, caches=caches, file=file, **ranges)


def _train(bench: Bench, file: str) -> str:
    """The ratio of a step by task, model and number of heads."""
    settings = bench["train"]["settings"]
    cells = [
        [
            f"{TITLES.get(shape, shape)}, {model}",
            *(_step(bench, shape, model, heads) for heads in settings["heads"]),
        ]
        for shape in settings["shapes"]
        for model in ("mgk", "smgk", "mlk")
    ]
    table = markdown_table(["", *(f"h={heads}" for heads in settings["heads"])], cells)
    added = [100 * (row["ratio"] - 1) for row in _rows(bench, "train", experiment="loop").rows]
    loop = text("bench_loop", least=min(added), most=max(added)) if added else ""
    return _with_source(file, table, loop)


def _step(bench: Bench, shape: str, model: str, heads: int) -> str:
    rows = _rows(bench, "train", experiment="step", attention="auto")
    return rows.text("ratio", shape=shape, model=model, heads=heads)


def _summary(bench: Bench, file: str) -> str:
    """The table, then one line for each other benchmark, for a first page."""
    machine = bench["kernels"]["machine"]
    caption = text("bench_summary", machine=machine, file=file)
    lines = []
    if (rows := _rows(bench, "kernels", experiment="unfused")).rows:
        forward, both = (rows.text("ratio", passes=passes, alternative=_UNFUSED) for passes in _PASSES)
        lines.append(text("bench_unfused_line", forward=forward, both=both))
    if _rows(bench, "kernels", experiment="decoding").rows:
        lines.append(_decoding_line(bench))
    for name, make in (("train", _train_line), ("generate", _generate_line), ("sdpa", _sdpa_line)):
        if name in bench:
            lines.append(f"{make(bench)} (`{file.rpartition('/')[0]}/{name}.json`).")
    items = "\n".join(f"- {line}" for line in lines)
    return f"{caption}\n\n{_ratio_table(_SHAPES, bench)}\n\n{items}"


def _train_line(bench: Bench) -> str:
    heads = max(bench["train"]["settings"]["heads"])
    mgk, smgk = (_step(bench, "listops", model, heads) for model in ("mgk", "smgk"))
    return f"A training step on ListOps, {heads} heads vs {2 * heads}: mgk {mgk}, smgk {smgk}"


def _generate_line(bench: Bench) -> str:
    by_model = {row["model"]: row for row in _rows(bench, "generate", experiment="speed").rows}
    softmax, *mixtures = (by_model[model] for model in ("softmax", "mgk", "smgk"))
    speeds = " and smgk ".join(f"{row['times_softmax']:.2f}" for row in mixtures)
    caches = " and ".join(f"{row['cache_bytes'] / softmax['cache_bytes']:.2f}" for row in mixtures)
    return text("bench_generate_line", speeds=speeds, caches=caches)


def _sdpa_line(bench: Bench) -> str:
    rows = _rows(bench, "sdpa")
    mgk, smgk = (rows.text("ratio", passes="forward", variant=model) for model in ("mgk", "smgk"))
    return text("bench_sdpa_line", mgk=mgk, smgk=smgk)


_PARTS: Mapping[str, tuple[str, Callable[[Bench, str], str]]] = {
    "bench": ("kernels", _summary),
    "bench-shapes": ("kernels", partial(_ratios, _SHAPES)),
    "bench-masks": ("kernels", partial(_ratios, _MASKS)),
    "bench-lengths": ("kernels", partial(_ratios, _LENGTHS)),
    "bench-memory": ("kernels", _memory),
    "bench-unfused": ("kernels", _unfused),
    "bench-decoding": ("kernels", _decoding),
    "bench-linear": ("kernels", _linear),
    "bench-roofline": ("roofline", _roofline),
    "bench-triton": ("triton", _triton),
    "bench-generate": ("generate", _generate),
    "bench-train": ("train", _train),
    "bench-more": ("kernels", _more),
    "bench-steps": ("steps", _steps),
    "bench-steps-since": ("steps_since_17c4eca", _steps_since),
}

"""What attention costs, as tables and sentences of documents, from the files of the benchmarks. Free of torch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgk.experiments.render.tables import DASH, markdown_table
from mgk.training.errors import TrainingError

BENCH = "bench"

Bench = Mapping[str, Any]
Row = Mapping[str, Any]

# What writes each file.
_COMMANDS = {
    "generate": "mgk bench generate",
    "kernels": "mgk bench kernels",
    "roofline": "mgk bench roofline",
    "sdpa": "mgk bench attention --variants mgk,smgk --backends sdpa",
    "train": "mgk bench train",
}
_SOFTMAX = "softmax, 8 heads, torch"
_MODELS = (_SOFTMAX, "mgk soft, 4 heads", "mgk hard, 4 heads", "smgk soft, 4 heads", "smgk hard, 4 heads")
_UNFUSED = "mgk unfused, 4 heads"
_PASSES = ("forward", "forward+backward")
_TASKS = {"listops": "ListOps", "text": "Text"}


def read_bench(folder: Path) -> Bench:
    """The files of the benchmarks that documents tell of, by name; those that are there."""
    found = {}
    for name in _COMMANDS:
        path = folder / f"{name}.json"
        if path.is_file():
            try:
                found[name] = json.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                raise TrainingError(f"{path}: this is not the file of a benchmark ({error})") from None
    return found


def bench_parts(bench: Bench, results: str) -> Mapping[str, Callable[[], str]]:
    """What makes each part of a document, by the part's name.

    Args:
        bench: as :func:`read_bench` gives it.
        results: the folder of all results, as the document calls it.
    """

    def part(make: Callable[[Bench, str], str], name: str) -> Callable[[], str]:
        file = f"{results}/{BENCH}/{name}.json"

        def text() -> str:
            if name not in bench:
                return f"Not measured yet: `{_COMMANDS[name]} --json {file}`."
            try:
                return make(bench, file)
            except KeyError as error:
                raise TrainingError(f"{results}/{BENCH}: a file of the benchmarks lacks {error}") from None

        return text

    return {
        "bench": part(_summary, "kernels"),
        "bench-shapes": part(_shapes, "kernels"),
        "bench-masks": part(_masks, "kernels"),
        "bench-lengths": part(_lengths, "kernels"),
        "bench-memory": part(_memory, "kernels"),
        "bench-unfused": part(_against_unfused, "kernels"),
        "bench-decoding": part(_at_decoding, "kernels"),
        "bench-linear": part(_linear, "kernels"),
        "bench-roofline": part(_roofline, "roofline"),
        "bench-generate": part(_generate, "generate"),
        "bench-train": part(_train, "train"),
    }


def _summary(bench: Bench, file: str) -> str:
    """For a first page: the table, then one line for everything else that was measured."""
    caption = (
        "Time against softmax by `scaled_dot_product_attention` with twice the heads = 1.00, the median over rounds in"
        f" which all take turns (float32, B = 2, N = 2,048, M = 2; {_machine(bench['kernels'])}; `{file}`):"
    )
    folder = file.rpartition("/")[0]
    lines = [*_unfused(bench), *_decoding(bench)]
    for name, make in (("train", _steps), ("generate", _generation), ("sdpa", _without_compiler)):
        if name in bench:
            lines.append(f"{make(bench[name])} (`{folder}/{name}.json`).")
    return "\n\n".join([caption, _shape_table(bench), "\n".join(f"- {line}" for line in lines)])


def _shapes(bench: Bench, file: str) -> str:
    return f"From `{file}`:\n\n{_shape_table(bench)}"


def _masks(bench: Bench, file: str) -> str:
    columns = {f"{e}, {p}": {"experiment": e, "passes": p} for e in ("causal", "padding") for p in _PASSES}
    return f"From `{file}`:\n\n{_ratios(bench['kernels']['rows'], columns)}"


def _lengths(bench: Bench, file: str) -> str:
    lengths = (512, 2048, 16384)
    columns = {f"{p}, N={n:,}": {"experiment": "length", "passes": p, "N": n} for p in _PASSES for n in lengths}
    return f"From `{file}`:\n\n{_ratios(bench['kernels']['rows'], columns)}"


def _memory(bench: Bench, file: str) -> str:
    """Megabytes beside the inputs, a row a length."""
    rows = [row for row in bench["kernels"]["rows"] if row["experiment"] == "length" and row["passes"] == _PASSES[1]]
    lengths = sorted({row["N"] for row in rows})
    trials = [
        [f"N={n:,}", *(_number(rows, "peak_extra_mb", 0, N=n, alternative=model) for model in _MODELS)] for n in lengths
    ]
    return f"From `{file}`:\n\n{markdown_table(['MB', *_MODELS], trials)}"


def _against_unfused(bench: Bench, file: str) -> str:
    """How much slower the unfused equation is than softmax attention, and how much faster the kernels are than that."""
    rows = [row for row in bench["kernels"]["rows"] if row["experiment"] == "unfused"]
    unfused, fused = (
        [_value(rows, "ratio", alternative=name, passes=passes) for passes in _PASSES]
        for name in (_UNFUSED, _MODELS[1])
    )
    faster = " and ".join(f"{slow / fast:.0f}" for slow, fast in zip(unfused, fused, strict=True))
    forward, both = unfused
    return (
        f"{forward:.2f} of the baseline forward and {both:.2f} forward and backward: the kernels are {faster} times"
        f" faster (`{file}`)."
    )


def _at_decoding(bench: Bench, file: str) -> str:
    (line,) = _decoding(bench)
    return f"{line.removesuffix('.')} (`{file}`)."


def _linear(bench: Bench, file: str) -> str:
    rows = [row for row in bench["kernels"]["rows"] if row["experiment"] == "linear"]
    mlk, smgk = (_value(rows, "ratio", alternative=f"{name}, 4 heads") for name in ("mlk", "smgk soft"))
    return (
        f"Causal mlk at N = {rows[0]['N']:,} (B = 1, D = 32), forward and backward: {mlk:.2f} of our own linear"
        " attention with the same heads (it makes M features a key; the rest is the same), and"
        f" {smgk / mlk:.0f} times faster than smgk there (`{file}`)."
    )


def _roofline(bench: Bench, file: str) -> str:
    """The forward of each variant by parts, beside what its products would take at the rates of torch."""
    rows, settings = bench["roofline"]["rows"], bench["roofline"]["settings"]
    sgemm, tile, exp = (
        _value(rows, field, operation=name)
        for name, field in (
            ("sgemm", "gflop_per_second"),
            ("tile product", "gflop_per_second"),
            ("exp", "giga_per_second"),
        )
    )
    header = ["forward, ms", "all", "products", "exponentials", "rest", "products at tile rate", "at sgemm rate"]
    fields = (
        "milliseconds",
        "products_milliseconds",
        "exponentials_milliseconds",
        "rest_milliseconds",
        "products_milliseconds_at_tile_rate",
        "products_milliseconds_at_sgemm_rate",
    )
    names = [row["variant"] for row in rows if row["experiment"] == "forward"]
    table = [[name, *(_number(rows, field, variant=name) for field in fields)] for name in names]
    return (
        f"From `{file}` (B = {settings['batch']}, {settings['heads']} heads, N = {settings['length']:,},"
        f" D = {settings['head_dim']}). PyTorch multiplies large matrices at {sgemm:.0f} GFLOP/s, tiles of the kernel's"
        f" shape at {tile:.0f} GFLOP/s, and makes {exp:.1f} billion exponentials a second on the same threads:"
        f"\n\n{markdown_table(header, table)}"
    )


def _generate(bench: Bench, file: str) -> str:
    by_model = {row["model"]: row for row in _of(bench["generate"], "speed")}
    smgk, mgk = by_model["smgk"], by_model["mgk"]
    caches = ", ".join(f"{name} {by_model[name]['cache_bytes'] / 1e6:.1f} MB" for name in ("softmax", "mgk", "smgk"))
    times = [row["milliseconds"] for row in _of(bench["generate"], "position")]
    places = [row["position"] for row in _of(bench["generate"], "position")]
    return (
        f"smgk with 4 heads makes {smgk['times_softmax']:.2f} times the tokens a second of softmax with 8 and"
        f" {smgk['times_gpt2']:.2f} times those of Hugging Face's GPT-2 of the same shape, mgk"
        f" {mgk['times_softmax']:.2f} and {mgk['times_gpt2']:.2f} times (`{file}`). The cache after the last token:"
        f" {caches}. A token of mlk takes {min(times):.1f} to {max(times):.1f} ms from position"
        f" {min(places):,} to {max(places):,}."
    )


def _train(bench: Bench, file: str) -> str:
    """The ratio of a step, a row a task and model, a column a number of heads."""
    steps, settings = _of(bench["train"], "step"), bench["train"]["settings"]
    trials = [
        [f"{_TASKS.get(shape, shape)}, {model}", *(_step(steps, shape, model, heads) for heads in settings["heads"])]
        for shape in settings["shapes"]
        for model in ("mgk", "smgk", "mlk")
    ]
    table = markdown_table(["", *(f"h={heads}" for heads in settings["heads"])], trials)
    added = [100 * (row["ratio"] - 1) for row in _of(bench["train"], "trainer")]
    trainer = f"Hugging Face's `Trainer` adds {min(added):.0f} to {max(added):.0f}% to a bare loop of the same step."
    return f"From `{file}`:\n\n{table}\n\n{trainer}"


def _shape_table(bench: Bench) -> str:
    columns = {f"{p}, D={d}": {"experiment": "table", "passes": p, "D": d} for d in (32, 64) for p in _PASSES}
    return _ratios(bench["kernels"]["rows"], columns)


def _unfused(bench: Bench) -> list[str]:
    rows = [row for row in bench["kernels"]["rows"] if row["experiment"] == "unfused"]
    if not rows:
        return []
    forward, both = (_number(rows, "ratio", passes=passes, alternative=_UNFUSED) for passes in _PASSES)
    return [f"Eq. 9 unfused, with M matrices of N x N: {forward} forward, {both} forward and backward, D=32."]


def _decoding(bench: Bench) -> list[str]:
    rows = [row for row in bench["kernels"]["rows"] if row["experiment"] == "decoding"]
    if not rows:
        return []
    mgk, smgk = (_number(rows, "ratio", alternative=f"{model} soft, 4 heads") for model in ("mgk", "smgk"))
    return [f"One token against {rows[0]['N']:,} cached ones: mgk {mgk}, smgk {smgk}."]


def _steps(train: Row) -> str:
    heads = max(train["settings"]["heads"])
    mgk, smgk = (_step(_of(train, "step"), "listops", model, heads) for model in ("mgk", "smgk"))
    return f"A training step on ListOps, {heads} heads against {2 * heads}: mgk {mgk}, smgk {smgk}"


def _generation(generate: Row) -> str:
    by_model = {row["model"]: row for row in _of(generate, "speed")}
    softmax, mgk, smgk = (by_model[model] for model in ("softmax", "mgk", "smgk"))
    speeds = " and smgk ".join(f"{row['times_softmax']:.2f}" for row in (mgk, smgk))
    caches = " and ".join(f"{row['cache_bytes'] / softmax['cache_bytes']:.2f}" for row in (mgk, smgk))
    return f"Generating text: mgk {speeds} times the tokens a second of softmax, with {caches} of its cache"


def _without_compiler(sdpa: Row) -> str:
    mgk, smgk = (_number(sdpa["rows"], "ratio", passes="forward", variant=model) for model in ("mgk", "smgk"))
    return f"Without a C++ compiler, through PyTorch's own kernels, forward, D=32: mgk {mgk}, smgk {smgk}"


def _machine(report: Row) -> str:
    machine = report["machine"]
    return (
        f"{machine['processor']} with {machine['instructions']}, {machine['threads']} threads,"
        f" torch {machine['torch']}, {machine['date'][:10]}"
    )


def _of(report: Row, experiment: str) -> list[Row]:
    """The rows of one experiment."""
    return [row for row in report["rows"] if row["experiment"] == experiment]


def _ratios(rows: Sequence[Row], columns: Mapping[str, Row]) -> str:
    trials = [
        [model, *(_number(rows, "ratio", alternative=model, **wanted) for wanted in columns.values())]
        for model in _MODELS
    ]
    return markdown_table(["", *columns], trials)


def _step(steps: Sequence[Row], shape: str, model: str, heads: int) -> str:
    return _number(steps, "ratio", shape=shape, model=model, heads=heads, attention="auto")


def _number(rows: Sequence[Row], name: str, digits: int = 2, **wanted: Any) -> str:
    """The value of the first row that has what is wanted, or a dash."""
    found = next(_having(rows, wanted), None)
    return DASH if found is None else f"{found[name]:,.{digits}f}"


def _value(rows: Sequence[Row], name: str, **wanted: Any) -> float:
    """The value of the first row that has what is wanted; ``KeyError`` where none does."""
    found = next(_having(rows, wanted), None)
    if found is None:
        raise KeyError(f"a row of {wanted}")
    return float(found[name])


def _having(rows: Sequence[Row], wanted: Mapping[str, Any]) -> Iterator[Row]:
    return (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))

from collections.abc import Callable

import pytest

from mgk.bench import timing


def test_every_round_runs_each_alternative_once_in_rotating_order() -> None:
    calls: list[str] = []

    def recorder(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    steps: list[None] = []
    alternatives = {name: recorder(name) for name in "abc"}
    timing.compare(alternatives, "a", rounds=3, on_run=lambda: steps.append(None))
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert len(steps) == 12


def test_ratio_is_the_median_of_the_ratios_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    # The machine is ten times slower in the last round; a ratio of medians would not notice that b keeps its pace.
    durations = {"a": iter([9.0, 1.0, 2.0, 10.0]), "b": iter([9.0, 3.0, 4.0, 30.0])}
    now = 0.0

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            nonlocal now
            now += next(durations[name])

        return run

    monkeypatch.setattr("time.perf_counter", lambda: now)
    result = timing.compare({"a": work("a"), "b": work("b")}, "a", rounds=3)
    assert result["a"] == timing.Timing(milliseconds=2000.0, ratio=1.0, ratio_min=1.0, ratio_max=1.0)
    assert result["b"] == timing.Timing(milliseconds=4000.0, ratio=3.0, ratio_min=2.0, ratio_max=3.0)


def test_steps_count_up_to_their_total() -> None:
    seen: list[tuple[int, int]] = []
    steps = timing.Steps(lambda done, total: seen.append((done, total)), 2)
    steps()
    steps()
    assert seen == [(1, 2), (2, 2)]

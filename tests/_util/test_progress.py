import pytest

from mgk._util.progress import Progress


def test_plain_lines_away_from_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress("job") as on_step:
        for done, now in ((1, 4.0), (2, 12.0), (3, 13.0), (4, 16.0)):  # noqa: B007  the clock reads `now`
            on_step(done, 4)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["job: 2 of 4, 12 s left", "job: 4 of 4"]

from pathlib import Path

import pytest
import torch

from mgk._util import machine

CPU = torch.device("cpu")
MEGABYTE = 2**20


def test_peak_of_a_tensor_that_is_freed_again() -> None:
    def run() -> None:
        torch.ones(64 * MEGABYTE // 4)

    run()
    peak = machine.peak_extra_bytes(run, CPU)
    if peak is None:
        pytest.skip("peak memory cannot be measured on this system")
    assert 60 * MEGABYTE < peak < 72 * MEGABYTE


def test_an_earlier_peak_does_not_count() -> None:
    torch.ones(64 * MEGABYTE // 4)
    peak = machine.peak_extra_bytes(lambda: None, CPU)
    assert peak is None or peak < 8 * MEGABYTE


def test_none_where_the_peak_cannot_be_reset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_PROC", tmp_path / "missing")
    assert machine.peak_extra_bytes(lambda: None, CPU) is None


def test_an_error_of_the_run_is_not_hidden() -> None:
    def fail() -> None:
        raise OSError("from the run")

    if machine.peak_extra_bytes(lambda: None, CPU) is None:
        pytest.skip("peak memory cannot be measured on this system")
    with pytest.raises(OSError, match="from the run"):
        machine.peak_extra_bytes(fail, CPU)


def test_peak_of_the_process_includes_its_libraries() -> None:
    assert machine.peak_process_bytes() > 32 * MEGABYTE

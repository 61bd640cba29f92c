"""Numbers for people. That the script of a load's page writes the same ones is in ``test_report_page.py``."""

from __future__ import annotations

import pytest

from ggufstream.units import human_bytes, human_rate, human_seconds, human_share


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (98_362_432, "93.8 MiB"),
        (1 << 30, "1.0 GiB"),
        (700 << 20, "700 MiB"),
        (5 << 40, "5.0 TiB"),
        (5000 << 40, "5000.0 TiB"),
    ],
)
def test_bytes(n: int, shown: str) -> None:
    assert human_bytes(n) == shown


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [(0, 100, "0 of 100 B"), (46 << 20, 92 << 20, "46.0 of 92.0 MiB"), (1010, 2048, "1010 B of 2.0 KiB")],
)
def test_shares(done: int, total: int, shown: str) -> None:
    assert human_share(done, total) == shown


@pytest.mark.parametrize(("rate", "shown"), [(0, "0.00 MB/s"), (9_990_000, "9.99 MB/s"), (1.32e9, "1.32 GB/s")])
def test_rates(rate: float, shown: str) -> None:
    assert human_rate(rate) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 µs"),
        (12e-6, "12 µs"),
        (0.9994e-3, "999 µs"),
        (0.9996e-3, "1 ms"),
        (0.0731, "73.1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (75.5, "75.50 s"),
    ],
)
def test_times(seconds: float, shown: str) -> None:
    assert human_seconds(seconds) == shown

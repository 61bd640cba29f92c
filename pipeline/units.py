"""Numbers for people: bytes, rates and times with their units. The script of ``report_page.html`` writes them alike."""

from __future__ import annotations

__all__ = ["human_bytes", "human_rate", "human_seconds", "human_share"]


def human_bytes(n: float) -> str:
    """Bytes in binary units, three or four digits: ``93.8 MiB``."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1000 or (unit == "B" and abs(size) < 1024):
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def human_share(done: float, total: float) -> str:
    """Bytes of bytes, ``46.1 of 92.1 MiB``: the unit once where it is the same."""
    (left, left_unit), right = human_bytes(done).split(" "), human_bytes(total)
    return f"{left} of {right}" if right.endswith(f" {left_unit}") else f"{left} {left_unit} of {right}"


def human_rate(bytes_per_second: float) -> str:
    """A rate as storage and buses are sold: ``1.32 GB/s``, powers of 1,000."""
    return f"{bytes_per_second / 1e9:.2f} GB/s" if bytes_per_second >= 1e7 else f"{bytes_per_second / 1e6:.2f} MB/s"


def human_seconds(seconds: float) -> str:
    """A time in three digits: ``12 µs``, ``73.1 ms``; from a second on with two decimals: ``1.32 s``."""
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.2f} s"

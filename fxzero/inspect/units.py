"""Figures as a person reads them."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """``12.3 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def duration(us: float) -> str:
    """``1.24 ms``, and below a tenth of one ``56.0 us``."""
    return f"{us / 1e3:,.2f} ms" if abs(us) >= 100 else f"{us:,.1f} us"


def several(names: tuple[str, ...] | list[str], most: int = 4) -> str:
    """Some names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def sentence(text: str) -> str:
    """A clause as the beginning of a sentence."""
    return text[:1].upper() + text[1:]

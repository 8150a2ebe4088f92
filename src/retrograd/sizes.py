"""Numbers of bytes, read and written."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(size: int | str) -> int:
    """A number of bytes from "8GiB", "500MB" or a number.

    >>> parse_bytes("1.5KiB")
    1536
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"not a size in bytes: {size!r}; write for example 8GiB, 500MB or 1048576")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(size: int) -> str:
    """A number of bytes for people.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    value, units = float(size), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while abs(value) >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"

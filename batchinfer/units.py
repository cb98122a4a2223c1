"""Sizes and durations as people write them: parsed for options, formatted for logs and tables."""

import math
import re

_SIZE_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
_SIZE_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
_DURATION_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_DURATION_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|[smhd])")


def parse_size(text: str) -> int:
    """Bytes of "24MiB", "1.5GiB", "2GB" (powers of 1000) or "1048576". Raises ValueError naming what is allowed."""
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()]) if match[2] or "." in match[1] else int(match[1])


def parse_duration(text: str) -> float:
    """Seconds of "45s", "90m", "2h", "1h30m" or "45". Raises ValueError naming what is allowed."""
    try:
        seconds = float(text)
    except ValueError:
        parts = _DURATION_PART.findall(text)
        if not parts or _DURATION_PART.sub("", text).strip():
            raise ValueError(f"{text!r} is not a duration: write seconds, or as in 45s, 90m, 2h, 1h30m, 1d") from None
        seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a duration: it must be finite")
    return seconds


def format_bytes(count: float) -> str:
    """ "1.5 GiB": three significant digits, powers of 1024."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{_three_digits(count)} {unit}"
        count /= 1024
    return f"{_three_digits(count)} TiB"


def format_exact_bytes(count: int) -> str:
    """ "24MiB" where the number is whole in that unit, else bytes; parse_size reads it back."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count and count % 1024**power == 0:
            return f"{count // 1024**power}{unit}"
    return str(count)


def format_duration(seconds: float) -> str:
    """ "820 ms", "4.2 s", "3m 05s" or "2h 07m"."""
    if seconds < 0.9995:  # above it three digits would round to 1e+03
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h {minutes:02d}m"


def format_share(share: float) -> str:
    """In whole per cent; what is less than one, but not nothing, is said to be."""
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def format_ms(milliseconds: float | None) -> str:
    """A latency; "-" where there is none."""
    return "-" if milliseconds is None else format_duration(milliseconds / 1000)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"

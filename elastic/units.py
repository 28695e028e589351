"""Durations, bytes, rates and shares as people write them: parsed at the edge, printed with at most three digits."""

from __future__ import annotations

import math
import re

_NUMBER = r"(?P<number>[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
_SECONDS = {
    "ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "m": 60.0, "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hr": 3600.0, "hrs": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0, "w": 604800.0, "week": 604800.0, "weeks": 604800.0,
}  # fmt: skip
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class BadUnit(ValueError):
    """Text that is not the quantity asked for; the sentence shows how to write it."""


def parse_duration(text: str) -> float:
    """Seconds of ``6h``, ``40s``, ``1h30m``, ``90 min``, ``3.1h``, ``12ms``. A bare number is refused: 6 of what?"""
    parts = list(re.finditer(_NUMBER + r"\s*(?P<unit>[a-zA-Z]+)\s*", text))
    if not parts or "".join(m.group(0) for m in parts).strip() != text.strip():
        hint = " (seconds? write it with its unit)" if re.fullmatch(_NUMBER, text.strip()) else ""
        raise BadUnit(f"{text!r} is not a duration{hint}: write it like 40s, 90min, 3.1h, 1h30m or 30d")
    total = 0.0
    for part in parts:
        unit = part["unit"].lower()
        if unit not in _SECONDS:
            raise BadUnit(f"{part['unit']!r} in {text!r} is not a unit of time: use ms, s, min, h, d or w")
        total += float(part["number"].replace("_", "")) * _SECONDS[unit]
    return _finite(total, text)


def parse_bytes(text: str) -> float:
    """Bytes of ``2TB`` (10¹²), ``512MiB`` (2²⁰), ``1e9B``. A bare number is refused."""
    match = re.fullmatch(_NUMBER + r"\s*(?P<unit>[a-zA-Z]+)", text.strip())
    unit = match["unit"].lower().removesuffix("b") if match and match["unit"].lower().endswith("b") else None
    scale = None if unit is None else {**_PREFIX, **_BINARY}.get(unit)
    if match is None or scale is None:
        raise BadUnit(f"{text!r} is not a number of bytes: write it like 2TB, 350GB or 512MiB")
    return _finite(float(match["number"].replace("_", "")) * scale, text)


def parse_bandwidth(text: str) -> float:
    """Bytes per second of ``100GB/s`` or ``20Gbit/s``."""
    stem = text.strip().removesuffix("/s").removesuffix("ps")
    if stem != text.strip():
        if match := re.fullmatch(r"(?i)(?P<head>.*?[kmgtp]?i?)bit", stem):
            return parse_bytes(match["head"] + "B") / 8
        return parse_bytes(stem)
    raise BadUnit(f"{text!r} is not a bandwidth: write it like 100GB/s or 20Gbit/s")


def parse_rate(text: str) -> float:
    """Failures per 1,000 node-days of ``3.79/1000nd``, ``0.0065/nd``; ``1/year`` is one per node and year."""
    match = re.fullmatch(_NUMBER + r"\s*/\s*(?P<per>\d*)\s*(?P<unit>[a-zA-Z-]+)", text.strip())
    units = {
        "nd": 1.0,
        "node-day": 1.0,
        "node-days": 1.0,
        "nodeday": 1.0,
        "nodedays": 1.0,
        "year": 365.25,
        "node-year": 365.25,
        "month": 30.4375,
    }
    if match is None or match["unit"].lower() not in units or match["per"] == "0":
        raise BadUnit(
            f"{text!r} is not a failure rate: write it per node, like 3.79/1000nd (per 1,000 node-days) or 1/year"
        )
    per = float(match["per"] or 1) * units[match["unit"].lower()]
    return _finite(1000.0 * float(match["number"].replace("_", "")) / per, text)


def parse_share(text: str) -> float:
    """A share of ``0.8`` or ``80%``."""
    match = re.fullmatch(_NUMBER + r"\s*(?P<percent>%?)", text.strip())
    if match is None:
        raise BadUnit(f"{text!r} is not a share: write it like 0.8 or 80%")
    return _finite(float(match["number"]) / (100 if match["percent"] else 1), text)


def parse_count(text: str) -> float:
    """A count of ``405B``, ``15T``, ``1.5e9`` or ``16384``."""
    match = re.fullmatch(_NUMBER + r"\s*(?P<unit>[kKmMbBtT]?)", text.strip())
    if match is None:
        raise BadUnit(f"{text!r} is not a count: write it like 405B, 15T or 16384")
    return _finite(float(match["number"].replace("_", "")) * _COUNT[match["unit"].lower()], text)


def _finite(value: float, text: str) -> float:
    if not math.isfinite(value):
        raise BadUnit(f"{text!r} is too large a number")
    return value


def show_number(value: float, digits: int = 3) -> str:
    """At most ``digits`` significant digits, with thousands separated and no exponent in everyday sizes."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    if abs(rounded) >= 1e15 or abs(rounded) < 1e-4:
        return f"{value:.{digits - 1}e}"
    text = f"{rounded:,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def show_duration(seconds: float) -> str:
    """Three digits in the unit a person would use: ``48 ms``, ``40 s``, ``5.5 min``, ``3.09 h``, ``54 days``."""
    size = abs(seconds)
    for limit, scale, unit in (
        (0.9995, 1e-3, "ms"),
        (119.5, 1.0, "s"),
        (7200, 60.0, "min"),
        (172_800, 3600.0, "h"),
        (63_072_000, 86_400.0, "days"),
    ):
        if size < limit:
            return f"{show_number(seconds / scale)} {unit}"
    return f"{show_number(seconds / 31_557_600)} years"


def show_bytes(count: float) -> str:
    """Three digits and a decimal unit: storage is sold in them."""
    for scale, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= scale * 0.9995:
            return f"{show_number(count / scale)} {unit}"
    return f"{count:.0f} B"

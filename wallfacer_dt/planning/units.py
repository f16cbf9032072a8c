"""Quantities as people write them: rates, sizes, times and speeds with their units, read and printed.

Everything is a float in bytes per second, bytes, seconds or operations per second. ``b`` is a bit and ``B`` a byte,
``k``, ``M``, ``G``, ``T``, ``P`` are powers of 1000 and ``Ki``, ``Mi``, ``Gi``, ``Ti`` of 1024; but of tokens, as
people write them, ``k`` is 1024 and ``M`` 1024^2.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction

from wallfacer_dt.reading import LEAST, MOST

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_PREFIXES = _DECIMAL | {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {"B": 1.0, "byte": 1.0, "bytes": 1.0}
_BITS = {"b": 0.125, "bit": 0.125, "bits": 0.125}
_RATES = {unit + per: factor for unit, factor in (_BYTES | _BITS).items() for per in ("/s", "ps")}
_FLOPS = dict.fromkeys(("FLOPS", "FLOP/s", "FLOPs/s", "flops", "flop/s", "Flops", "Flop/s"), 1.0)
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "μs": 1e6, "ns": 1e9}

_TOKENS = {"": 1, "k": 2**10, "K": 2**10, "M": 2**20}
MOST_TOKENS = 2**31

_QUANTITY = re.compile(r"\s*((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s.]\S*)\s*")


def parse_rate(text: str) -> float:
    """Bytes per second.

    >>> parse_rate("12.5GB/s"), parse_rate("200Mbit/s"), parse_rate("100Gbps")
    (12500000000.0, 25000000.0, 12500000000.0)

    Args:
        text: a number above 0 and a unit, of bytes or bits per second.

    Returns:
        The rate.

    Raises:
        ValueError: anything else.
    """
    return _parsed(text, _prefixed(_RATES, _PREFIXES), "a rate like 12.5GB/s or 200Mbit/s")


def parse_size(text: str) -> float:
    """Bytes.

    >>> parse_size("80GB"), parse_size("80 GiB")
    (80000000000.0, 85899345920.0)

    Args:
        text: a number above 0 and a unit, of bytes.

    Returns:
        The size.

    Raises:
        ValueError: anything else.
    """
    return _parsed(text, _prefixed(_BYTES, _PREFIXES), "a size like 80GB or 80GiB")


def parse_time(text: str) -> float:
    """Seconds.

    >>> parse_time("5us"), parse_time("0s")
    (5e-06, 0.0)

    Args:
        text: a number, which may be 0, and a unit: s, ms, us or ns.

    Returns:
        The time.

    Raises:
        ValueError: anything else.
    """
    # Divided by 1e6 five is 5e-6; multiplied by 1e-6, which is no binary fraction, it is not.
    return _parsed(text, _IN_A_SECOND, "a time like 5us or 1.5ms", divide=True, zero=True)


def parse_speed(text: str) -> float:
    """Floating point operations per second.

    >>> parse_speed("200 TFLOPS"), parse_speed("1.5PFLOP/s")
    (200000000000000.0, 1500000000000000.0)

    Args:
        text: a number above 0 and a unit, of FLOPS.

    Returns:
        The speed.

    Raises:
        ValueError: anything else.
    """
    return _parsed(text, _prefixed(_FLOPS, _DECIMAL), "a speed like 200TFLOPS")


def parse_tokens(text: str) -> int:
    """Tokens of a sequence.

    >>> parse_tokens("131072"), parse_tokens("128k"), parse_tokens("1.5M")
    (131072, 131072, 1572864)

    Args:
        text: a number, and perhaps ``k`` for 1024 or ``M`` for 1024^2.

    Returns:
        How many: a whole number from 1 to 2^31.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]{1,12})?)([kKM]?)\s*", text)
    tokens = Fraction(match[1]) * _TOKENS[match[2]] if match else Fraction(0)
    if tokens.denominator != 1 or not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(
            f"must be a number of tokens like 131072, 128k or 1M (k = 1024, M = 1024^2), from 1 to 2^31, got {text!r}"
        )
    return int(tokens)


def format_rate(rate: float) -> str:
    """Bytes per second in a few characters.

    >>> format_rate(12.5e9)
    '12.5 GB/s'
    """
    return _formatted(rate, "B/s")


def format_size(size: float) -> str:
    """Bytes in a few characters.

    >>> format_size(80e9), format_size(1536), format_size(7)
    ('80 GB', '1.54 kB', '7 B')
    """
    return _formatted(size, "B")


def format_speed(speed: float) -> str:
    """Operations per second in a few characters.

    >>> format_speed(2e14)
    '200 TFLOPS'
    """
    return _formatted(speed, "FLOPS")


def format_time(seconds: float) -> str:
    """Seconds in a few characters.

    >>> format_time(5e-6), format_time(0.0125), format_time(90)
    ('5 us', '12.5 ms', '90 s')
    """
    for unit in ("s", "ms", "us"):
        value = seconds * _IN_A_SECOND[unit]
        if _rounded(value) >= 1:
            return f"{_short(value)} {unit}"
    return f"{_short(seconds * _IN_A_SECOND['ns'])} ns" if seconds else "0 s"


def _parsed(text: str, units: Mapping[str, float], expected: str, *, divide: bool = False, zero: bool = False) -> float:
    match = _QUANTITY.fullmatch(text)
    number, unit = (float(match[1]), units.get(match[2], math.nan)) if match else (math.nan, 1.0)
    value = number / unit if divide else number * unit
    if not (LEAST <= value <= MOST or (zero and value == 0)):
        raise ValueError(f"must be {expected}, got {text!r}")
    return value


def _prefixed(units: Mapping[str, float], prefixes: Mapping[str, float]) -> dict[str, float]:
    return {prefix + unit: by * factor for prefix, by in prefixes.items() for unit, factor in units.items()}


def _formatted(value: float, unit: str) -> str:
    prefix = "".join([prefix for prefix in "kMGTP" if _rounded(value / _DECIMAL[prefix]) >= 1][-1:])
    return f"{_short(value / _DECIMAL[prefix])} {prefix}{unit}"


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _short(value: float) -> str:
    """Three significant digits, and all before the point."""
    return f"{value:.0f}" if value >= 1000 else f"{_rounded(value):g}"

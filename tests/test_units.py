"""Quantities with units: what is read, what is refused, and that what is printed can be read again."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wallfacer_dt.command.options import OptionError, naming
from wallfacer_dt.planning.units import (
    format_rate,
    format_size,
    format_speed,
    format_time,
    parse_rate,
    parse_size,
    parse_speed,
    parse_time,
)

PAIRS = [(parse_rate, format_rate), (parse_size, format_size), (parse_time, format_time), (parse_speed, format_speed)]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "300GB/s", 300e9),
        (parse_rate, "12.5GB/s", 12.5e9),
        (parse_rate, "200Mbit/s", 25e6),
        (parse_rate, "100Gbps", 12.5e9),
        (parse_rate, "100GBps", 100e9),
        (parse_rate, "100Gb/s", 12.5e9),
        (parse_rate, " 1.5 GiB/s ", 1.5 * 2**30),
        (parse_rate, "1e3 kB/s", 1e6),
        (parse_rate, ".5MB/s", 5e5),
        (parse_size, "80GB", 80e9),
        (parse_size, "80GiB", 80 * 2**30),
        (parse_size, "141 GB", 141e9),
        (parse_size, "512B", 512),
        (parse_time, "5us", 5e-6),
        (parse_time, "5µs", 5e-6),
        (parse_time, "1.5 ms", 1.5e-3),
        (parse_time, "0s", 0.0),
        (parse_speed, "200 TFLOPS", 200e12),
        (parse_speed, "200TFLOP/s", 200e12),
        (parse_speed, "1.5PFLOPS", 1.5e15),
    ],
)
def test_what_is_read(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts", "expected"),
    [
        (parse_rate, ["12", "GB/s", "12GB", "12 XB/s", "-1GB/s", "0GB/s", "1e999GB/s", "nanGB/s", "", "1 2GB/s"],
         "must be a rate like 12.5GB/s or 200Mbit/s, got "),
        (parse_size, ["80", "80Gb", "80GB/s", "0B", "inf GB"], "must be a size like 80GB or 80GiB, got "),
        (parse_time, ["5", "-5us", "5 hours", "5u s"], "must be a time like 5us or 1.5ms, got "),
        (parse_speed, ["200", "200T", "200 TFLOPS/s", "0FLOPS"], "must be a speed like 200TFLOPS, got "),
    ],
)  # fmt: skip
def test_what_is_refused(parse: Callable[[str], float], texts: list[str], expected: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=r"^must be ") as refusal:
            parse(text)
        assert str(refusal.value) == f"{expected}{text!r}"


@pytest.mark.parametrize(
    ("print_", "value", "text"),
    [
        (format_rate, 12.5e9, "12.5 GB/s"),
        (format_rate, 999.9e6, "1 GB/s"),
        (format_size, 0, "0 B"),
        (format_size, 999, "999 B"),
        (format_size, 1_000_000, "1 MB"),
        (format_size, 1234e15, "1234 PB"),
        (format_time, 0.0, "0 s"),
        (format_time, 9.996e-4, "1 ms"),
        (format_time, 2e-9, "2 ns"),
        (format_speed, 989e12, "989 TFLOPS"),
    ],
)
def test_what_is_printed(print_: Callable[[float], str], value: float, text: str) -> None:
    assert print_(value) == text


@pytest.mark.parametrize(("parse", "print_"), PAIRS)
@given(exponent=st.integers(-8, 17), digits=st.integers(100, 999))
def test_three_digits_come_back(
    parse: Callable[[str], float], print_: Callable[[float], str], exponent: int, digits: int
) -> None:
    value = digits * 10.0 ** (exponent - 2)
    if print_ is not format_time and value < 1:
        return
    assert math.isclose(parse(print_(value)), value, rel_tol=5.1e-3)


def test_an_option_is_named() -> None:
    with pytest.raises(OptionError) as refusal, naming("--inter"):
        parse_rate("12")
    assert str(refusal.value) == "--inter must be a rate like 12.5GB/s or 200Mbit/s, got '12'"
    with pytest.raises(OptionError) as refusal, naming("--order"):
        raise ValueError("order is odd")
    assert str(refusal.value) == "--order: order is odd"

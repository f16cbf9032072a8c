"""Sizes and times in a line that says why."""


def said_bytes(nbytes: int) -> str:
    """To three digits, in units of 1000.

    >>> said_bytes(80_000_000_000), said_bytes(999)
    ('80 GB', '999 B')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"


def said_seconds(seconds: float) -> str:
    """To three digits.

    >>> said_seconds(1.5), said_seconds(0.0301)
    ('1.5 s', '30.1 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

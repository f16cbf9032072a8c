"""Files that somebody broke: valid ones with bytes flipped, cut, moved, or with a value replaced wherever one is."""

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), 2**31, 2**63, -(2**63),
    10**30, 10**4000, "", "1", "NaN", "load", "__class__", "\x00\x1b[2J", "\ud800", "x" * 5000, [], {}, [[]],
    [None, None], {"a": 1}, [1, 2, 3], ["a"], [True], {"__reduce__": "os.system"},
)  # fmt: skip
"""What a value is replaced by, beside what makes no JSON."""
TOKENS = (
    "1e999",
    "-Infinity",
    "[" * 5000,
    "9" * 5000,
    '{"a": 1, "a": 2}',
    "0x10",
    "'x'",
    "// x",
    "[" * 100 + "]" * 100,
)
_MARK = '"the-value-that-is-replaced"'


def broken(valid: dict[str, Any], random: Random) -> bytes:
    """One broken file."""
    by = random.choice((_bytes, _bytes, _value, _value, _value, _keys, _token))
    return by(valid, random)


def flipped(text: bytes, random: Random) -> bytes:
    """Some bytes others, cut out, put in, or twice."""
    made = bytearray(text)
    start = random.randrange(len(made) + 1)
    stop = min(len(made), start + random.choice((1, 2, 8, 64, len(made))))
    how = random.randrange(5)
    if how == 0:
        for _ in range(random.randint(1, 8)):
            made[random.randrange(len(made))] ^= 1 << random.randrange(8)
    elif how == 1:
        del made[start:]
    elif how == 2:
        del made[start:stop]
    elif how == 3:
        made[start:start] = random.randbytes(random.randint(1, 32))
    else:
        made[start:start] = made[start:stop]
    return bytes(made)


def _bytes(valid: dict[str, Any], random: Random) -> bytes:
    return flipped(_text(valid), random)


def _value(valid: dict[str, Any], random: Random) -> bytes:
    made = deepcopy(valid)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        holder, key = random.choice(list(places(made)))
        holder[key] = deepcopy(random.choice(VALUES))
    return _text(made)


def _keys(valid: dict[str, Any], random: Random) -> bytes:
    """One dropped, added, renamed or twice."""
    made = deepcopy(valid)
    holder, key = random.choice([one for one in places(made) if isinstance(one[0], dict)])
    how, value = random.randrange(4), holder[key]
    if how:
        del holder[key]
    if how < 2:
        holder[f"{key}_"] = value
    if how == 3:
        holder[key], holder["twice"] = value, value
        return _text(made).replace(b'"twice"', json.dumps(key).encode())
    return _text(made)


def _token(valid: dict[str, Any], random: Random) -> bytes:
    made = deepcopy(valid)
    holder, key = random.choice(list(places(made)))
    holder[key] = json.loads(_MARK)
    return _text(made).replace(_MARK.encode(), random.choice(TOKENS).encode())


def places(made: Any) -> Iterator[tuple[Any, Any]]:
    """Every object and list within, with every key of it."""
    for key in list(made) if isinstance(made, dict) else range(len(made)):
        yield made, key
        if isinstance(made[key], dict | list):
            yield from places(made[key])


def _text(made: object) -> bytes:
    return json.dumps(made, indent=1).encode()

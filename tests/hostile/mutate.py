"""Mutations of JSON records and of bytes from a seed, as a hostile or careless writer would leave them."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    101,
    1 << 13,
    1 << 20,
    1 << 31,
    1 << 62,
    10**30,
    10**400,
    0.0,
    -1.0,
    0.5,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "0",
    "a",
    "[/red]",
    "../../etc/passwd",
    "\x00",
    "\ud800",
    "x" * 5000,
    "{prompt}" * 20,
    [],
    [None],
    [0] * 3,
    [1 << 40, -1],
    ["a", 1],
    [[[[[]]]]],
    {},
    {"a": 1},
    {"type": "VISUAL", "shape": [3, 1 << 31, 4]},
)


def places(record: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a nested record. Of a long array, only the first entries count."""
    found = [path] if path else []
    items = (
        record.items()
        if isinstance(record, dict)
        else enumerate(record[:6])
        if isinstance(record, list)
        else ()
    )
    for key, value in list(items)[:400]:
        found += places(value, (*path, key))
    return found


def mutate_record(record: Any, rng: random.Random, times: int) -> Any:
    """Return a copy in which ``times`` values are replaced, removed, doubled or extended by unknown values."""
    out = copy.deepcopy(record)
    for _ in range(times):
        known = places(out)
        if not known:
            break
        *parents, last = rng.choice(known)
        holder = out
        for key in parents:
            holder = holder[key]
        choice = rng.random()
        if choice < 0.12:
            del holder[last]
        elif choice < 0.2 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        elif choice < 0.28 and isinstance(holder, dict):
            holder[rng.choice(("surprise", "", "dtype", "use_cache2"))] = copy.deepcopy(rng.choice(NASTY))
        elif choice < 0.4 and isinstance(holder[last], int | float) and not isinstance(holder[last], bool):
            factor = rng.choice((-1, 0, 2, 3, 1000, 0.5, 1 << 20))
            holder[last] = holder[last] * (int(factor) if abs(holder[last]) > 1e300 else factor)
        else:
            holder[last] = copy.deepcopy(rng.choice(NASTY))
    return out


def mutate_bytes(data: bytes, rng: random.Random, within: int) -> bytes:
    """Return bytes with some of the first ``within`` bytes flipped, set, removed or doubled, or with the end
    removed."""
    raw = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8)) if raw else 0):
        place = rng.randrange(max(min(within, len(raw)), 1))
        choice = rng.random()
        if choice < 0.35:
            raw[place] ^= 1 << rng.randrange(8)
        elif choice < 0.7:
            raw[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif choice < 0.8:
            del raw[place : place + rng.choice((1, 4, 8, 64))]
        elif choice < 0.9:
            raw[place:place] = raw[place : place + rng.choice((1, 4, 8))]
        else:
            del raw[max(place, 1) :]
            break
        if not raw:
            break
    return bytes(raw)


def spliced(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return the beginning of one text followed by the end of another."""
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def dumps(record: Any) -> str:
    """Return JSON text, which may contain lone surrogates and numbers that are not finite."""
    return json.dumps(record)

"""Lists the settings that affect every bit of an answer, and computes the allowed difference between two answers if
these settings differ.

The server states the settings, and each record stores them. If all of :data:`KEYS` are equal, the same policy gives the
same chunk, bit for bit. Otherwise sums are computed in another order and rounded differently, and :func:`tolerance`
bounds the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# These entries of a server's metadata affect the bits of an answer. If all are equal, answers are equal bit for bit.
KEYS = "version engine device precision providers threads max_batch hardware instructions libraries"

# Key: precision. Value: allowed difference for a model output of size 1. If a sum of K products is computed in another
# order, it differs by about sqrt(K) roundings of its size. D sums one after another differ by sqrt(D) times that,
# because errors with random signs add up like a random walk. K = 2^12 and D = 2^10 bound every family here, except for
# the widest products of the largest family (K = 2^14, which differ twice as much). This gives 2^11 roundings of 2^-24.
# Half precision and integers are summed in float32 and rounded once per sum, which gives 2^5 of their own roundings.
TOLERANCES = {"fp32": 2.0**-13, "fp16": 2.0**-6, "bf16": 2.0**-3, "int8": 2.0**-3}
LOWER = {"int8-rows": "int8", "fp8": "int8"}


def kept(server: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a server's metadata that affect an answer bit for bit.

    Raises:
        ValueError: The precision in the metadata is not valid.
    """
    precision = server.get("precision", {})
    if not isinstance(precision, Mapping) or not all(isinstance(kind, str) for kind in precision.values()):
        raise ValueError(f"precision: expected a text for each component, got {precision!r:.80}")
    return {"max_batch": 1, **{key: server[key] for key in KEYS.split() if key in server}}


def unlike(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one text for each difference between two servers' settings. A missing entry is a difference too.

    Args:
        then: Settings at the time of the recording (:func:`kept`).
        now: Settings of the present server (:func:`kept`).
    """
    return [
        f"{key}: {_text(then.get(key))} then, {_text(now.get(key))} now"
        for key in KEYS.split()
        if key not in then
        or key not in now
        or then[key] != now[key]
        or (key == "max_batch" and now[key] != 1)
    ]


def tolerance(*each: Mapping[str, Any]) -> tuple[float, str]:
    """Return two values: the allowed difference between chunks of two servers, in units of the model's output, and the
    precision that decides it.

    The lower precision of the two servers decides. If no precision is known, it is fp32, the strictest.
    """
    words = {
        word
        for settings in each
        for kind in settings.get("precision", {}).values()
        for word in kind.partition(" ")[0].split("+")
    }
    kinds = [LOWER.get(word, word) for word in words]
    types = [word if word in TOLERANCES else "int8" for word in kinds]
    lowest = max(types, key=lambda word: TOLERANCES[word], default="fp32")
    return TOLERANCES[lowest], lowest


def _text(value: Any) -> str:
    if value is None:
        return "not stated"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value)

"""The settings that affect an answer bit for bit, and the allowed difference between two answers.

The server states the settings, and each record stores them. The same policy gives the same chunk, bit for bit, if all
of :data:`KEYS` are equal. Otherwise sums are computed in another order with other rounding: :func:`tolerance` bounds
the difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of a server's own metadata: the same in all of them is the same in every bit.
KEYS = "version engine device precision providers threads max_batch hardware instructions libraries"

# A sum of K products in another order differs by about sqrt(K) roundings of its size, and D sums one after the other by
# sqrt(D) times that: errors of either sign add like steps of a random walk. K = 2^12 and D = 2^10 are beyond every
# family here but for the widest products of the largest (K = 2^14: twice as much), so 2^11 roundings of 2^-24.
# Half precision and integers are summed in float32 and rounded once for each sum: 2^5 of their own roundings.
TOLERANCES = {
    "fp32": 2.0**-13,
    "fp16": 2.0**-6,
    "bf16": 2.0**-3,
    "int8": 2.0**-3,
}  # tolerance for a model output of size 1
LOWER = {"int8-rows": "int8", "fp8": "int8"}


def kept(server: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a server's metadata that affect its bits. Raises ValueError for an invalid precision."""
    precision = server.get("precision", {})
    if not isinstance(precision, Mapping) or not all(isinstance(kind, str) for kind in precision.values()):
        raise ValueError(f"precision: expected the word of each component, got {precision!r:.80}")
    return {"max_batch": 1, **{key: server[key] for key in KEYS.split() if key in server}}


def unlike(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one text for each difference between two results of :func:`kept`. A missing entry counts as a
    difference.
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
    """Return the allowed difference between chunks of two servers, in units of the model's output, and the precision.

    The lowest precision of both counts. If none is known, it is fp32, the strictest.
    """
    words = {
        word
        for kept_ in each
        for kind in kept_.get("precision", {}).values()
        for word in kind.partition(" ")[0].split("+")
    }
    found = [LOWER.get(word, word) for word in words]
    known = [word if word in TOLERANCES else "int8" for word in found]
    lowest = max(known, key=lambda word: TOLERANCES[word], default="fp32")
    return TOLERANCES[lowest], lowest


def _text(value: Any) -> str:
    if value is None:
        return "not said"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value)

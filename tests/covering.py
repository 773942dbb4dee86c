"""Which cells of a table of cases `make test` runs: each value of each axis, and the pairs that are special. The whole
table is slow; `make test-all` runs it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return a test's parameters, all but ``kept`` slow. Raises ValueError where one of those is no parameter."""
    every = list(values)
    if missing := [value for value in kept if value not in every]:
        raise ValueError(f"expected some of {every}, got {missing}")
    wide = isinstance(every[0], tuple)
    return [
        pytest.param(*(value if wide else (value,)), marks=[pytest.mark.slow] * (value not in kept))
        for value in every
    ]


def pairs(first: Iterable[Any], second: Iterable[Any], *kept: tuple[Any, Any]) -> list[Any]:
    """Return the same of all pairs of two axes."""
    return some(product(first, second), *kept)

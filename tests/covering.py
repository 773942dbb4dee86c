"""Choose the cells of a table of test cases that `make test` runs.

It runs each value of each axis, and the special pairs. The tests of all other cells are slow, and `make test-all`
runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def some(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the parameters of a test, and mark all except ``kept`` as slow.

    Raises:
        ValueError: A value in ``kept`` is not a parameter.
    """
    every = list(values)
    if missing := [value for value in kept if value not in every]:
        raise ValueError(f"expected some of {every}, got {missing}")
    wide = isinstance(every[0], tuple)
    return [
        pytest.param(*(value if wide else (value,)), marks=[pytest.mark.slow] * (value not in kept))
        for value in every
    ]


def pairs(first: Iterable[Any], second: Iterable[Any], *kept: tuple[Any, Any]) -> list[Any]:
    """Return all pairs of two axes as parameters of a test, and mark all except ``kept`` as slow."""
    return some(product(first, second), *kept)

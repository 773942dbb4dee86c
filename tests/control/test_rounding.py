"""What mathematics keeps within a range stays in it after rounding, on any processor."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sinew_client.control import Guard, Limits
from sinew_client.control.blend import AGGREGATES, Fusion, ensemble, guidance_weights, ramp_strength
from sinew_client.control.motion import interpolate

from sinew.stream.windows import Chunks

NUMBERS = st.floats(-1e6, 1e6, width=32)
LENGTHS = st.integers(1, 60)
PLACES = st.integers(-5, 70)


def rounded(direction: float):
    """An exponential that is off by one unit in the last place: numpy's own is, in other places on each processor."""
    exact = np.expm1
    return mock.patch.object(np, "expm1", lambda x: np.nextafter(exact(x), direction))


@pytest.mark.parametrize("direction", [np.inf, -np.inf])
@given(LENGTHS, PLACES, PLACES)
def test_weights_of_guidance(direction: float, length: int, delay: int, end: int) -> None:
    with rounded(direction):
        weights = guidance_weights(length, delay, end, "exp")
        strength = ramp_strength(length, delay, end)
        steep = ramp_strength(length, delay, end, rate=60.0)
    for found in (weights, strength, steep):
        assert ((found >= 0) & (found <= 1)).all()
    committed = max(0, min(delay, end, length))
    assert (weights[:committed] == 1).all()
    assert (strength[:committed] == 0).all()
    assert (np.diff(weights) <= 0).all()


@given(NUMBERS, NUMBERS, st.sampled_from([*AGGREGATES.values(), Fusion(0.1, 1.0, 7)]), st.integers(0, 9))
def test_a_mixture_lies_between_its_rows(old: float, new: float, fusion: Fusion, distance: int) -> None:
    one, other = np.float32([old]), np.float32([new])
    assert min(old, new) <= fusion(one, other, distance)[0] <= max(old, new)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_a_mean_lies_between_its_rows(values: list[float]) -> None:
    assert min(values) <= ensemble([np.float32([value]) for value in values])[0] <= max(values)


@given(NUMBERS, NUMBERS, st.one_of(st.floats(0, 1), st.floats(1 - 1e-7, 1)))
def test_a_command_between_two_lies_between_them(last: float, row: float, part: float) -> None:
    assert min(last, row) <= interpolate(np.float32([last]), np.float32([row]), part)[0] <= max(last, row)


@given(st.lists(NUMBERS, min_size=2, max_size=5), st.floats(0, 0.2))
def test_nodes_lie_between_the_rows_of_their_chunk(values: list[float], taken: float) -> None:
    chunks = object.__new__(Chunks)
    chunks.rate, chunks.hz, chunks.interpolation = 97.0, 30.0, "linear"
    found = chunks.nodes(np.float32(values)[:, None], taken, 0)
    assert len(found) == 0 or min(values) <= found.min() <= found.max() <= max(values)


@given(st.floats(0.01, 1e4), st.floats(-1e5, 1e5))
def test_what_a_guard_sends_is_within_its_range(end: float, wanted: float) -> None:
    """And a number that is a limit, as float32 has it, is not clipped: 0.1 is not beyond 0.1."""
    guard = Guard(Limits.parse({"low": -end, "high": end, "when": "hold"}, 1), 0.02)
    most = np.float32(end)
    for row in (most, -most):
        assert guard.check(np.array([row], np.float32)).clipped == ()
    guard = Guard(Limits.parse({"low": -end, "high": end}, 1), 0.02)
    sent = guard.check(np.float32([wanted])).row
    assert sent is not None
    assert -most <= sent[0] <= most
    assert guard.check(sent).clipped == ()

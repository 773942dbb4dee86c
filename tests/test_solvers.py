"""Solvers as data: grids, steps, and the one loop."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from sinew.bundle.schema import from_builtins
from sinew.core import BundleError
from sinew.solvers import FLOW, SINGLE, Solver, Step, solve


def test_times_are_those_of_the_reference_once_rounded():
    """LeRobot computes 1 + k * (-1 / n) and rounds it to float32; GR00T and Evo-1 cut buckets from k / n."""
    upwards = Solver(start=0.0, end=1.0)
    for n in range(1, 101):
        theirs = np.float32([1.0 + k * (-1.0 / n) for k in range(n)])
        assert np.array_equal(np.float32(FLOW.times(n)), theirs)
        assert upwards.times(n) == [k / n for k in range(n)]


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0)])
def test_euler_integrates_a_constant_velocity_exactly(start, end):
    solver = Solver(start=start, end=end)
    x = np.float32([[0.5, -2.0]])
    got = solve(lambda x, t: np.float32([[3.0, 1.0]]), x, solver.steps(8), solver.times(8))
    assert np.allclose(got, x + (end - start) * np.float32([[3.0, 1.0]]))


def test_a_single_pass_takes_the_output_as_it_is():
    x, output = np.full((1, 2), np.nan), np.float32([[1.0, 2.0]])
    assert solve(lambda x, t: output, x, SINGLE.steps(1), SINGLE.times(1)) is output
    assert SINGLE.fixed_steps == 1
    with pytest.raises(ValueError, match="expected 1, got 2"):
        SINGLE.steps(2)


def test_a_table_is_ddim():
    """Noise prediction over cumulative alphas; a head that knows the answer is led to it in any number of steps."""
    alphas = [math.cos(0.5 * math.pi * k / 6) ** 2 for k in (5, 3, 1, 0)]
    rows = []
    for a, b in pairwise(alphas):
        keep = math.sqrt(b / a)
        rows.append((a, keep, math.sqrt(1 - b) - keep * math.sqrt(1 - a)))
    solver = Solver("table", table=tuple(rows))
    clean, noise = np.array([[0.3, -1.2]]), np.array([[1.0, 0.5]])
    x = math.sqrt(alphas[0]) * clean + math.sqrt(1 - alphas[0]) * noise
    got = solve(
        lambda x, a: (x - math.sqrt(a) * clean) / math.sqrt(1 - a), x, solver.steps(3), solver.times(3)
    )
    assert np.allclose(got, clean)
    with pytest.raises(ValueError, match="expected 3, got 4"):
        solver.steps(4)


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gain", [-0.5, 1.0])
def test_a_step_keeps_and_gains_what_it_says(keep, gain):
    x, output = np.array([3.0, -1.0]), np.array([0.25, 2.0])
    assert np.array_equal(Step(0.3, keep, gain).advance(x, output), keep * x + gain * output)


def test_one_step_is_the_fewest():
    assert FLOW.steps(1) == [Step(1.0, 1.0, -1.0)]
    assert SINGLE.steps(1) == [Step(1.0, 0.0, 1.0)]
    for solver, expected in ((FLOW, "1 or more"), (SINGLE, "1")):
        for count in (0, -1):
            with pytest.raises(ValueError, match=f"expected {expected}, got {count}"):
                solver.steps(count)
    assert FLOW.fixed_steps is None


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0), (0.5, 2.0)])
def test_the_estimate_of_a_constant_velocity_is_where_it_leads(start, end):
    """From every moment on the way, and from its end."""
    solver, x, velocity = Solver(start=start, end=end), np.array([[0.5, -2.0]]), np.array([[3.0, 1.0]])
    there = solve(lambda x, t: velocity, x, solver.steps(8), solver.times(8))
    for step in solver.steps(8):
        np.testing.assert_allclose(solver.denoised(x, velocity, step.time), there, atol=1e-12)
        x = step.advance(x, velocity)
    assert np.array_equal(solver.denoised(there, velocity, end), there)


def test_the_estimate_of_a_single_pass_is_its_output_and_a_table_has_none():
    output = np.array([[1.0, 2.0]])
    assert SINGLE.denoised(np.full((1, 2), np.nan), output, 0.5) is output
    with pytest.raises(ValueError, match="a table has no estimate"):
        Solver("table", table=((0.5, 0.0, 1.0),)).denoised(output, output, 0.5)


def test_after_each_step_somebody_may_look():
    looks = []
    solve(lambda x, t: x, np.ones(1), FLOW.steps(3), FLOW.times(3), lambda: looks.append(1))
    assert len(looks) == 3


def test_guidance_replaces_the_output_of_each_step():
    seen = []

    def guidance(act, x, step):
        seen.append(step.time)
        return 0 * act(x)

    x = np.ones((1, 2))
    assert np.array_equal(solve(lambda x, t: x + t, x, FLOW.steps(4), FLOW.times(4), guidance=guidance), x)
    assert seen == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"kind": "euler", "start": 1.0, "end": 1.0}, "expected start and end to differ"),
        ({"kind": "table"}, "rows of a table"),
        ({"kind": "single", "table": [[0.5, 0.0, 1.0]]}, "rows of a table with kind table alone"),
        ({"kind": "heun"}, "Invalid enum value 'heun'"),
        ({"steps": 3}, "unknown field 'steps'"),
    ],
)
def test_bad_records_are_refused(record, message):
    with pytest.raises(BundleError, match=message):
        from_builtins(record, Solver, "sinew.spec.solver")

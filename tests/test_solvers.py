"""Solvers as data: grids, steps, and the one loop."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from sinew_client.solver import Estimate

from sinew.core import BundleError
from sinew.core.fields import from_builtins
from sinew.models.solvers import FLOW, SINGLE, NoiseLevels, Solver, Step, drawn, solve


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


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.0), (0.0, 1.0)])
def test_runge_kutta_is_the_textbook_method(start, end):
    """Against the method written with its four velocities, on a velocity that depends on x and on the time."""
    velocity = lambda x, t: np.sin(3 * x) + t * x  # noqa: E731
    solver, intervals = Solver("rk4", start=start, end=end), 5
    x, h = np.array([[0.5, -2.0]]), (end - start) / intervals
    expected = x
    for k in range(intervals):
        t = start + k * h
        k1 = velocity(expected, t)
        k2 = velocity(expected + h / 2 * k1, t + h / 2)
        k3 = velocity(expected + h / 2 * k2, t + h / 2)
        k4 = velocity(expected + h * k3, t + h)
        expected = expected + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    got = solve(velocity, x, solver.steps(4 * intervals), solver.times(4 * intervals))
    assert np.allclose(got, expected, rtol=1e-12, atol=0)


def test_runge_kutta_has_four_evaluations_in_each_interval():
    solver = Solver("rk4")
    assert solver.possible(12) == (12,)
    assert solver.possible(2) == (4,)
    with pytest.raises(ValueError, match="solver_steps: expected 8 or 12, got 10"):
        solver.steps(10)


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


def levels(predicts: str, fresh: bool, **other) -> Solver:
    return Solver("diffusion", levels=NoiseLevels(100, predicts=predicts, fresh=fresh, **other))


@pytest.mark.parametrize("steps", [1, 7, 10, 100])
@pytest.mark.parametrize("predicts", ["epsilon", "sample"])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("betas", ["squaredcos_cap_v2", "linear"])
def test_a_head_that_knows_the_actions_is_led_to_them(betas, fresh, predicts, steps):
    """Whatever noise is added on the way: the last step adds none."""
    solver = levels(predicts, fresh, betas=betas)
    clean, kept = np.array([[[0.3, -1.2]]]), solver.levels.alphas().astype(float)
    noise = np.random.default_rng(1).standard_normal((1, max(solver.draws(steps), 1), 1, 2))
    seen = []

    def head(x, level):
        seen.append(level)
        a = kept[int(level)]
        return clean if predicts == "sample" else (x - math.sqrt(a) * clean) / math.sqrt(1 - a)

    got = solve(head, noise, solver.steps(steps), solver.times(steps))
    assert seen == [float(k * (100 // steps)) for k in reversed(range(steps))]
    assert np.allclose(got, clean, atol=1e-5)


def test_even_levels_are_those_of_guided_diffusion():
    """Its rule for "ddimN": the first stride that leaves N of a hundred; one is the fiftieth; others it refuses."""
    even, known = NoiseLevels(100, spacing="even"), {len(range(0, 100, stride)) for stride in range(1, 100)}
    for count in range(1, 101):
        strides = (stride for stride in range(1, 100) if len(range(0, 100, stride)) == count)
        stride = next(strides, None)
        if count > 1 and stride is None:
            below, above = max(n for n in known if n < count), min(n for n in known if n > count)
            assert even.possible(count) == (below, above)
            with pytest.raises(ValueError, match=f"solver_steps: expected {below} or {above}, got {count}"):
                even.steps(count)
            continue
        wanted = [50] if count == 1 else sorted(range(0, 100, stride or 0), reverse=True)
        assert [step.time for step in even.steps(count)] == wanted
        assert even.possible(count) == (count,)
    assert even.possible(101) == (100,)


def test_levels_and_steps_are_those_of_the_papers():
    """Nichol and Dhariwal 2021, equation 17, betas cut at 0.999; Ho et al. 2020, equation 7, of strides of 25; each
    level less noisy than the one before keeps the actions in the proportion of the signal."""
    bars = [math.cos((k / 100 + 0.008) / 1.008 * math.pi / 2) ** 2 for k in range(101)]
    kept = np.cumprod([max(after / before, 0.001) for before, after in pairwise(bars)])
    assert np.allclose(NoiseLevels(100).alphas(), kept, rtol=1e-5)
    straight = np.cumprod(1 - np.linspace(1e-4, 0.02, 100))
    assert np.allclose(NoiseLevels(100, betas="linear").alphas(), straight, rtol=1e-6)
    for step, (a, b) in zip(levels("sample", True).steps(4), pairwise([*kept[75::-25], 1.0]), strict=True):
        ratio = a / b
        assert step.gain == 0.0
        assert math.isclose(step.keep, math.sqrt(ratio) * (1 - b) / (1 - a), rel_tol=1e-4, abs_tol=1e-9)
        assert math.isclose(step.estimate.weight, math.sqrt(b) * (1 - ratio) / (1 - a), rel_tol=1e-4)
        variance = (1 - b) / (1 - a) * (1 - ratio)
        assert math.isclose(step.fresh, math.sqrt(variance), rel_tol=1e-4)
    x, clean = np.array([[0.7, -0.2]]), np.array([[0.3, -1.2]])
    for predicts in ("epsilon", "sample"):  # DDIM, Song et al. 2021, equation 12 without noise
        for step, (a, b) in zip(
            levels(predicts, False).steps(4), pairwise([*kept[75::-25], 1.0]), strict=True
        ):
            noise = (x - math.sqrt(a) * clean) / math.sqrt(1 - a)
            after = step.advance(x, noise if predicts == "epsilon" else clean)
            assert np.allclose(after, math.sqrt(b) * clean + math.sqrt(1 - b) * noise, atol=1e-4)
    close = NoiseLevels(5000, "linear", 2.0**-24, 2.0**-24, fresh=True)  # two levels are one after rounding
    assert (
        min(step.fresh for step in close.steps(5000)[:-1]) == 1e-10
    )  # as the reference has it, of no variance
    least = NoiseLevels(3, "linear", 2.0**-24, 2.0**-24, fresh=True).steps(3)
    assert all(
        math.isfinite(number) for step in least for number in (step.keep, step.fresh, *step.estimate[:3])
    )
    middle = NoiseLevels(100, spacing="even", fresh=True).steps(1)[
        0
    ]  # the last step, though not of the last level
    assert (middle.time, middle.fresh, middle.draw) == (50.0, 0.0, 0)


def test_ddpm_adds_the_noise_of_each_step_but_the_last_and_ddim_none():
    ddpm, ddim = levels("sample", True).steps(5), levels("sample", False).steps(5)
    assert [step.draw for step in ddpm] == [1, 2, 3, 4, 0]
    assert all(step.fresh > 0 for step in ddpm[:-1])
    assert ddpm[-1].fresh == 0.0
    assert not any(step.fresh or step.draw for step in ddim)
    assert levels("sample", True).draws(5) == 5
    assert levels("sample", False).draws(5) == 1
    x, output = np.zeros((1, 1, 2)), np.zeros((1, 1, 2))
    noise = np.arange(10.0).reshape(1, 5, 1, 2)
    assert np.array_equal(ddpm[2].advance(x, output, noise), ddpm[2].fresh * noise[:, 3])
    assert np.array_equal(drawn(noise, 3), noise[:, 3])
    assert drawn(x, 3) is x


def test_a_solution_begins_with_the_first_of_its_noises_and_has_a_time_for_each_step():
    solver, noise, seen = levels("sample", True), np.arange(4.0).reshape(1, 2, 1, 2), []
    solve(lambda x, level: seen.append(x) or x, noise, solver.steps(2), solver.times(2))
    assert np.array_equal(seen[0], noise[:, 0])
    with pytest.raises(ValueError, match="shorter"):
        solve(lambda x, t: x, np.ones(1), FLOW.steps(3), FLOW.times(2))


def test_the_estimated_actions_are_cut_at_the_bound():
    """A head that hears no noise at the noisiest level takes all of x for actions, thousands of times as large."""
    x, silent = np.array([[[1.0, -2.0]]]), np.zeros((1, 1, 2))
    free, cut = (levels("epsilon", False, clip=clip).steps(100)[0] for clip in (0.0, 0.5))
    assert (abs(free.estimate.of(x, silent)) > 10).all()
    assert np.array_equal(cut.estimate.of(x, silent), [[[0.5, -0.5]]])
    assert np.array_equal(cut.advance(x, silent), cut.estimate.weight * np.array([[[0.5, -0.5]]]))
    assert np.array_equal(
        levels("sample", False, clip=0.5).steps(100)[0].estimate.of(silent, x), [[[0.5, -0.5]]]
    )


def test_outputs_are_mixed_with_the_noise_that_it_began_with():
    """X-VLA's: x is noise * t + actions * (1 - t), of the newest actions; the last output is the answer."""
    solver, noise, seen = Solver("renoise"), np.array([[[1.0, -3.0]]]), []

    def head(x, t):
        seen.append(x)
        return np.full_like(x, 10 * t)

    got = solve(head, noise, solver.steps(4), solver.times(4))
    assert np.array_equal(got, np.full_like(noise, 2.5))
    wanted = [noise, noise * 0.75 + 10 * 0.25, noise * 0.5 + 7.5 * 0.5, noise * 0.25 + 5 * 0.75]
    assert np.array_equal(seen, wanted)
    assert {step.draw for step in solver.steps(4)} == {0}
    for start, end in ((0.0, 1.0), (4.0, 2.0)):
        assert [step.fresh for step in Solver("renoise", start, end).steps(4)] == [0.75, 0.5, 0.25, 0.0]
    assert solver.denoised(noise, got, 0.5) is got


def test_a_model_has_one_level_or_as_many_as_can_be_kept():
    assert [NoiseLevels(count).count for count in (1, 100_000)] == [1, 100_000]
    assert not NoiseLevels(100).fresh
    for count in (0, 100_001):
        with pytest.raises(ValueError, match=f"count: expected 1 to 100000, got {count}$"):
            NoiseLevels(count)


def test_more_steps_than_levels_are_refused():
    solver = levels("epsilon", False)
    assert solver.most_steps == 100
    assert solver.fixed_steps is None
    with pytest.raises(ValueError, match="expected at most 100, got 101"):
        solver.steps(101)
    assert solver.draws(1 << 60) == 1  # of an untrusted number, before it is looked at


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gain", [-1.0, -0.5, 0.0, 1.0])
def test_a_step_keeps_and_gains_what_it_says(keep, gain):
    x, output = np.array([3.0, -1.0]), np.array([0.25, 2.0])
    wanted = keep * x + gain * output
    assert np.array_equal(Step(0.3, keep, gain).advance(x, output), wanted)
    assert np.array_equal(Step(0.3, keep, gain, Estimate(0.25)).advance(x, output), wanted + 0.25 * output)


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
    with pytest.raises(ValueError, match="kind table has no estimate"):
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
        ({"kind": "table"}, "got kind 'table' without a table"),
        (
            {"kind": "single", "table": [[0.5, 0.0, 1.0]]},
            "expected the field table for kind 'table' only, got kind 'single' with a table",
        ),
        ({"kind": "diffusion"}, "got kind 'diffusion' without levels"),
        ({"kind": "euler", "levels": {"count": 5}}, "got kind 'euler' with levels"),
        ({"kind": "diffusion", "levels": {"count": 0}}, "count: expected 1 to 100000, got 0"),
        (
            {"kind": "diffusion", "levels": {"count": 5, "last_beta": 1.0}},
            "expected first_beta up to last_beta",
        ),
        ({"kind": "diffusion", "levels": {"count": 5, "first_beta": 2.0**-25}}, "from 5.96e-08 to below 1"),
        ({"kind": "diffusion", "levels": {"count": 5, "clip": -1.0}}, "clip: expected 0 or more"),
        ({"kind": "renoise", "start": 1.0, "end": 1.0}, "expected start and end to differ"),
        ({"kind": "heun"}, "Invalid enum value 'heun'"),
        ({"steps": 3}, "unknown field 'steps'"),
    ],
)
def test_bad_records_are_refused(record, message):
    with pytest.raises(BundleError, match=message):
        from_builtins(record, Solver, "sinew.spec.solver")

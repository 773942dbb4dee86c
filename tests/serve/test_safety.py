"""Limits of what a robot says and is told (row 5, the server's side)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sinew_client import Client, ServerError
from sinew_client.control import Limits

from sinew.bundle.schema import Normalization
from sinew.core import ActionChunk, ObservationError, SinewError
from sinew.policy import Policy, load
from sinew.processing.limits import ranges
from sinew.processing.normalize import Normalizer
from sinew.processing.safety import Safety, UnsafeActionError
from sinew.steps.vector.add_state import AddState
from sinew.steps.vector.affine import Affine
from sinew.steps.vector.threshold import Threshold
from tests.serve.puppet import GOOD, WAIT_S, desk

PEN = Path(__file__).resolve().parents[2] / "sinew" / "assets" / "pen.gguf"


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load(PEN)


def processor_of(policy: Policy, **changes: Any) -> Any:
    """Return what a processor's limits follow from, with some of it changed."""
    made = policy.processor
    names = ("spec", "recipe", "state_normalizer", "action_normalizer")
    return SimpleNamespace(**{**{name: getattr(made, name) for name in names}, **changes})


def test_the_policys_own_actions_pass(policy):
    safety = Safety(policy.processor)
    for seed in range(3):
        observation = replace(policy.dummy_observation(), seed=seed)
        assert safety.check(observation) == ()
        chunk = policy.infer(observation)
        assert safety.enforce(chunk, observation) is chunk


def test_ranges_are_those_of_the_statistics(policy):
    normalizer = policy.processor.action_normalizer
    centre, half = ranges(normalizer)
    assert centre.shape == half.shape == (policy.spec.action.dim,)
    assert (half > 0).all()
    for end in (-1.0, 1.0):
        inside = normalizer.unnormalize(np.full(centre.shape, end))
        assert (np.abs(inside - centre) <= half + 1e-6).all()


def test_windows_have_the_widest_limits_of_all_rows(policy):
    """Statistics per row of a chunk say nothing of row k of a window, and a window may be longer or shorter."""
    safety, observation = Safety(policy.processor), policy.dummy_observation()
    assert safety.of_windows() is safety  # as of most policies
    rows, dim = policy.spec.chunk_size, policy.spec.action.dim
    safety._action_high = np.full((rows, dim), 1.0)
    safety._action_high[-1] = 2.0  # the last row may go furthest
    safety._action_low = -safety._action_high
    if safety._fixed is not None:
        safety._fixed = safety._allowed((rows, dim))
    found = safety.of_windows()
    lowest, highest = found._allowed((1, dim), safety._state(observation))
    assert (lowest.tolist(), highest.tolist()) == ([[-2.0] * dim], [[2.0] * dim])
    for count in (1, rows - 3, rows, 2 * rows - 1):
        inside = np.repeat(highest, count, axis=0).astype(np.float32)
        found.enforce(ActionChunk(inside), observation)
        with pytest.raises(UnsafeActionError):
            found.enforce(ActionChunk(inside + np.float32(0.1)), observation)
        with pytest.raises(UnsafeActionError):
            found.enforce(ActionChunk(np.repeat(lowest - 0.1, count, axis=0)), observation)


def test_a_strange_state_is_answered_with_a_warning(policy):
    """By the number's name, or its place where it has none, and both ends of what was trained on."""
    made, plain = policy.processor, policy.dummy_observation()
    centre, half = ranges(made.state_normalizer)
    state = (centre + 5 * half).astype(np.float32)
    nameless = replace(policy.spec, state=replace(policy.spec.state, names=()))
    for spec, name in ((policy.spec, policy.spec.state.names[0]), (nameless, "0")):
        safety = Safety(processor_of(policy, spec=spec))
        low, high = (float((centre + sign * half)[0]) for sign in (-1, 1))
        said = f"state.{name}: far outside of the training data, which have {low:g} to {high:g}"
        assert safety.check(replace(plain, state=state)) == (said,)


def test_margins_are_half_widths_from_the_centre(policy):
    """Ten of the actions', twenty of the states', a warning from three on; other numbers where they are given."""
    assert not policy.processor.recipe.action_steps
    assert not policy.processor.recipe.state_steps
    centre, half = ranges(policy.processor.action_normalizer)
    for margin, safety in (
        (10.0, Safety(policy.processor)),
        (4.0, Safety(policy.processor, action_margin=4.0)),
    ):
        found = safety.limits()
        np.testing.assert_allclose(found["low"], centre - margin * half)
        np.testing.assert_allclose(found["high"], centre + margin * half)
    centre, half = ranges(policy.processor.state_normalizer)
    known = Safety(policy.processor).state_range()
    np.testing.assert_allclose([known["low"], known["high"]], [centre - half, centre + half])
    for given, margin in (({}, 20.0), ({"state_margin": 6.0}, 6.0)):
        safety = Safety(policy.processor, **given)

        def said(widths, sign, safety=safety):
            state = centre.copy()
            state[-1] += sign * widths * half[-1]
            return safety.check(replace(policy.dummy_observation(), state=state))

        for sign in (-1, 1):
            assert said(2.99, sign) == ()
            assert len(said(3.01, sign)) == len(said(margin - 0.01, sign)) == 1
            words = r"state\..*: expected a number like those of the training data .* times as far from the centre"
            with pytest.raises(ObservationError, match=words):
                said(margin + 0.01, sign)


def test_what_goes_to_one_of_two_values_may_have_both(policy):
    """A gripper's side: how far the model's number is from all training data decides nothing of it."""
    sides, far = Threshold((0,)), Normalization("min_max", {"min": (50.0,), "max": (51.0,)})
    recipe = replace(policy.processor.recipe, action_steps=(sides,))
    made = processor_of(policy, recipe=recipe, action_normalizer=Normalizer(far, 1, "action"))
    found = Safety(made, action_margin=1.0).limits()
    assert (found["low"][0], found["high"][0]) == (sides.above, sides.below) == (-1.0, 1.0)


def test_limits_of_relative_actions_move_with_the_state(policy):
    """And state no numbers for a robot's guard; without a state that is one there is nothing to begin from."""
    steps = AddState((0,)), Threshold(())  # of which one reads
    recipe = replace(policy.processor.recipe, action_steps=steps)
    safety, plain = Safety(processor_of(policy, recipe=recipe)), policy.dummy_observation()
    assert safety.limits() is None
    centre, half = ranges(policy.processor.action_normalizer)
    state = plain.state + np.float32(0.25)
    highest = np.tile(centre + 10 * half, (policy.spec.chunk_size, 1))
    highest[:, 0] += state[0]
    for apart, fits in ((-1e-3, True), (1e-3, False)):
        chunk = ActionChunk((highest + apart).astype(np.float32))
        if fits:
            assert safety.enforce(chunk, replace(plain, state=state)) is chunk
        else:
            with pytest.raises(UnsafeActionError):
                safety.enforce(chunk, replace(plain, state=state))
        assert safety.enforce(chunk, replace(plain, state=np.zeros(99))) is chunk


def test_noise_and_states_at_their_limits(policy):
    safety, plain = Safety(policy.processor), policy.dummy_observation()
    for value in (100.0, -100.0, np.inf, np.nan):  # the policy's own check tells of what is not finite
        assert safety.check(replace(plain, noise=np.full(policy.spec.noise_shape, value))) == ()
    noise = np.zeros(policy.spec.noise_shape)
    noise.flat[-1] = -100.1
    with pytest.raises(ObservationError, match="noise: expected numbers up to 100, got 100.1"):
        safety.check(replace(plain, noise=noise))
    several = load(PEN.with_name("blocks.gguf"))  # the pen's state is one number
    state = several.dummy_observation().state.copy()
    state[0] = np.inf
    assert (
        Safety(several.processor).check(replace(several.dummy_observation(), state=state)) == ()
    )  # nor here
    # What has no form is left to it, too.
    assert safety.check(replace(plain, state=np.full(policy.spec.state.dim + 1, 1e9))) == ()
    assert safety.check(replace(plain, state=np.array(["a"]))) == ()


def test_a_guard_clips_where_the_server_would_refuse(policy):
    """What the server states as ``action.limits`` is what it enforces, in the form that a robot's guard reads."""
    safety = Safety(policy.processor)
    described = policy.spec.to_dict()
    described["action"]["limits"] = safety.limits()
    limits = Limits.from_metadata(json.loads(json.dumps(described)))
    assert limits is not None
    observation, shape = policy.dummy_observation(), (policy.spec.chunk_size, policy.spec.action.dim)
    for ends, sign in ((limits.low, -1), (limits.high, 1)):
        inside = ActionChunk(np.broadcast_to(ends - sign * 1e-3, shape).astype(np.float32))
        assert safety.enforce(inside, observation) is inside
        outside = ActionChunk(np.broadcast_to(ends + sign * 1e-3, shape).astype(np.float32))
        with pytest.raises(UnsafeActionError):
            safety.enforce(outside, observation)
    assert Safety(policy.processor, "off").limits() is None


def test_what_lies_at_a_limit_is_within_it(policy):
    """Statistics from -1 to 1 for states and, where none are known, for no number; of actions each row has its own."""
    plain, rows = policy.dummy_observation(), policy.spec.chunk_size
    ends = [2.0 ** (row % 2) for row in range(rows)]  # 1, 2, 1, 2
    known = Normalization("min_max", {"min": (-1.0,), "max": (1.0,)})
    own = Normalization("min_max", {"min": tuple(-end for end in ends), "max": tuple(ends)}, rows=rows)
    changes = {
        "state_normalizer": Normalizer(known, 1, "state"),
        "action_normalizer": Normalizer(own, 1, "action"),
    }
    safety = Safety(processor_of(policy, **changes))
    for value, said in ((3.0, 0), (3.5, 1), (-20.0, 1)):
        assert len(safety.check(replace(plain, state=np.array([value])))) == said
    assert safety.limits() == {"low": [-20.0], "high": [20.0]}
    for sign in (-10, 10):
        chunk = ActionChunk(sign * np.float32(ends)[:, None])
        assert safety.enforce(chunk, plain) is chunk
        with pytest.raises(
            UnsafeActionError, match="^action 0, dimension 0: .* allow -10 to 10, and it produced"
        ):
            safety.enforce(ActionChunk(1.5 * chunk.actions), plain)
    free = Normalizer(Normalization("identity"), 1, "state")
    still = replace(
        policy.processor.recipe, action_steps=(Affine((0,), 0.0),)
    )  # infinity times 0 is no number
    with np.errstate(invalid="ignore"):
        safety = Safety(processor_of(policy, recipe=still, state_normalizer=free, action_normalizer=free))
    assert safety.enforce(chunk, plain) is chunk
    assert safety.limits() == safety.state_range() == {"low": [None], "high": [None]}
    none = replace(policy.spec, state=replace(policy.spec.state, dim=0, names=()))
    assert Safety(processor_of(policy, spec=none)).check(replace(plain, state=np.zeros(0))) == ()
    with pytest.raises(SinewError, match="^action limits: expected one of refuse, clamp, off, got 'x'$"):
        Safety(policy.processor, "x")
    aged = Safety(policy.processor, max_age=1.0)
    assert aged.check(replace(plain, time="now")) == aged.check(replace(plain, time=[0.0, 1.0])) == ()
    turned = replace(policy.processor.recipe, state_steps=(AddState((0,)),))
    assert Safety(processor_of(policy, recipe=turned)).state_range() is None


@pytest.mark.parametrize("value", [1e37, -1e5, 1e4])
def test_actions_beyond_the_limits(policy, value):
    observation = policy.dummy_observation()
    actions = np.zeros((policy.spec.chunk_size, policy.spec.action.dim), np.float32)
    actions[1, 0] = actions[2, 0] = value  # the first of them is named
    chunk = ActionChunk(actions)
    with pytest.raises(UnsafeActionError, match="action 1, dimension 0: the policy's statistics allow"):
        Safety(policy.processor).enforce(chunk, observation)
    clamped = Safety(policy.processor, "clamp").enforce(chunk, observation)
    assert np.abs(clamped.actions).max() < 1e4
    assert "clamped" in clamped.warnings[0]
    assert Safety(policy.processor, "off").enforce(chunk, observation) is chunk


def test_old_observations_are_refused_before_and_after(policy, monkeypatch):
    """The age counts where the client gives it, on the server's clock, until the answer leaves."""
    now = [1e9]
    monkeypatch.setattr("sinew.processing.safety.time", SimpleNamespace(time=lambda: now[0]))
    safety, plain = Safety(policy.processor, max_age=2.0), policy.dummy_observation()
    chunk = ActionChunk(np.zeros((policy.spec.chunk_size, policy.spec.action.dim), np.float32))
    assert safety.check(plain) == ()  # it does not say
    fresh = replace(plain, time=now[0] - 1.5)
    safety.check(fresh)
    assert safety.enforce(chunk, fresh) is chunk
    for apart in (-2.0, 2.0):  # clocks may be so far apart, either way
        assert safety.check(replace(plain, time=now[0] + apart)) == ()
        with pytest.raises(ObservationError, match="time: expected"):
            safety.check(replace(plain, time=now[0] + 1.1 * apart))
    for taken, text in (
        (now[0] - 3600, r"time: expected Unix seconds of the last 2 s \(--max-age\), got 3600.000 s ago"),
        (now[0] + 3600, "3600.000 s from now; the clocks disagree"),
        (12.5, "s ago"),  # seconds since the robot's program began
        (float("inf"), "from now"),
        (float("nan"), "time: expected"),
    ):
        with pytest.raises(ObservationError, match=text):
            safety.check(replace(plain, time=taken))
    with pytest.raises(ObservationError, match=r"got 0\.750 s ago"):
        Safety(policy.processor, max_age=0.5).check(replace(plain, time=now[0] - 0.75))
    now[0] += 1.0  # it waited, and was computed
    with pytest.raises(ObservationError, match=r"2\.500 s ago"):
        safety.enforce(chunk, fresh)
    Safety(policy.processor).check(replace(plain, time=12.5))  # nobody asked


def test_a_time_that_is_none(policy):
    """It is echoed on wires of JSON, which has no infinity."""
    for taken in (float("nan"), float("inf"), "now", [1.0, 2.0], 1j):
        with pytest.raises(ObservationError, match="time: expected"):
            policy.processor.check(replace(policy.dummy_observation(), time=taken))
    policy.processor.check(replace(policy.dummy_observation(), time=np.float64(12.5)))


def test_the_service_enforces_them():
    class Strict:
        def check(self, observation):
            if observation.state[0] > 10:
                raise ObservationError("state.a", "less", "more")
            return ("odd",) if observation.state[0] > 1 else ()

        def enforce(self, chunk, observation):
            if observation.state[0] == 0.5:
                raise UnsafeActionError("too far")
            return chunk

    with desk(safety=Strict()) as at, Client(at.native, timeout=WAIT_S) as robot:
        assert robot.infer(GOOD).warnings == ()
        assert robot.infer({**GOOD, "state": [2, 0]}).warnings == ("odd",)
        for state, code in ((0.5, "unsafe_action"), (11, "bad_observation")):
            with pytest.raises(ServerError) as caught:
                robot.infer({**GOOD, "state": [state, 0]})
            assert caught.value.code == code

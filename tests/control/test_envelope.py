"""What goes out keeps the envelope, whatever comes in: jerk, jumps, workspace, filters, speed, cameras that differ."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.control import (
    Controller,
    Guard,
    Limits,
    LimitsError,
    Loop,
    Offsets,
    Settings,
    SettingsError,
    SimulatedPace,
    parse_filter,
)
from sinew_client.control.jerk import StepBounds, next_step, stop, stopped
from sinew_client.control.motion import slowed
from sinew_client.control.safety import Verdict
from sinew_client.control.smoothing import Smoothing
from sinew_client.control.trajectory import Node, Trajectory

PERIOD = 0.05
HOSTILE = st.one_of(
    st.floats(-3, 3, width=32), st.sampled_from([0.0, 1e30, -1e30, 1e-30, 5.0, -5.0, math.pi])
)
FAST = settings(max_examples=120, deadline=None, derandomize=True)


# ----------------------------------------------------------------------------- jerk


def fastest_stop(u: float, a: float, jerk: float) -> int:
    """Return the steps of the fastest stop, found by trying every profile of ramps (a plain search)."""
    for steps in range(1, 60):
        for first in range(steps + 1):  # ``first`` steps of -jerk (or +jerk), then back
            for sign in (-1.0, 1.0):
                change, step, at_rest = a, u, False
                for index in range(steps):
                    change += sign * jerk * (1 if index < first else -1)
                    step += change
                at_rest = abs(step) <= jerk * steps**2 * 1e-9 and abs(change) <= 1e-9
                if at_rest:
                    return steps
    raise AssertionError("no stop found")


@pytest.mark.parametrize("first", [1, 2, 3, 5, 8])
def test_a_stop_is_the_fastest_that_a_jerk_allows(first: int) -> None:
    """From a step that such a profile ends at: down to -first, back to 0, one jerk a step."""
    jerk = 0.5
    profile = [*range(1, first + 1), *range(first - 1, -1, -1)]
    u = np.array([jerk * sum(profile)])
    a, steps = np.zeros(1), 0
    start = float(u[0])
    while u[0] != 0.0 or a[0] != 0.0:
        change = stop(u, a, np.array([np.inf]), np.array([jerk]))
        assert abs(change[0] - a[0]) <= jerk + 1e-12
        a, u, steps = change, u + change, steps + 1
        assert steps < 60
    assert steps == fastest_stop(start, 0.0, jerk) == len(profile)


def plain_stop(u: float, a: float, push: float, jerk: float) -> float:
    """Return the next change of the fastest stop: as many ramps of whole jerks as there is room for, found by counting,
    and what they leave of the step shared out among its changes."""
    count, size = 0, abs(u)
    while jerk * (count + 1) * (count + 2) / 2 <= size:
        count += 1
    wanted = -math.copysign(size + jerk * count * (count + 1) / 2, u) / (count + 1)
    return min(max(wanted, a - jerk, -push), a + jerk, push)


def drawn(count: int, seed: int) -> tuple[StepBounds, np.ndarray, np.ndarray, np.ndarray]:
    """Return limits of so many numbers, where each is, its last step and by how much that differed."""
    rng = np.random.default_rng(seed)
    jerk = 10.0 ** rng.uniform(-2, 0, count)
    push = np.where(rng.random(count) < 0.5, np.inf, jerk * rng.uniform(1, 6, count))
    fastest = np.where(rng.random(count) < 0.5, np.inf, jerk * rng.uniform(2, 12, count))
    low, high = -jerk * rng.uniform(0, 30, count), jerk * rng.uniform(0, 30, count)
    at, u, a = rng.uniform(low - 3 * jerk, high + 3 * jerk), *(jerk * rng.uniform(-3, 3, (2, count)))
    return (
        StepBounds(low, high, fastest, push, jerk),
        at,
        u * rng.uniform(0, 3, count),
        np.clip(a, -push, push),
    )


def test_a_stop_ends_where_its_steps_lead() -> None:
    """By an independent count: each change, the end to rounding, and whether all of it stays inside."""
    bounds, places, steps, changes = drawn(300, 0)
    ends, fits = stopped(places[None], steps[None], changes[None], bounds)
    for each, (at, u, a) in enumerate(zip(places.tolist(), steps.tolist(), changes.tolist(), strict=True)):
        low, high, fastest, push, jerk = (
            float(getattr(bounds, field.name)[each]) for field in fields(bounds)
        )
        inside = low <= at <= high and abs(u) <= fastest
        while abs(u) + abs(a) > 1e-12:
            change = plain_stop(u, a, push, jerk)
            found = stop(np.array([u]), np.array([a]), np.array([push]), np.array([jerk]))[0]
            assert found == pytest.approx(change, abs=1e-12)
            u, a = u + change, change
            at += u
            inside &= low <= at <= high and abs(u) <= fastest
        assert (ends[0, each], bool(fits[0, each])) == (pytest.approx(at, abs=1e-9), inside)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_stop_may_end_at_a_limit_and_no_further(sign: float) -> None:
    """Steps of 2, 1.5, 0.5 and 0, as changes grow by 0.5 and shrink again; beside it a number that stands."""
    free, rest = np.full(2, np.inf), np.zeros((1, 2))
    for room, fastest, inside in ((2.0, 2.0, True), (1.875, 2.0, False), (2.0, 1.875, False)):
        low, high = sorted((0.0, sign * room))
        bounds = StepBounds(
            np.array([low, 0.0]), np.array([high, 0.0]), np.array([fastest, 9.0]), free, np.full(2, 0.5)
        )
        ends, fits = stopped(rest, np.array([[sign * 2.0, 0.0]]), rest, bounds)
        assert (ends.tolist(), fits.tolist()) == ([[sign * 2.0, 0.0]], [[inside, True]])
        assert stopped(rest + sign * 3.0, rest, rest, bounds)[1].tolist() == [
            [False, False]
        ]  # stands outside
        ends, _ = stopped(rest, rest, np.array([[sign, 0.0]]), bounds)  # has not moved, and begins to
        assert sign * ends[0, 0] > 0.0


def test_the_next_step_is_the_furthest_that_is_safe() -> None:
    """Held against a thousand steps beside each other, all of which are tried, from the fastest stop's on."""
    bounds, at, u, a = drawn(80, 1)
    least = u + np.maximum(a - bounds.jerk, -bounds.push)
    most = u + np.minimum(a + bounds.jerk, bounds.push)
    rng = np.random.default_rng(2)
    wanted = np.where(
        np.arange(80) < 40, rng.uniform(bounds.low, bounds.high), at + least + rng.random(80) * (most - least)
    )
    step = next_step(at, u, a, wanted, bounds)
    brake = u + stop(u, a, bounds.push, bounds.jerk)
    forward = wanted > stopped((at + brake)[None], brake[None], (brake - u)[None], bounds)[0][0]
    steps = brake + np.linspace(0.0, 1.0, 1001)[:, None] * (np.where(forward, most, least) - brake)
    ends, fits = stopped(at + steps, steps, steps - u, bounds)
    fits &= np.where(forward, ends <= wanted, ends >= wanted)
    furthest = [
        column[max(np.argmin([*safe[1:], False]), 0)] for column, safe in zip(steps.T, fits.T, strict=True)
    ]
    direct = wanted - at
    _, safe = stopped((at + direct)[None], direct[None], (direct - u)[None], bounds)
    may = safe[0] & (least <= direct) & (direct <= most)
    assert 10 < may.sum() < 40
    assert 30 < (step != brake).sum() < 80  # and of each kind some
    assert (step[may] == direct[may]).all()
    apart = np.abs(steps[-1] - brake) / 900 + 1e-12
    assert (np.abs(step - furthest) <= apart)[~may].all()


def test_a_stop_that_is_not_safe_is_said() -> None:
    bounds = StepBounds(*(np.array([x]) for x in (-1.0, 1.0, np.inf, np.inf, 0.1)))
    _, fits = stopped(np.array([[0.0]] * 2), np.array([[0.1], [0.9]]), np.zeros((2, 1)), bounds)
    assert fits.tolist() == [[True], [False]]
    for change, fastest, fit in (
        (1.0, 1.5, True),
        (1.0, 1.25, False),
        (0.0, 1.0, True),
    ):  # it is still speeding up
        bounds = StepBounds(*(np.array([x]) for x in (-99.0, 99.0, fastest, np.inf, 0.5)))
        _, fits = stopped(np.zeros((1, 1)), np.ones((1, 1)), np.full((1, 1), change), bounds)
        assert fits.tolist() == [[fit]]
    slow = StepBounds(*(np.array([x, y]) for x, y in ((-9, -1), (9, 1), (9, 9), (9, 9), (1e-9, 0.1))))
    _, fits = stopped(np.array([[0.0, 0.9]]), np.array([[0.1, 0.9]]), np.zeros((1, 2)), slow)
    assert fits.tolist() == [[False, False]]  # one that takes for ever, and beside it one that ended outside
    _, fits = stopped(np.array([[0.0, 0.0]]), np.array([[0.1, 0.1]]), np.zeros((1, 2)), slow)
    assert fits.tolist() == [[False, True]]  # or inside


@FAST
@given(
    wanted=st.lists(st.tuples(HOSTILE, HOSTILE), min_size=1, max_size=60),
    span=st.floats(0.1, 10),
    velocity=st.one_of(st.none(), st.floats(0.01, 50)),
    acceleration=st.one_of(st.none(), st.floats(0.05, 500)),
    jerk=st.floats(0.5, 20_000),
    start=st.floats(-12, 12),
    holds=st.sets(st.integers(0, 59)),
)
def test_no_limit_is_exceeded_whatever_is_asked_for(
    wanted: list[tuple[float, float]],
    span: float,
    velocity: float | None,
    acceleration: float | None,
    jerk: float,
    start: float,
    holds: set[int],
) -> None:
    """Range and velocity to the bit, acceleration and jerk but for the rounding of commands; a hold stops at once."""
    limits = Limits.parse(
        {
            "low": -span,
            "high": span,
            "velocity": velocity,
            "acceleration": acceleration,
            "jerk": [jerk, None],
        },
        2,
    )
    guard = Guard(limits, PERIOD)
    guard.start(np.array([start, start]))
    position = np.float32([start, start])
    step, change = np.zeros(2), np.zeros(2)
    seen = [np.abs(position)]
    low, high = np.minimum(np.float32(-span), position), np.maximum(np.float32(span), position)
    for number, row in enumerate(wanted):
        if number in holds:
            guard.held()
            step, change = np.zeros(2), np.zeros(2)
        verdict = guard.check(np.float32(row))
        assert verdict.row is not None
        assert bool(verdict.clipped) == bool(np.any(verdict.row != np.float32(row)))
        assert (low <= verdict.row).all()
        assert (verdict.row <= high).all()
        moved = verdict.row.astype(np.float64) - position
        assert (np.abs(moved) <= limits.velocity * PERIOD).all()
        seen = [*seen[-3:], np.abs(verdict.row)]
        ulp = 16 * np.spacing(np.max(seen, axis=0))  # of the places that the differences are of
        changed = moved - step
        assert np.abs(changed)[0] <= limits.acceleration[0] * PERIOD**2 + ulp[0]
        assert np.abs(changed - change)[0] <= jerk * PERIOD**3 + ulp[0]
        position, step, change = verdict.row, moved, changed
        low, high = np.minimum(np.float32(-span), position), np.maximum(np.float32(span), position)


@settings(FAST, max_examples=30)
@given(
    targets=st.lists(st.floats(-0.9, 0.9), min_size=1, max_size=6),
    velocity=st.floats(0.3, 5),
    acceleration=st.floats(1, 50),
    jerk=st.floats(20, 2000),
)
def test_what_is_limited_arrives_and_does_not_swing(
    targets: list[float], velocity: float, acceleration: float, jerk: float
) -> None:
    """A place that stays is reached to the bit, and never passed by a robot that stood before."""
    limits = Limits.parse(
        {"low": -1, "high": 1, "velocity": velocity, "acceleration": acceleration, "jerk": jerk}, 1
    )
    guard = Guard(limits, PERIOD)
    guard.start(np.zeros(1))
    at = 0.0
    for target in targets:
        place = np.float32([target])
        first, path = at, []
        for _ in range(800):
            row = guard.check(place).row
            assert row is not None
            path.append(float(row[0]))
            if row[0] == place[0]:
                break
        assert path[-1] == place[0]
        # It may still be under way when it is there, and has to pass then; one step at rest shows that it was not.
        ends = sorted((first, float(place[0])))
        slack = 16 * float(np.spacing(np.float32(1)))
        assert ends[0] - slack <= min(path)
        assert max(path) <= ends[1] + slack
        guard.held()
        at = float(place[0])


def test_a_robot_of_limited_jerk_goes_both_ways_and_back_into_its_range() -> None:
    for start, target in ((0.0, 0.5), (0.0, -0.5), (1.5, 0.5), (-1.5, -0.5), (0.75, -0.75), (-1.5, 1.0)):
        guard = Guard(Limits.parse({"low": -1, "high": 1, "jerk": 100.0}, 1), PERIOD)
        guard.start(np.array([start]))
        path = [start]
        for _ in range(120):
            row = guard.check(np.float32([target])).row
            assert row is not None
            path.append(float(row[0]))
        assert path[-1] == target
        assert np.abs(path).max() <= max(1.0, abs(start))


def test_the_next_step_goes_where_it_is_told_if_it_may() -> None:
    bounds = StepBounds(*(np.full(1, x) for x in (-1.0, 1.0, 0.5, 0.5, 0.5)))
    zero = np.zeros(1)
    assert next_step(zero, zero, zero, np.array([0.1]), bounds) == 0.1
    assert 0.0 < next_step(zero, zero, zero, np.array([0.9]), bounds) < 0.9


def test_each_number_has_steps_of_its_own_and_no_unit() -> None:
    """Beside others they are what they are alone; told in nanometres they are the same to the bit, times that."""
    rng, names, unit = np.random.default_rng(4), ("low", "high", "fastest", "push", "jerk"), 2.0**-30
    limits = StepBounds(*(np.array(x) for x in ((-1, -1), (1, 1), (0.2, 0.9), (0.03, 0.9), (0.01, 0.5))))
    small = StepBounds(*(getattr(limits, name) * unit for name in names))
    state = np.zeros((3, 2))  # place, last step, its change
    for wanted in rng.uniform(-1, 1, (5, 2)).repeat(4, axis=0):
        step = next_step(*state, wanted, limits)
        assert np.array_equal(next_step(*(state * unit), wanted * unit, small), step * unit)
        for at in range(2):
            only = np.arange(2) == at
            assert next_step(*state[:, only], wanted[only], limits.take(only)) == step[at]
        state = np.array([state[0] + step, step, step - state[1]])


def test_a_jerk_is_named_where_no_other_limit_is() -> None:
    for bounds, name in (
        ({"high": 1.0}, "0.range"),
        ({"velocity": 1.0}, "0.velocity"),
        ({"acceleration": 50.0}, "0.acceleration"),
        ({"jerk": 100.0}, "0.jerk"),
    ):
        guard = Guard(Limits.parse({"jerk": 1000.0, **bounds}, 2), 0.1)
        guard.start(np.zeros(2))
        assert guard.check(np.float32([5, 0])).clipped == (name,)


def test_velocity_holds_to_the_bit_where_float32_is_coarser_behind_than_ahead() -> None:
    """From 0.2 to 0.004 there are many numbers between two roundings of the place that was left."""
    limits = Limits.parse({"velocity": 4.0, "jerk": 1e6}, 1)
    rng = np.random.default_rng(0)
    for _ in range(200):
        guard, place = Guard(limits, PERIOD), np.float32(rng.uniform(0.15, 0.25, 1))
        guard.start(place)
        for wanted in rng.uniform(-0.3, 0.3, 12):
            row = guard.check(np.float32([wanted])).row
            assert row is not None
            assert abs(float(row[0]) - float(place[0])) <= 4.0 * PERIOD
            place = row
    guard = Guard(limits, 1 / 16)
    guard.start(np.zeros(1))
    assert guard.check(np.float32([0.25])) == Verdict(np.float32([0.25]))  # and is had to the bit


# ----------------------------------------------------------------------------- jumps


@FAST
@given(
    rows=st.lists(st.tuples(HOSTILE, HOSTILE), min_size=1, max_size=30),
    jump=st.floats(0.01, 3),
    start=st.sampled_from([0.0, 1.5, -4.0]),
)
def test_a_jump_is_never_sent(rows: list[tuple[float, float]], jump: float, start: float) -> None:
    """Neither one that a row is, nor the one into its range that a robot would make which stands out of it."""
    limits = Limits.parse({"jump": [jump, None], "low": -2, "high": 2, "names": ["elbow", "grip"]}, 2)
    guard = Guard(limits, PERIOD)
    guard.start(np.array([start, 0]))
    last = np.array([start, 0])
    for row in rows:
        verdict = guard.check(np.float32(row))
        said = float(np.float32(row[0]))
        far = abs(said - last[0]) > jump or abs(min(max(said, -2.0), 2.0) - last[0]) > jump
        assert (verdict.row is None) == far
        if far:
            assert verdict.clipped == ("elbow.jump",)
            assert verdict.reason == "too far from the last command: elbow.jump"
            guard.held()
        else:
            assert verdict.row is not None
            last = verdict.row.astype(np.float64)


# ----------------------------------------------------------------------------- a robot that moves by offsets


class Gantry:
    """A robot that is moved by offsets of ``scale``, or goes where it is told, and a server that says what it likes."""

    def __init__(self, scale: float | None, start: list[float]):
        self.scale, self.position = scale, np.float32(start)
        self.path: list[np.ndarray] = [self.position]
        self.sent: list[np.ndarray] = []

    def observe(self) -> dict[str, Any]:
        return {"images": {}, "state": self.position.copy()}

    def act(self, row: np.ndarray) -> None:
        self.sent.append(row)
        self.position = row if self.scale is None else self.position + np.float32(self.scale) * row
        self.path.append(self.position)

    def hold(self) -> None:
        self.path.append(self.position)


def driven(robot: Gantry, chunks: list[list], steps: int, **options: Any) -> Loop:
    """Return a loop that has run so many steps over chunks that come again and again."""
    asked = [0]

    def call(observation: Any, seconds: float) -> np.ndarray:
        asked[0] += 1
        return np.float32(chunks[asked[0] % len(chunks)])

    chosen = Settings(20.0, **{"handover": "aligned", "replan": "full", **options})

    class Now:
        """Answers in the control step in which it is asked."""

        continuous, failures = False, 0
        answer: np.ndarray | None = None

        def ready(self, now: float) -> bool:
            return True

        def ask(self, observation: Any, now: float) -> None:
            self.answer = call(observation, 0.0)

        def poll(self, now: float) -> Any:
            from sinew_client.control import Outcome

            found, self.answer = self.answer, None
            return None if found is None else Outcome(found)

        def cancel(self) -> None:
            self.answer = None

        def close(self, wait: float = 0.0) -> None:
            pass

    loop = Loop(robot, Now(), chosen, len(robot.position), "go", SimulatedPace(20.0))  # type: ignore[arg-type]
    loop.run(steps)
    return loop


ROWS = st.lists(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8), min_size=1, max_size=4
)
OFFSETS = {"kind": "offsets", "action": [0, 1], "state": [0, 1], "scale": 0.05, "low": -1.0, "high": 1.0}


@FAST
@given(
    chunks=ROWS,
    start=st.tuples(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)),
    acceleration=st.one_of(st.none(), st.floats(1, 100)),
    offsets=st.booleans(),
)
def test_the_workspace_is_never_left(
    chunks: list, start: tuple[float, float], acceleration: float | None, offsets: bool
) -> None:
    """Of offsets, the pose that they lead to; a robot that stands outside only comes nearer. What would leave it is not
    remembered as sent: the next command is no longer than a velocity allows from where the robot stands."""
    box = {"workspace_low": [-0.2, -0.1], "workspace_high": [0.2, 0.3], "acceleration": [acceleration, 400.0]}
    box["velocity"] = None if offsets else 2.0
    robot = Gantry(0.05 if offsets else None, list(start))
    driven(
        robot, chunks, 40, motion=OFFSETS if offsets else {"kind": "absolute"}, limits={**box, "still": None}
    )
    path = np.array(robot.path, np.float64)
    assert offsets or np.abs(np.diff(path, axis=0)).max() <= 2.0 * PERIOD
    low, high = np.array([-0.2, -0.1]), np.array([0.2, 0.3])
    beyond = np.maximum(np.maximum(low - path, path - high), 0.0)
    assert (np.diff(beyond, axis=0) <= 1e-6).all()  # never further out
    assert (beyond[np.cumsum(beyond == 0.0, axis=0) > 0] <= 1e-6).all()  # and once inside, inside


@pytest.mark.parametrize("jump", [None, 0.5])
def test_a_robot_out_of_its_workspace_is_led_back_whatever_a_jump_may_be(jump: float | None) -> None:
    """The workspace is far from there; no row is, and no step. A row that lies far in it is a jump."""
    limits = {"workspace_low": -1.0, "workspace_high": 1.0, "velocity": 2.0, "jump": jump}
    robot = Gantry(None, [2.0, 0.0])
    rows = [[1.9 - 0.05 * k, 0.0] for k in range(40)]
    driven(robot, [rows], 12, motion={"kind": "absolute"}, limits=limits)
    path = np.array(robot.path, np.float64)[:, 0]
    assert path[-1] < 1.5
    assert (np.diff(path) <= 0).all()
    assert np.abs(np.diff(path)).max() <= 2.0 * PERIOD
    far = Gantry(None, [2.0, 0.0])
    driven(far, [[[0.0, 0.0]] * 40], 12, motion={"kind": "absolute"}, limits=limits)
    assert (len(far.sent) == 0) == (jump is not None)


def test_a_workspace_of_what_is_measured_from_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match="workspace_low.*got none for z"):
        Settings(
            20.0,
            motion={**OFFSETS, "action": [0], "state": [0]},
            limits={"workspace_low": 0.0, "names": ["x", "z"]},
        ).controller(2)
    with pytest.raises(SettingsError, match="workspace_low.*got none for 0, 1"):
        Settings(20.0, limits={"workspace_low": 0.0}).controller(2)
    with pytest.raises(LimitsError, match="workspace_low: expected at most workspace_high"):
        Limits.parse({"workspace_low": 1, "workspace_high": 0}, 1)


# ----------------------------------------------------------------------------- filters


@pytest.mark.parametrize("text", ["ema:0.3", "ema:1", "lowpass:3", "lowpass:0.7", "ema:0.45"])
def test_a_delay_is_what_is_stated_and_made_up_for(text: str) -> None:
    """A motion at constant speed comes out late by the lag without a look ahead, and on time with one."""
    design = parse_filter(text, 20.0)
    assert design is not None
    rows = 0.01 * np.arange(400, dtype=np.float32)[:, None]
    nodes = [Node(k, row, 0, 0, k) for k, row in enumerate(rows)]
    ahead, whole = Smoothing(design, np.ones(1, bool)), Trajectory()
    whole.put(nodes)
    out = np.array([ahead.next(node, whole)[0] for node in nodes[:300]])
    np.testing.assert_allclose(out[250:], rows[250:300, 0], atol=2e-6)
    assert ahead.missing == 0
    late, nothing = Smoothing(design, np.ones(1, bool)), Trajectory()
    out = np.array([late.next(node, nothing)[0] for node in nodes[:300]])
    np.testing.assert_allclose(out[250:], rows[250:300, 0] - 0.01 * design.lag, atol=2e-6)
    assert late.missing == (300 if design.lag else 0)


def test_a_filter_begins_where_the_robot_stands_and_else_at_the_first_row() -> None:
    """Of each number for itself; those that are no places, and columns that nobody named, go through."""
    design = parse_filter("ema:0.5", 20.0)
    assert design is not None
    node, trajectory = Node(0, np.float32([1, 1, 1]), 0, 0, 0), Trajectory()
    trajectory.put([node, Node(1, np.float32([3, 3, 3]), 0, 0, 1)])
    smooth = Smoothing(design, np.array([True, True, False]))
    for target, out in ((None, [2, 2, 1]), (np.array([5.0, np.nan, 5.0]), [4, 2, 1]), (None, [2, 2, 1])):
        smooth.rest(target)
        assert smooth.next(node, trajectory).tolist() == out  # half of the way to the row of the next step
    assert smooth.next(node, trajectory).tolist() == [2.5, 2.5, 1]
    named = Smoothing(replace(design, columns=(2,)), np.array([True, True, False]))
    named.rest(np.zeros(3))
    assert named.next(node, trajectory).tolist() == [1, 1, 1.5]
    assert Smoothing(design, np.zeros(3, bool)).mask.all()  # nothing says what is a place
    with pytest.raises(ValueError, match="filter: expected indices of values below 2, got 1, 2"):
        Smoothing(replace(design, columns=(1, 2)), np.ones(2, bool))
    assert parse_filter(f"ema:{1 / 65}", 20.0) is not None  # 64 steps, which are allowed
    assert parse_filter("", 20.0) is None


def test_a_filter_begins_where_a_robot_without_a_state_is_said_to_stand() -> None:
    for position, first in ((None, 1.0), (np.float32([5]), 3.0)):
        for say in (Controller.stands, Controller.resume):
            controller = Settings(20.0, "aligned", filter="ema:0.5").of_chunks(1)
            controller.ask(0, 0)
            controller.arrived(0, np.ones((8, 1)))
            say(controller, position)
            if say is Controller.resume:
                controller.ask(0, 0)
                controller.arrived(0, np.ones((8, 1)))
            assert controller.command(0).row == first


@pytest.mark.parametrize("hz", [0.5, 2.0, 6.0])
def test_a_low_pass_has_its_frequency(hz: float) -> None:
    """The amplitude of a sine at the frequency is 1 / sqrt(2) of what went in."""
    design = parse_filter(f"lowpass:{hz}", 20.0)
    assert design is not None
    time = np.arange(8000) / 20.0
    wave = np.sin(2 * np.pi * hz * time)
    smooth, nothing = Smoothing(design, np.ones(1, bool)), Trajectory()
    out = [smooth.next(Node(k, np.float32([x]), 0, 0, k), nothing)[0] for k, x in enumerate(wave)]
    fitted = np.linalg.lstsq(
        np.stack([np.sin(2 * np.pi * hz * time), np.cos(2 * np.pi * hz * time)], 1)[4000:],
        np.array(out)[4000:],
        rcond=None,
    )[0]
    assert abs(np.hypot(*fitted) - math.sqrt(0.5)) < 1e-4


@FAST
@given(
    chunks=ROWS,
    start=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    text=st.sampled_from(["ema:0.2", "lowpass:2", "lowpass:1:1"]),
)
def test_a_filter_goes_nowhere_that_no_row_is(chunks: list, start: tuple[float, float], text: str) -> None:
    """What is sent lies between where the robot stood and the rows; columns that are not named are sent as they are."""
    robot = Gantry(None, list(start))
    loop = driven(robot, chunks, 30, motion={"kind": "absolute"}, filter=text)
    every = np.concatenate([np.float32(chunk) for chunk in chunks] + [np.float32([start])])
    sent = np.array(robot.sent)
    slack = 1e-6 * (1 + np.abs(every).max())
    assert (sent >= every.min(axis=0) - slack).all()
    assert (sent <= every.max(axis=0) + slack).all()
    if text.endswith(":1"):
        assert np.isin(sent[:, 0], every[:, 0]).all()
    report = loop.report().to_dict()["filter"]
    design = parse_filter(text, 20.0)
    assert design is not None
    assert report == {
        "filter": text,
        "delay_ms": round(50 * design.lag, 3),
        "missing": loop.controller.smoothing.missing,  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize(
    "text",
    [
        "ema",
        "ema:0",
        "ema:1.5",
        "ema:nan",
        "lowpass:10",
        "lowpass:-1",
        "box:3",
        "ema:0.5:x",
        "ema:1e-3",
        "ema:1:0,0",
        "ema:1:-1",
        "lowpass:0",
        "ema:0.0152",  # 65 steps
    ],
)
def test_what_is_no_filter_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="^filter: expected"):
        Settings(20.0, filter=text).controller(2)


def test_a_filter_at_its_bounds() -> None:
    for text, message in (
        ("lowpass:0", "filter: expected a frequency above 0 and below 10 Hz, got 0"),
        ("lowpass:10", "filter: expected a frequency above 0 and below 10 Hz, got 10"),
        ("ema:0", "filter: expected a share above 0 and at most 1, got 0"),
        ("ema:0.5:1,-1", "filter: expected different indices of values, from 0 on, got [1, -1]"),
        ("ema:0.5:1,1", "filter: expected different indices of values, from 0 on, got [1, 1]"),
        ("ema:0.5:", "filter: expected numbers after ema, got 'ema:0.5:'"),
        ("mean:1", "filter: expected ema:SHARE or lowpass:HZ, got 'mean:1'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message) + "$"):
            parse_filter(text, 20.0)
    assert parse_filter("lowpass:9.9", 20.0) is not None
    whole, low = parse_filter("ema:1", 20.0), parse_filter("lowpass:2:0,3", 20.0)
    assert whole is not None
    assert low is not None
    assert (whole.lag, whole.stages, low.stages, low.columns, low.text) == (
        0.0,
        1,
        2,
        (0, 3),
        "lowpass:2:0,3",
    )
    assert low.lag == pytest.approx(2 * (1 - low.share) / low.share)
    smooth = Smoothing(low, np.ones(4, bool))
    smooth.rest()
    assert smooth.next(Node(0, np.float32([1, 2, 3, 4]), 0, 0, 0), Trajectory()).tolist() == [1, 2, 3, 4]
    # What lags by one step looks one ahead, and counts where there is no row; by less or more it looks one further.
    for share, ahead, missing in (
        (0.5, 0, 1),
        (0.5, 1, 0),
        (0.6, 0, 1),
        (0.6, 1, 0),
        (0.4, 1, 1),
        (0.4, 2, 0),
    ):
        trajectory, ema = Trajectory(), parse_filter(f"ema:{share}", 20.0)
        assert ema is not None
        nodes = [Node(step, np.float32([step]), 0, 0, step) for step in range(1 + ahead)]
        trajectory.put(nodes)
        smooth = Smoothing(ema, np.ones(1, bool))
        smooth.rest(np.zeros(1))
        looked = min(float(ahead), ema.lag)  # steps further, as rows grow by 1 a step
        assert smooth.next(nodes[0], trajectory)[0] == pytest.approx(share * looked)
        assert smooth.missing == missing


# ----------------------------------------------------------------------------- speed


@FAST
@given(
    rows=st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=40),
    start=st.tuples(st.floats(-3, 3), st.floats(-3, 3)),
    speed=st.sampled_from([1.0, 0.5, 0.25, 0.2, 0.1, 0.3, 0.75]),
)
def test_a_slower_chunk_is_the_same_path(
    rows: list[tuple[float, float]], start: tuple[float, float], speed: float
) -> None:
    """No step is longer than ``speed`` times the longest row's; every row is met; other numbers only take rows."""
    given_rows, begun = np.float32(rows), np.float32(start)
    found = slowed(given_rows, begun, speed, np.array([True, False]))
    assert len(found) == math.floor(len(rows) / speed + 1e-9)
    path = np.concatenate([begun[None], given_rows]).astype(np.float64)
    longest = np.abs(np.diff(path[:, 0])).max()
    steps = np.abs(np.diff(np.concatenate([begun[:1], found[:, 0]]).astype(np.float64)))
    assert steps.max() <= speed * longest + 4 * np.spacing(np.float32(np.abs(path).max()))
    assert np.isin(found[:, 1], given_rows[:, 1]).all()
    every = round(1 / speed)
    if speed == 1 / every:
        np.testing.assert_array_equal(found[every - 1 :: every], given_rows)
        np.testing.assert_array_equal(found[:, 1], np.repeat(given_rows[:, 1], every))


def test_a_slower_chunk_begins_at_its_first_row_where_nothing_says_where_the_robot_is() -> None:
    rows, posed = np.float32([[1, 1], [3, 3]]), np.array([True, False])
    for start, first in ((np.zeros(2), 0.5), (np.full(2, np.nan), 1.0), (np.array([np.nan, 0.0]), 1.0)):
        assert slowed(rows, start, 0.5, posed).tolist() == [[first, 1], [1, 1], [2, 3], [3, 3]]


def test_a_robot_at_half_speed_takes_twice_the_steps() -> None:
    """Offsets at half speed lead to the same place, by steps of half the length."""
    chunk = [[1.0, -0.5]] * 8
    ways = {}
    for speed in (1.0, 0.5):
        robot = Gantry(0.05, [0.0, 0.0])
        driven(robot, [chunk], round(8 / speed), motion=OFFSETS, speed=speed)
        ways[speed] = np.array(robot.path)
    np.testing.assert_allclose(ways[1.0][-1], ways[0.5][-1], atol=1e-5)
    assert np.abs(np.diff(ways[0.5], axis=0)).max() <= 0.5 * np.abs(np.diff(ways[1.0], axis=0)).max() + 1e-6


def test_a_speed_that_has_no_way_is_refused() -> None:
    with pytest.raises(SettingsError, match="speed: expected motion"):
        Settings(20.0, speed=0.5).controller(2)
    with pytest.raises(SettingsError, match="speed: expected 1 with real-time chunking"):
        Settings(20.0, speed=0.5, handover="rtc", motion={"kind": "absolute"}).controller(2)
    for value in (0.0, 1e-9, 1.5, -1.0, math.nan):  # a log may name any speed, and memory grows as it falls
        with pytest.raises(SettingsError, match="^speed: expected"):
            Settings(20.0, speed=value)


def test_offsets_say_where_they_begin() -> None:
    motion = Offsets((0, 2), (1, 0), scale=0.1)
    np.testing.assert_array_equal(motion.posed(3), [True, False, True])
    np.testing.assert_array_equal(motion.pose(np.float32([5, 7]), 3), np.float32([7, np.nan, 5]))


# ----------------------------------------------------------------------------- cameras that differ


class Cameras(Gantry):
    """Two cameras whose frames are so old, and a state that is."""

    def __init__(self, now: Any, ages: dict[str, float]):
        super().__init__(None, [0.0, 0.0])
        self.now, self.ages = now, ages

    def observe(self) -> dict[str, Any]:
        images = {name: np.zeros((2, 2, 3), np.uint8) for name in ("front", "wrist")}
        times = {name: self.now() - age for name, age in self.ages.items()}
        return {"images": images, "state": self.position.copy(), "times": times}


@pytest.mark.parametrize(
    ("ages", "options", "reason"),
    [
        ({"front": 0.1, "wrist": 0.1, "state": 0.0}, {}, ""),
        ({"front": 0.1, "wrist": 0.6}, {}, r"the newest frame is older than 0.5 s"),
        ({"front": 0.1, "wrist": 0.6}, {"stale_of": {"wrist": 1.0}, "stale": 0.7}, ""),
        ({"front": 0.1, "wrist": 0.3}, {"stale_of": {"wrist": 0.2}}, r"wrist: the newest frame is older than 0.2 s"),
        ({"front": 0.1, "wrist": 0.3}, {"skew": 0.1}, r"frames of wrist and front are more than 0.1 s apart"),
        ({"front": 0.1, "wrist": 0.15}, {"skew": 0.1}, ""),
        ({"front": 0.1}, {"skew": 0.1}, r"wrist: expected its exposure time"),
        ({"front": 0.1, "wrist": 0.1}, {"stale_of": {"state": 0.1}}, r"state: expected its exposure time"),
        ({"front": 0.1, "wrist": 0.1, "state": 0.2}, {"stale_of": {"state": 0.1}}, r"state: the newest frame is older"),
        ({"front": 0.1, "wrist": math.nan}, {}, r"not of this clock"),
        ({"front": 0.1, "wrist": -30.0}, {}, r"not of this clock"),
    ],
)  # fmt: skip
def test_each_source_has_its_own_age(ages: dict[str, float], options: dict[str, Any], reason: str) -> None:
    """The oldest frame is that which a chunk counts from; what is too old, too far apart or not said holds."""
    pace = SimulatedPace(20.0)
    robot = Cameras(pace.now, ages)
    asked: list[dict[str, Any]] = []

    def connect() -> Any:
        raise AssertionError("nothing is asked through it")

    loop = Loop(
        robot, connect, Settings(20.0, handover="aligned", motion={"kind": "absolute"}, **options), 2, "go", pace
    )  # fmt: skip
    loop.source.ask = lambda observation, now: asked.append(dict(observation))  # type: ignore[method-assign]
    loop.run(1)
    if reason:
        assert not asked
        assert re.search(reason, loop.reason), loop.reason
    else:
        assert "times" not in asked[0]
        assert asked[0]["time"] == pytest.approx(pace.now() - max(a for n, a in ages.items() if n != "state"))
    found = loop.report().sources
    finite = {name: 1e3 * age for name, age in ages.items() if math.isfinite(age)}
    assert {name: found[name]["max"] for name in finite} == pytest.approx(finite, abs=1e-2)
    if finite.keys() >= {"front", "wrist"}:
        assert found["skew"]["p50"] == pytest.approx(abs(finite["front"] - finite["wrist"]), abs=1e-2)
        assert "frames apart" in dict(loop.report().rows())


def test_bounds_of_sources_are_checked() -> None:
    for options in (
        {"skew": 0.0},
        {"skew": math.nan},
        {"stale_of": {"front": -1}},
        {"stale_of": {"front": "x"}},
    ):
        with pytest.raises(SettingsError, match="expected"):
            Settings(20.0, **options)  # type: ignore[arg-type]

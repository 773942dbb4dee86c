"""What actions are measured from, found in what a controller was told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.control import Journal, MotionFit, MotionWatch, Offsets, Settings, fit_offsets
from sinew_client.control.controller import Command
from sinew_client.control.journal import JournalError, watched
from sinew_client.control.motion import parse_motion

RNG = np.random.default_rng


def told(move: Any, steps: int = 240, late: int = 0, every: int = 8, seed: int = 0) -> list[tuple[str, dict]]:
    """Return the events of a robot [3 of a pose, gripper] whose state after a command is ``move(state, row)``."""
    rng, events = RNG(seed), []
    states = [rng.uniform(-1, 1, 4)]
    for step in range(steps):
        if step % every == 0:
            frame = max(0, step - late)
            events.append(("ask", {"step": step, "frame": frame, "state": states[frame].tolist()}))
        row = np.clip(0.7 * np.sin(step / 9 + np.arange(4)) + 0.5 * rng.standard_normal(4), -1, 1)
        events.append(("command", {"command": Command(step, row.astype(np.float32))}))
        states.append(move(states[-1], row))
    return events


def fit(events: list[tuple[str, dict]]) -> MotionFit | None:
    watch = MotionWatch()
    for event, values in events:
        watch.put(event, values)
    return watch.fit()


def offsets(state: np.ndarray, row: np.ndarray) -> np.ndarray:
    after = state + np.array([0.02, 0.02, 0.02, 0.0]) * row
    after[3] = 0.5 + 0.5 * np.sign(row[3])  # the gripper opens or closes
    after[2] = max(after[2], -0.2)  # the table
    return after


@pytest.mark.parametrize("late", [0, 3])
def test_offsets_are_found_with_their_scale(late: int) -> None:
    found = fit(told(offsets, late=late))
    assert found is not None
    motion = parse_motion(found.motion)
    assert isinstance(motion, Offsets)
    assert (motion.action, motion.state) == ((0, 1, 2), (0, 1, 2))
    assert motion.scale == pytest.approx(0.02, rel=0.02)
    assert (motion.low, motion.high) == (-1, 1)
    assert json.dumps(found.motion) in found.advice()


def test_columns_may_stand_elsewhere_in_the_state() -> None:
    found = fit(told(lambda state, row: state + 0.05 * row[[2, 0, 1, 3]]))
    assert found is not None
    assert found.motion["action"] == [0, 1, 2, 3]
    assert found.motion["state"] == [1, 2, 0, 3]


@pytest.mark.parametrize(
    "move",
    [
        lambda _state, row: row,  # absolute positions
        lambda state, row: state + 0.3 * (row - state),  # the same, of a slow robot
        lambda state, _row: state + 0.01,  # something else moves it
        lambda state, _row: state,  # nothing moves
        lambda state, row: state + np.array([0.02, 0.1, 0.02, 0.02]) * row,  # no one scale
        lambda state, row: state - 0.02 * row,  # the wrong way round: no offsets that could be followed
        lambda state, row: state + np.nan * row,
    ],
    ids=["absolute", "slow", "drift", "still", "scales", "mirrored", "nan"],
)
def test_other_actions_are_not_taken_for_offsets(move: Any) -> None:
    assert fit(told(move)) is None


def test_too_little_says_nothing() -> None:
    assert fit([]) is None
    assert fit(told(offsets, steps=80)) is None


def test_what_happens_around_a_fault_does_not_count() -> None:
    """Somebody moves the robot while it is paused: the spans before and after say the same as without."""
    events = told(offsets)
    there = next(i for i, (event, values) in enumerate(events) if event == "ask" and values["step"] == 120)
    carried = [
        (event, {**values, "state": (np.array(values["state"]) + 5).tolist()} if event == "ask" else values)
        for event, values in events[there:]
    ]
    carried_on, went_on = (
        fit([*events[:there], (between, {}), *rest])
        for between, rest in (("pause", carried), ("fault", events[there:]))
    )
    assert carried_on is not None
    assert went_on is not None
    assert (carried_on.motion, carried_on.spans) == (went_on.motion, went_on.spans)
    whole = fit(events)
    assert whole is not None
    assert whole.spans == went_on.spans + 1  # the one around it
    assert fit([*events[:there], ("arrived", {}), *events[there:]]) == whole


def test_a_journal_gives_the_same(tmp_path: Path) -> None:
    events = told(offsets)
    for name, motion in {"told": None, "stated": {"kind": "absolute"}}.items():
        journal = Journal(tmp_path / f"{name}.jsonl", Settings(20.0, motion=motion), 4)
        for event, values in events:
            journal.put(event, values)
        journal.close()
        assert watched(journal.path) == (None if motion else fit(events))
    for line, message in (
        (b'{"dim": 0}', "dim: expected a whole number from 1 to"),
        (b'{"dim": true}', "dim: expected a whole number from 1 to"),
    ):
        begin, rest = journal.path.read_bytes().split(b"\n", 1)
        changed = json.dumps({**json.loads(begin), **json.loads(line)}).encode()
        (tmp_path / "bad.jsonl").write_bytes(changed + b"\n" + rest)
        with pytest.raises(JournalError, match=message):
            watched(tmp_path / "bad.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"event": "begin", "settings": {}}\n{"event": "command"}\n')
    with pytest.raises(JournalError, match="line 1: schema: expected"):
        watched(tmp_path / "bad.jsonl")


def test_many_joints_that_move_together_need_few_least_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every column then explains every number, but only the best pairs can be taken."""
    solve, solved = np.linalg.lstsq, []
    monkeypatch.setattr(np.linalg, "lstsq", lambda *given, **kw: (solved.append(1), solve(*given, **kw))[1])
    rng, joints = RNG(3), 32
    sums = rng.standard_normal((200, 1)) + 0.1 * rng.standard_normal((200, joints))
    changes = 0.02 * sums
    found = fit_offsets(np.cumsum(changes, axis=0), changes, sums, sums.min(axis=0), sums.max(axis=0))
    assert found is not None
    assert found.motion["action"] == found.motion["state"] == list(range(joints))
    assert found.motion["scale"] == 0.02
    assert joints <= len(solved) <= 2 * joints


def test_a_column_that_was_never_used_takes_no_number_from_the_others() -> None:
    sums = RNG(3).standard_normal((100, 3)) * [0, 1, 1]
    changes = 0.02 * sums
    found = fit_offsets(np.cumsum(changes, axis=0), changes, sums, sums.min(axis=0), sums.max(axis=0))
    assert found is not None
    assert found.motion["action"] == found.motion["state"] == [1, 2]


def test_the_scale_is_that_of_most_of_what_was_commanded() -> None:
    """Two spans of five in which the robot stood, as before a wall."""
    sums = RNG(3).standard_normal((100, 1))
    changes = np.where(np.arange(100)[:, None] % 5 < 2, 0.0, 0.02 * sums)
    found = fit_offsets(np.cumsum(changes, axis=0), changes, sums, sums.min(axis=0), sums.max(axis=0))
    assert found is not None
    assert found.motion["scale"] == 0.02


def found_in(sums: np.ndarray, changes: np.ndarray) -> MotionFit | None:
    return fit_offsets(np.cumsum(changes, axis=0), changes, sums, sums.min(axis=0), sums.max(axis=0))


@pytest.mark.parametrize(("columns", "least"), [(1, 20), (6, 20), (7, 21), (8, 24)])
def test_a_fit_needs_20_moves_and_three_for_each_column(columns: int, least: int) -> None:
    sums = RNG(3).standard_normal((least, columns))
    found = found_in(sums, 0.02 * sums)
    assert found is not None
    assert (found.spans, found.explained, found.motion["action"]) == (least, 1.0, list(range(columns)))
    assert found_in(sums[1:], 0.02 * sums[1:]) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_number_that_is_none_spoils_a_fit(bad: float) -> None:
    sums = RNG(3).standard_normal((20, 2))
    for which in range(3):
        given = [np.cumsum(0.02 * sums, axis=0), 0.02 * sums, sums.copy()]
        assert fit_offsets(*given, *given[2][:2]) is not None
        given[which][7, 1] = bad
        assert fit_offsets(*given, *given[2][:2]) is None


@pytest.mark.parametrize(("share", "found"), [(1.19, True), (1.21, False)])
def test_columns_of_one_kind_have_nearly_one_scale(share: float, found: bool) -> None:
    sums = RNG(3).standard_normal((40, 3))
    assert (found_in(sums, sums * [0.02, 0.02, 0.02 * share]) is not None) == found


def test_a_fit_says_how_much_its_worst_column_explains() -> None:
    """Of those four moves of five that it fits best; a move counts as much as was commanded."""
    sums = np.where(np.arange(30) % 2, 1.0, -1.0)
    ratios = np.full(30, 0.02)
    ratios[[3, 14]], ratios[[0, 5, 10, 15, 20, 25]] = 0.05, 0.2
    other = np.tile([1.0, 1.0, -1.0, -1.0, 0.0], 6)  # it was not commanded in each
    found = found_in(np.column_stack([sums, other]), np.column_stack([ratios * sums, 0.02 * other]))
    assert found is not None
    assert (found.motion["action"], found.motion["scale"], found.spans) == ([0, 1], 0.02, 30)
    assert found.explained == pytest.approx(1 - 2 * 0.03**2 / (22 * 0.02**2 + 2 * 0.05**2))
    ratios, weights = 0.02 + 0.0001 * np.arange(20), np.array([1] * 19 + [16])
    sums = (weights * np.tile([1, -1], 10))[:, None]
    found = fit_offsets(RNG(3).standard_normal((20, 1)), ratios[:, None] * sums, sums, sums[0], sums[1])
    assert found is not None
    assert found.motion["scale"] == pytest.approx(np.median(np.repeat(ratios, weights)), abs=1e-9)


def test_a_number_that_moves_by_bumps_takes_no_column() -> None:
    sums = RNG(3).standard_normal((40, 1))
    bumps = np.where(np.arange(40) % 10 == 0, 0.3, 0.0)
    found = found_in(sums, np.column_stack([bumps, 0.02 * sums[:, 0]]))
    assert found is not None
    assert found.motion["state"] == [1]


def test_steps_in_which_the_robot_held_do_not_count_and_old_ones_are_forgotten() -> None:
    watch, at = MotionWatch(), 0.0
    for step in range(2300):
        scale, row = (0.05 if step < 200 else 0.02), np.float32([1 - step % 3])
        watch.put("ask", {"step": step, "frame": step, "state": [at]})
        watch.put("command", {"command": Command(step, None, "held")})
        watch.put("command", {"command": Command(step, row)})
        at += scale * float(row[0])
    found = watch.fit()
    assert found is not None
    assert (found.spans, found.explained) == (2000, pytest.approx(1.0))


def test_the_embedded_robot_moves_less_than_its_definition_says() -> None:
    """The hand lags behind what it is told: a unit is 2 cm by definition, 1.7 in fact."""
    pytest.importorskip("mujoco")
    import gymnasium
    import sinew_eval.sim
    from sinew_eval.sim.blocks import STEP_SIZE

    assert sinew_eval.sim
    env = gymnasium.make("sinew/Blocks-v0").unwrapped
    state = env.reset(seed=0)[0]["state"]
    rng, watch, row = RNG(0), MotionWatch(), np.zeros(4, np.float32)
    for step in range(200):
        if step % 8 == 0:
            watch.put("ask", {"step": step, "frame": step, "state": state})
            row = np.array([*rng.uniform(-1, 1, 3) * (0.3, 0.3, 0.2), 1], np.float32)
            row[:2] -= 3 * np.array(state[:2])  # stay over the table
            row[2] -= 5 * (state[2] - 0.12)
            row = np.clip(row, -1, 1)
        watch.put("command", {"command": Command(step, row)})
        state = env.step(row)[0]["state"]
    found = watch.fit()
    assert found is not None
    assert found.motion["action"] == found.motion["state"] == [0, 1, 2]
    assert 0.8 * STEP_SIZE < found.motion["scale"] < STEP_SIZE
    env.close()

"""The end of a run: the robot returns to its pose within all limits. Nothing moves it if its state is not known."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.arm.takeover import Takeover
from sinew_client.control import Limits, NoObservation, Outcome, SettingsError, SimulatedPace, Stopped, repeat
from sinew_client.control.motion import parse_motion
from sinew_client.control.rest import FROZEN_SHARE, read_poses
from sinew_client.control.robots import LeRobotArm, ordered
from sinew_client.control.run import Run, RunPlan

HZ = 20.0
POLICY: dict[str, Any] = {
    "cameras": [],
    "state": {"dim": 2, "names": ["a", "b"]},
    "action": {"dim": 2, "names": ["a", "b"]},
    "motion": {"kind": "absolute"},
    "control_hz": HZ,
    "chunk_size": 8,
    "default_prompt": "go",
}
LIMITS = {"low": -1.0, "high": 1.0, "velocity": 0.8, "acceleration": 4.0}


class Arm:
    """An arm whose motors follow their goal by a share in each period.

    sees: what its sensor makes of an observation. refuses: called before each command. blocked: joints that stay where
    they are.
    """

    def __init__(self, start: tuple[float, float] = (0.1, -0.3), follow: float = 0.7, delta: bool = False):
        self.position = np.array(start)
        self.goal = self.position.copy()
        self.follow, self.delta = follow, delta
        self.sent: list[np.ndarray] = []
        self.blocked: tuple[int, ...] = ()
        self.sees: Callable[[dict[str, Any]], dict[str, Any]] = lambda seen: seen
        self.before_act: Callable[[], None] = lambda: None
        self.moves = 0
        self.at_rest = 0

    def rested(self) -> None:
        self.at_rest += 1

    def observe(self) -> dict[str, Any]:
        return self.sees({"images": {}, "state": self.position.astype(np.float32)})

    def act(self, row: np.ndarray) -> None:
        self.before_act()
        self.sent.append(np.array(row))
        self.goal = self.position + row if self.delta else np.array(row, np.float64)
        self.step()

    def hold(self) -> None:
        self.step()

    def step(self) -> None:
        free = [at for at in range(2) if at not in self.blocked]
        self.position[free] += self.follow * (self.goal - self.position)[free]


class Answers:
    """A source that answers at once with the same target, and counts what it was asked."""

    continuous = False
    failures = 0

    def __init__(self, target: tuple[float, float] = (0.8, 0.6)):
        self.target, self.asked = np.float32(target), 0
        self.due = False

    def ready(self, now: float) -> bool:
        return not self.due

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        self.asked += 1
        self.due = True

    def poll(self, now: float) -> Outcome | None:
        if not self.due:
            return None
        self.due = False
        return Outcome(np.tile(self.target, (8, 1)))

    def cancel(self) -> None:
        self.due = False

    def close(self, wait: float = 0.0) -> None: ...


def opened(arm: Any, source: Any = None, policy: Mapping[str, Any] = POLICY, **more: Any) -> Run:
    chosen = {"limits": LIMITS, "stale": 0.5, **more.pop("settings", {})}
    return Run.open(policy, arm, chosen, source=source or Answers(), pace=SimulatedPace(HZ), **more)


def test_a_robot_returns_to_its_first_pose_within_its_limits_and_without_the_server() -> None:
    arm, source = Arm(), Answers()
    driving = opened(arm, source)
    driving.loop.run(40)
    asked, executed, first = source.asked, len(arm.sent), len(arm.sent)
    assert np.allclose(arm.position, [0.8, 0.6], atol=0.05)
    report = driving.run(40)
    assert source.asked == asked
    assert np.allclose(arm.position, [0.1, -0.3], atol=1e-3)
    assert report.rest["returned"]
    assert (
        report.rest["text"] == f"the robot has returned to its first pose in {report.rest['seconds']:.1f} s"
    )
    assert dict(report.rows())["end"] == report.rest["text"]
    assert report.executed == executed  # of the policy
    assert arm.at_rest == 1
    rows = np.array(arm.sent[first - 1 :], np.float64)
    speed = np.diff(rows, axis=0) * HZ
    assert np.abs(speed).max() <= 0.4 + 1e-5  # half of the limit
    assert np.abs(np.diff(speed, axis=0) * HZ).max() <= 2.0 + 1e-3
    assert len(rows) / HZ >= 3.0


def test_a_server_that_hangs_delays_no_step_of_the_return() -> None:
    class Gone(Answers):
        def poll(self, now: float) -> Outcome | None:
            assert not self.over
            return super().poll(now)

        over = False

    arm, source = Arm(), Gone()
    driving = opened(arm, source)
    driving.loop.run(20)
    source.over = True
    assert driving.run(20).rest["returned"]


@pytest.mark.parametrize(
    ("motion", "delta"),
    [
        ({"kind": "relative", "action": [0, 1], "state": [0, 1]}, False),
        ({"kind": "offsets", "action": [0, 1], "state": [0, 1]}, True),
    ],
)
def test_every_motion_that_tells_where_commands_lead_returns(motion: dict[str, Any], delta: bool) -> None:
    arm = Arm(delta=delta)
    limits = {"low": -0.1, "high": 0.1, "workspace_low": -2, "workspace_high": 2} if delta else LIMITS
    source = Answers((0.02, 0.03) if delta else (0.5, 0.5))
    driving = opened(arm, source, settings={"rest": "first", "limits": limits, "motion": motion})
    report = driving.run(20)
    assert report.rest["returned"], report.rest
    assert np.allclose(arm.position, [0.1, -0.3], atol=0.02)


def test_delta_actions_return_only_if_a_person_asks_for_it() -> None:
    policy = {**POLICY, "motion": {"kind": "offsets", "action": [0, 1], "state": [0, 1]}}
    plan = RunPlan.of(policy, Arm(delta=True), {"limits": {}})
    assert plan.settings.rest == "hold"
    assert "because it is not known whether its commands are positions" in plan.notes[-1]
    # A straight line between two rotation vectors may be the long way round.
    posed = {**POLICY, "action": {"dim": 2, "names": ["x", "ee.rx"]}}
    assert RunPlan.of(posed, Arm()).settings.rest == "hold"
    assert RunPlan.of(POLICY, Arm()).settings.rest == "first"
    assert (
        RunPlan.of({**POLICY, "action": {"dim": 2, "names": ["x", "wrist_roll.pos"]}}, Arm()).settings.rest
        == "first"
    )

    class Simulated(Arm):
        physical = False

    assert RunPlan.of(POLICY, Simulated()).settings.rest == "hold"


def test_a_named_pose_comes_from_the_limits_file_or_the_robot(tmp_path: Path) -> None:
    file = tmp_path / "arm.toml"
    file.write_text(
        "[limits]\nvelocity = 1\n[poses]\nfolded = [0.2, 0.1]\nup = {b = 0.5, a = 0.4}\n", encoding="utf-8"
    )
    poses = read_poses(file)
    arm = Arm()
    driving = opened(arm, settings={"rest": poses["up"]})
    assert driving.plan.settings.rest == [0.4, 0.5]
    assert driving.run(20).rest["text"].startswith("the robot has returned to its rest pose")
    assert np.allclose(arm.position, [0.4, 0.5], atol=1e-3)

    class Named(Arm):
        joints = ("b", "a")
        poses: ClassVar = {"folded": [0.3, 0.2], "up": {"a": 0.4, "b": 0.5}}

    robot = ordered(Named(), POLICY, {})  # numbers in the policy's order
    for name, expected in (("folded", [0.2, 0.3]), ("up", [0.4, 0.5])):
        assert RunPlan.of(POLICY, robot, {"rest": name}).settings.rest == expected


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("frist", "rest: expected one of hold, first, got 'frist'; did you mean 'first'"),
        ([0.1], "rest: expected 2 numbers"),
        ([0.1, float("nan")], "rest: expected finite numbers"),
        ({"a": 1}, "rest: expected a, b, got a"),
        ([0.1, 1.5], "rest: expected a pose inside the limits, got a pose that exceeds the limits of b"),
    ],
)
def test_a_pose_that_does_not_fit_is_rejected_before_anything_moves(rest: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        opened(Arm(), settings={"rest": rest})


def test_the_return_keeps_the_limits_of_the_policy_and_of_the_person() -> None:
    """The first pose is outside the policy's range. The robot goes to its edge, and is not released there."""
    policy = {
        **POLICY,
        "action": {**POLICY["action"], "limits": {"low": [0.4, -1], "high": [1, 1], "velocity": 0.1}},
    }
    arm = Arm()
    report = opened(arm, policy=policy).run(30)
    assert report.rest["text"] == "the robot holds where it is: its rest pose is beyond the limits"
    assert np.allclose(arm.position, [0.4, -0.3], atol=1e-2)
    assert arm.at_rest == 0
    assert np.abs(np.diff(np.array(arm.sent[35:]), axis=0)).max() * HZ <= 0.05 + 1e-4


# ----------------------------------------------------------------------------- nothing may move it


def missing(seen: dict[str, Any]) -> dict[str, Any]:
    raise NoObservation("front: no frame")


def not_finite(seen: dict[str, Any]) -> dict[str, Any]:
    return {**seen, "state": np.float32([0.1, np.nan])}


def old(seen: dict[str, Any]) -> dict[str, Any]:
    return {**seen, "age": 3.0}


def broken(seen: dict[str, Any]) -> dict[str, Any]:
    raise OSError("no such device")


@pytest.mark.parametrize("sensor", [missing, not_finite, old, broken])
def test_a_robot_whose_state_is_not_known_is_not_moved(sensor: Callable[..., Any]) -> None:
    arm = Arm()
    driving = opened(arm)
    driving.loop.run(30)
    arm.sees, before = sensor, len(arm.sent)
    report = driving.run(30)
    assert len(arm.sent) == before
    assert not report.rest["returned"]
    assert arm.at_rest == 0
    assert ("robot failed" if sensor is broken else "state is not known") in report.rest["text"]


def test_a_state_that_froze_during_the_run_moves_nothing() -> None:
    arm = Arm()
    driving = opened(arm)
    driving.loop.run(3)
    stuck = arm.position.astype(np.float32)
    arm.sees = lambda seen: {**seen, "state": stuck}
    driving.loop.run(30)
    before = len(arm.sent)
    report = driving.run(30)
    assert len(arm.sent) == before
    assert (
        "the sensor may be frozen" in report.rest["text"]
        or "more than half of the path" in report.rest["text"]
    )


def test_a_state_that_freezes_on_the_way_stops_the_robot_within_a_tenth_of_the_way() -> None:
    arm = Arm()
    driving = opened(arm)
    driving.loop.run(40)
    away = arm.position.copy()
    stuck = arm.position.astype(np.float32)
    arm.sees = lambda seen: {**seen, "state": stuck}
    report = driving.run(40)
    assert "the sensor may be frozen" in report.rest["text"]
    way = np.linalg.norm(away - [0.1, -0.3])
    assert np.linalg.norm(arm.position - away) <= 1.3 * FROZEN_SHARE * way


def test_an_arm_that_is_blocked_is_held() -> None:
    arm = Arm()
    driving = opened(arm)
    driving.loop.run(40)
    arm.blocked = (0, 1)
    noise = iter(np.random.default_rng(0).normal(0, 1e-4, (10_000, 2)).astype(np.float32))
    arm.sees = lambda seen: {**seen, "state": seen["state"] + next(noise)}
    report = driving.run(40)
    assert report.rest["text"] == "the robot holds where it is: it does not follow the commands"
    assert np.linalg.norm(arm.goal - arm.position) < 0.5


def test_a_paused_run_a_person_and_a_second_stop_hold_the_robot() -> None:
    for act, why in (
        (lambda driving: driving.loop.pause(), "the run is paused, so a person may be at the robot"),
        (lambda driving: (driving.stop(), driving.stop()), "it was stopped at once"),
    ):
        arm = Arm()
        driving = opened(arm)
        driving.loop.run(20)
        act(driving)
        driving.loop.run(21)
        before = len(arm.sent)
        assert driving.run(21).rest["text"] == f"the robot holds where it is: {why}"
        assert len(arm.sent) == before


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda driving: driving.loop.pause(), "the run was paused"),
        (lambda driving: (driving.stop(), driving.stop()), "it was stopped at once"),
        (lambda driving: driving.loop.restart("another episode"), "a person or another episode has ended"),
    ],
)
def test_the_return_ends_within_a_period(act: Callable[[Run], Any], why: str) -> None:
    arm = Arm()
    driving = opened(arm)
    driving.loop.run(20)
    at = len(arm.sent) + 15

    def during() -> None:
        if len(arm.sent) == at:
            act(driving)

    arm.before_act = during
    report = driving.run(20)
    assert why in report.rest["text"]
    assert len(arm.sent) == at + 1
    assert driving.loop.controller.driver == "policy"


def test_a_person_who_drives_is_not_taken_the_robot_from() -> None:
    arm = Arm()
    leader = SimpleNamespace(read=lambda: np.float32([0.8, 0.6]), wanted=False)

    def takeover(plan: RunPlan) -> list[Takeover]:
        limits = Limits.parse(plan.settings.limits or {}, plan.dim)
        return [Takeover(leader, parse_motion(plan.settings.motion), plan.dim, limits, align=0.5)]

    driving = opened(arm, takeover=takeover)
    driving.loop.run(30)
    leader.wanted = True
    driving.loop.run(40)
    assert driving.loop.controller.driver == "human"
    before = len(arm.sent)
    assert "a person commands it" in driving.run(40).rest["text"]
    assert len(arm.sent) == before
    # A person who takes over during the return gets the robot, which then holds.
    leader.wanted = False
    driving.loop.run(60)
    at = len(arm.sent) + 10

    def presses() -> None:
        leader.wanted = len(arm.sent) >= at

    arm.before_act = presses
    assert "a person" in driving.run(60).rest["text"]
    assert len(arm.sent) <= at + 2  # that command, and one that follows the leader


def test_faults_end_in_a_return_and_are_raised() -> None:
    arm = Arm()
    driving = opened(arm)
    driving.loop.run(20)

    def fails_once() -> None:
        arm.before_act = lambda: None
        raise ConnectionError("the bus did not answer")

    arm.before_act = fails_once
    with pytest.raises(ConnectionError):
        driving.run()
    assert driving.rest.outcome["returned"]
    assert np.allclose(arm.position, [0.1, -0.3], atol=1e-3)

    def interrupted() -> None:
        arm.before_act = lambda: None
        raise KeyboardInterrupt

    driving.loop.run(60 + driving.loop.steps)
    arm.before_act = interrupted
    with pytest.raises(KeyboardInterrupt):
        driving.run()
    assert driving.rest.outcome["returned"]
    # A second one ends the return, and the robot holds.
    driving.loop.run(20 + driving.loop.steps)

    def again() -> None:
        raise KeyboardInterrupt

    arm.before_act = again
    with pytest.raises(KeyboardInterrupt):
        driving.run()
    assert "it was stopped" in driving.rest.outcome["text"]


def test_a_robot_that_was_never_commanded_stays() -> None:
    arm = Arm()
    driving = opened(arm)
    assert driving.run(0).rest == {}

    class Ends(Arm):
        def act(self, row: np.ndarray) -> None:
            raise Stopped("done")

    report = opened(ending := Ends(), settings={"rest": "first"}).run(20)
    assert (report.rest["returned"], ending.sent) == (False, [])


def test_the_decision_log_repeats_the_return(tmp_path: Path) -> None:
    arm = Arm()
    with opened(arm) as driving:
        driving.journal(tmp_path / "run.jsonl")
        assert driving.run(20).rest["returned"]
    found = repeat(tmp_path / "run.jsonl")
    assert found.differences == []
    assert found.commands > 60


class Config:
    use_degrees = True
    disable_torque_on_disconnect = True


class Servos:
    """One of LeRobot's arms, which lets go of its joints when it is disconnected, unless it is configured otherwise."""

    def __init__(self) -> None:
        self.config, self.torque = Config(), True
        self.action_features = self.observation_features = {"a.pos": float, "b.pos": float}
        self.joints = {"a.pos": 10.0, "b.pos": -30.0}

    def get_observation(self) -> dict[str, float]:
        return dict(self.joints)

    def send_action(self, action: Mapping[str, float]) -> None:
        self.joints = {name: value + 1e-3 for name, value in action.items()}

    def disconnect(self) -> None:
        self.torque = not self.config.disable_torque_on_disconnect


@pytest.mark.parametrize("rest", ["first", "hold"])
def test_an_arm_that_falls_when_it_is_released_keeps_its_torque_away_from_its_rest_pose(rest: str) -> None:
    servos = Servos()
    arm = LeRobotArm(servos, POLICY)
    look = arm.observe
    arm.observe = lambda: {**look(), "time": None}  # type: ignore[method-assign] - time is simulated here
    settings = {"rest": rest, "limits": {"velocity": 100.0}}
    assert opened(arm, Answers((40.0, 20.0)), settings=settings).run(40).executed > 20
    arm.close()
    assert servos.torque == (rest == "hold")
    untouched = Servos()
    LeRobotArm(untouched, POLICY).close()
    assert not untouched.torque


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    velocity=st.sampled_from([None, 0.3, 2.0]),
    acceleration=st.sampled_from([None, 1.0, 30.0]),
    jerk=st.sampled_from([None, 30.0]),
    boxed=st.booleans(),
    follow=st.sampled_from([0.5, 0.9, 1.0]),
)
def test_whatever_the_sensor_does_the_return_keeps_every_limit(
    seed: int,
    velocity: float | None,
    acceleration: float | None,
    jerk: float | None,
    boxed: bool,
    follow: float,
) -> None:
    """The oracle has the commands and what the sensor did. It knows nothing of the controller."""
    rng = np.random.default_rng(seed)
    limits = {"low": -1.0, "high": 1.0, "velocity": velocity, "acceleration": acceleration, "jerk": jerk}
    if boxed:
        limits |= {"workspace_low": -0.9, "workspace_high": 0.9}
    arm = Arm(tuple(rng.uniform(-0.9, 0.9, 2)), follow)
    driving = opened(arm, Answers(tuple(rng.uniform(-0.9, 0.9, 2))), settings={"limits": limits})
    driving.loop.run(int(rng.integers(5, 60)))
    sensors = [lambda seen: seen, missing, not_finite, old]
    kind = int(rng.integers(0, 6))
    blind: list[bool] = []
    first = len(arm.sent)

    def sees(seen: dict[str, Any]) -> dict[str, Any]:
        each = 0 if kind == 0 else kind if kind < 4 else int(rng.integers(0, 4)) * (rng.random() < 0.3)
        blind.append(each > 0)
        return sensors[each](seen)

    at: list[int] = []
    arm.sees, arm.before_act = sees, lambda: at.append(len(blind))
    report = driving.run(driving.loop.steps)
    assert not any(blind[each - 1] for each in at), "a command without a usable state"
    if kind in (1, 2, 3):
        assert len(arm.sent) == first
    rows = np.array(arm.sent[max(0, first - 1) :], np.float64)
    assert np.abs(rows).max() <= (0.9 if boxed else 1.0) + 1e-6
    if velocity is not None:
        assert np.abs(np.diff(rows, axis=0)).max(initial=0.0) * HZ <= velocity + 1e-4
    if kind == 0 and report.rest["returned"]:
        assert np.abs(np.diff(rows, axis=0)).max(initial=0.0) * HZ <= 0.5 * (velocity or 2.0) + 1e-3
    if report.rest["returned"]:
        assert arm.at_rest == 1


ROBOT = '''
import time

import numpy as np


class Arm:
    """Follows its commands, and writes each into a file."""

    def __init__(self, path):
        self.file, self.state = open(path, "a", buffering=1), np.zeros(2, np.float32)

    def observe(self):
        return {"images": {"front": np.zeros((8, 8, 3), np.uint8)}, "state": self.state, "time": time.monotonic()}

    def act(self, row):
        self.state = np.array(row)
        self.file.write(f"{time.monotonic()} {row[0]} {row[1]}\\n")

    def hold(self):
        self.file.write(f"{time.monotonic()} hold\\n")
'''
DRIVER = """
import sys

import numpy as np
from robot_of_test import Arm
from sinew.cli.run_robot import drive
from sinew_client.control.run import Run

policy = {
    "cameras": [], "state": {"dim": 2}, "action": {"dim": 2}, "motion": {"kind": "absolute"}, "control_hz": 20.0,
    "chunk_size": 8, "default_prompt": "go",
}
answer = lambda observation, seconds: np.full((8, 2), 0.5, np.float32)
arm = Arm(sys.argv[1])
limits = {"velocity": 1.0}
if sys.argv[2] == "True":
    # The way back is then the whole range, which takes at least 10 s. So the second signal comes before its end.
    limits.update(low=0.0, high=0.5)
with Run.open(policy, arm, {"limits": limits}, source=lambda: answer) as driving:
    drive(driving, arm, policy, None)
    print(driving.rest.outcome["text"])
"""


@pytest.mark.parametrize(("number", "second"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_one_signal_returns_the_robot_and_a_second_one_stops_it(
    tmp_path: Path, number: int, second: bool
) -> None:
    (tmp_path / "robot_of_test.py").write_text(ROBOT, encoding="utf-8")
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    path = tmp_path / "commands"
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "driver.py"), str(path), str(second)], stdout=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a background job ignores it
    ) as started:  # fmt: skip
        try:
            until(lambda: path.exists() and path.read_text(encoding="utf-8").count("0.5 0.5\n") > 5)
            started.send_signal(number)
            if second:
                until(lambda: " 0.4" in path.read_text(encoding="utf-8").rpartition("0.5 0.5\n")[2])
                started.send_signal(number)
            text, _ = started.communicate(timeout=60)
        finally:
            started.kill()
    assert started.returncode == 0
    rows = [line.split()[1:] for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows[-1] == ["hold"]
    last = [float(each) for each in next(row for row in reversed(rows) if len(row) == 2)]
    if second:
        assert text.startswith("the robot holds where it is: it was stopped at once")
        assert max(last) > 0.0
    else:
        assert text.startswith("the robot has returned to its first pose")
        assert np.allclose(last, 0.0, atol=1e-6)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)

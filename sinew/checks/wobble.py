"""Move a robot a little around its pose, inside all limits (a wobble), and record its commands, states and frames.

In this test motion, a generator of actions takes the place of the policy, so it drives the robot through a
:class:`~sinew_client.control.run.Run`. Limits, watchdog, holds and the return to the rest pose are the same as in
`sinew run`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from sinew_client.control.defaults import stated
from sinew_client.control.facts import RobotFacts, facts_of
from sinew_client.control.interfaces import NoObservation, Stopped
from sinew_client.control.listeners.listener import LoopListener
from sinew_client.control.motion import Motion, parse_motion, state_of
from sinew_client.control.pace import Pace, SimulatedPace
from sinew_client.control.requester import Outcome
from sinew_client.control.run import Run, RunPlan
from sinew_client.control.safety import Limits

from sinew.checks.delays import DelayTrace
from sinew.core import SinewError

SPREAD = 0.1  # amplitude, as a share of the standard deviation of each number in the training data
SHARE = 0.5  # the wobble uses at most this share of a limit of speed or acceleration
# Frequencies of the wobble in Hz. They have no common period, so that only one delay explains the measured signal.
FREQUENCIES = (0.43, 0.71, 1.13, 1.7)
FADE_S = 0.5  # the amplitude of the wobble grows at the start and falls at the end for this many seconds
# The wobble runs at this share of the control rate, so that observations are not synchronous with camera frames.
UNLOCKED = 0.93
POLL_S = 0.004  # wait between two observations while the next frame is awaited, in seconds
# Each command is delayed by a random share of a period, at most this one, so that observations are not synchronous with
# commands.
DITHER = 0.9


@dataclass(frozen=True)
class Curve:
    """The curve along which the robot moves during the wobble (a small test motion).

    Attributes:
        seconds: Its length in seconds.
    """

    seconds: float

    def at(self, times: np.ndarray) -> np.ndarray:
        """Return the value of the curve at each of some times, [n]. Values are between -1 and 1, and 0 before the start
        and after the end of the curve. ``times`` are seconds after the start.
        """
        waves = sum(np.sin(2 * np.pi * f * times + 2 * k) for k, f in enumerate(FREQUENCIES))
        fade = np.clip(np.minimum(times, self.seconds - times) / FADE_S, 0.0, 1.0)
        return waves / len(FREQUENCIES) * fade * fade * (3 - 2 * fade)

    def fastest(self) -> tuple[float, float]:
        """Return the largest speed and acceleration of a curve with amplitude 1, per second and per second squared."""
        step = 1e-3
        path = self.at(np.arange(0.0, self.seconds + step, step))
        return float(np.abs(np.diff(path)).max() / step), float(np.abs(np.diff(path, 2)).max() / step**2)


def amplitudes(
    base: np.ndarray, spread: np.ndarray, limits: Limits | None, placed: np.ndarray, curve: Curve
) -> np.ndarray:
    """Return the amplitude of each number of a command, float [D], so that no limit clips the wobble.

    Args:
        base: The robot's pose, [D].
        spread: Standard deviation of each number in the training data, [D].
        limits: Limits of the run; None if there are none.
        placed: True for numbers of a command that are positions, bool [D]. For the other numbers, limits concern the
            speed of the robot, and the run clips them.
        curve: The wobble.
    """
    size = SPREAD * spread
    if limits is None:
        return size
    speed, acceleration = curve.fastest()
    room = np.minimum(limits.high - base, base - limits.low)
    room = np.minimum(room, SHARE * np.minimum(limits.velocity / speed, limits.acceleration / acceleration))
    size = np.where(placed, np.minimum(size, np.maximum(room, 0.0)), size)
    box = np.minimum(limits.workspace_high - base, base - limits.workspace_low)
    return np.minimum(size, np.maximum(box, 0.0))


class Wobble:
    """The wobble (a small test motion) as a source of actions. The control loop uses it in place of a policy.

    Args:
        curve: The wobble.
        motion: Reference of the actions.
        base: The robot's pose in the numbers of a command, [D].
        size: Amplitude of each number, [D].
        hz: Actions per second.
        rows: Actions in a chunk.
    """

    continuous = False
    failures = 0

    def __init__(
        self, curve: Curve, motion: Motion, base: np.ndarray, size: np.ndarray, hz: float, rows: int
    ):
        self._curve, self._motion, self._base, self._size = curve, motion, base, size
        self._hz, self._rows = hz, rows
        self._begun: float | None = None
        self._answer: Outcome | None = None

    def target(self, now: float) -> np.ndarray:
        """Return the pose that the robot should have at a time of the loop's clock, float [D]."""
        begun = now if self._begun is None else self._begun
        return self._base + self._curve.at(np.array([now - begun]))[0] * self._size

    def ready(self, now: float) -> bool:
        """Return True: a chunk of the wobble is computed at once, so a new request is always possible."""
        return True

    def ask(self, observation: Mapping[str, Any], now: float) -> None:
        """Compute the wobble's chunk for an observation. ``poll`` returns this chunk."""
        if self._begun is None:
            self._begun = now
        times = now - self._begun + np.arange(self._rows) / self._hz
        targets = (self._base + self._curve.at(times)[:, None] * self._size).astype(np.float32)
        self._answer = Outcome(self._motion.rows(targets, state_of(observation["state"])))

    def poll(self, now: float) -> Outcome | None:
        """Return the chunk of the last observation. A second call returns None."""
        answer, self._answer = self._answer, None
        return answer

    def cancel(self) -> None:
        """Discard the computed chunk, so that ``poll`` does not return it."""
        self._answer = None

    def close(self, wait: float = 0.0) -> None:
        """Do nothing, because the wobble has no connection to close."""


class TracedRobot:
    """Wraps a robot, and records its commands, states and frames.

    Args:
        robot: The robot.
        motion: Converts commands to target poses, and states to poses.
        trace: Receives the recording.
        pace: The loop's clock.
        source: The wobble.
        seconds: The robot ends the run this many seconds after its first observation.
        late: Longest wait before a command, in seconds.

    Attributes:
        over: True if the recording has ended.
    """

    def __init__(
        self,
        robot: Any,
        motion: Motion,
        trace: DelayTrace,
        pace: Pace,
        source: Wobble,
        seconds: float,
        late: float,
    ):
        self._robot, self._motion, self._trace, self._pace = robot, motion, trace, pace
        self._source, self._seconds, self._late = source, seconds, late
        self._begun: float | None = None
        self._dither = np.random.default_rng(0)
        self._stepped = 0.0  # start of the present control step, in seconds of the loop's clock
        self._took: deque[float] = deque(maxlen=10)  # durations of the last observations, in seconds
        self.over = False
        self.hold = robot.hold

    def facts(self) -> RobotFacts:
        """Return the facts (such as names and limits of joints) of the wrapped robot."""
        return facts_of(self._robot)

    def observe(self) -> dict[str, Any]:
        """Observe the robot, and record its state and frames."""
        begun = self._stepped = self._pace.now()
        if self._begun is None:
            self._begun = begun
        elif begun > self._begun + self._seconds:
            raise Stopped("the test motion has ended")
        seen = self._look()
        if not self.over:
            pose = self._motion.pose(state_of(seen["state"]), len(self._trace.names))
            self._trace.states.append((self._pace.now(), pose))
        return seen

    def act(self, row: np.ndarray) -> None:
        """Send a command after a short random wait, and record the pose that it leads to.

        Before and after the command, the robot is observed as often as possible, to know when each frame arrives.
        """
        begun = self._pace.now()
        self._poll(begun + float(self._dither.uniform(0.0, 1.0)) * self._late)
        sent = self._pace.now()
        self._robot.act(row)
        # A delta action contains the pose before it, so the delay must be measured against the wobble's own target.
        target = self._source.target(self._stepped) if self._motion.holds == "zero" else row
        self._trace.commands.append((sent, np.asarray(target, np.float64)))
        if self._quick():
            self._poll(begun + self._late)

    def _quick(self) -> bool:
        """Return True if there is time for more observations in this control step. They are not needed if each
        observation of the robot waits for the next frame.
        """
        return 4 * max(self._took, default=0.0) < self._late

    def _poll(self, end: float) -> None:
        """Observe the robot again and again until the time ``end`` of the loop's clock."""
        quick = self._quick()
        while (remaining := end - self._pace.now()) > 0:
            if quick and remaining > POLL_S + max(self._took, default=0.0):
                self._pace.sleep(POLL_S)
                with contextlib.suppress(NoObservation):
                    self._look()
            else:
                self._pace.sleep(remaining)

    def _look(self) -> dict[str, Any]:
        begun = self._pace.now()
        seen = dict(self._robot.observe())
        arrived = self._pace.now()
        self._took.append(arrived - begun)
        times = seen.get("times") or {}
        for camera, frame in () if self.over else (seen.get("images") or {}).items():
            stated = times.get(camera, seen.get("time"))
            if stated is None and "age" in seen:
                stated = arrived - float(seen["age"])
            at = None if stated is None else float(stated)
            self._trace.frame(str(camera), begun, arrived, frame, at)
        return seen


class EveryStep(LoopListener):
    """A listener of the control loop that observes the robot in every control step, and ends the run when a new
    episode begins.
    """

    observes = True

    def __init__(self, watched: TracedRobot):
        self._watched = watched

    def restarted(self) -> None:
        """End the run, because a new episode begins. In a new episode, the robot has another pose, and the wobble
        would move it to the old pose.
        """
        self._watched.over = True
        self.loop.stop()


@dataclass(frozen=True)
class WobblePlan:
    """The plan of a wobble (a small test motion), made before the robot moves.

    Attributes:
        run: The run. The robot ends it when the wobble is over.
        trace: Receives the recording.
        names: Name of each number of a command.
        size: Amplitude of each number, float [D].
        notes: Sentences that a person should read before the robot moves.
    """

    run: Run
    trace: DelayTrace
    names: tuple[str, ...]
    size: np.ndarray
    notes: tuple[str, ...]


def plan(
    policy: Mapping[str, Any],
    robot: Any,
    settings: Mapping[str, Any],
    spread: np.ndarray,
    seconds: float,
    pace: Callable[[float], Pace] = Pace,
) -> WobblePlan:
    """Plan the wobble of a robot. The robot is observed once, and does not move.

    Args:
        policy: The policy's description. Its limits and the reference of its actions also apply to the wobble.
        robot: The robot.
        settings: The user's settings, as for :meth:`RunPlan.of`.
        spread: Standard deviation of each number of the state in the training data, [S].
        seconds: How long the robot wobbles.
        pace: Creates the loop's clock from a period in seconds.

    Returns:
        The plan.

    Raises:
        SinewError: The robot's pose is unknown in the numbers of its commands, or no number may move.
        SettingsError: A setting does not fit.
    """
    facts = facts_of(robot)
    # Only a simulation states its own control rate, because a simulation advances by one step with every command.
    fixed = facts.hz
    rate = settings.get("hz") or policy.get("control_hz") or fixed
    run_settings = {
        **settings,
        "hz": fixed or (None if rate is None else UNLOCKED * float(rate)),
        "motion": settings.get("motion") or stated(policy) or facts.motion,
    }
    run_plan = RunPlan.of(policy, robot, run_settings, prompt=None)
    motion, dim, hz = parse_motion(run_plan.settings.motion), run_plan.dim, run_plan.settings.hz
    names = tuple(run_plan.names["action"] or map(str, range(dim)))
    limits = None if run_plan.settings.limits is None else Limits.parse(run_plan.settings.limits, dim)
    pose = motion.pose(state_of(robot.observe()["state"]), dim).astype(np.float64)
    base = _standing(pose, limits, facts, names)
    curve = Curve(seconds)
    deviation = motion.pose(np.asarray(spread, np.float32), dim).astype(np.float64)
    deviation = np.where(np.isfinite(pose) & np.isfinite(deviation), deviation, 0.0)
    if not deviation.any():
        raise SinewError(
            "--delays: expected statistics of the state in the bundle, which bound the motion, got none; to add them,"
            " run `sinew doctor POLICY --learn RECORDS --out FILE`"
        )
    size = amplitudes(base, deviation, limits, motion.placed(dim), curve)
    if not (size > 0).any():
        raise SinewError(
            "--delays: expected room to move inside the limits, got none at the present pose; move the robot away from"
            " its limits"
        )
    trace = DelayTrace(names, 1.0 / hz if fixed else 0.0)
    clock = SimulatedPace(hz) if fixed else pace(1.0 / hz)
    source = Wobble(curve, motion, base, size, hz, max(8, int(policy.get("chunk_size") or 0)))
    watched = TracedRobot(robot, motion, trace, clock, source, seconds, 0.0 if fixed else DITHER / hz)
    run = Run(run_plan, source, robot=watched, listeners=(EveryStep(watched),), pace=clock)
    return WobblePlan(run, trace, names, size, run_plan.notes)


def _standing(
    pose: np.ndarray, limits: Limits | None, facts: RobotFacts, names: tuple[str, ...]
) -> np.ndarray:
    """Return the command that keeps the robot at its present pose, float [D].

    Args:
        pose: The robot's pose, [D]; NaN for a number whose position the state does not contain, such as a gripper that
            opens above 0.
        limits: Limits of the run. For such a number, the command in ``still`` is sent.
        facts: The robot. In a simulation, 0 is sent for such a number.
        names: Name of each number.
    """
    still = np.full(len(pose), np.nan) if limits is None else limits.still
    if not facts.physical:
        still = np.where(np.isfinite(still), still, 0.0)
    base = np.where(np.isfinite(pose), pose, still)
    if lost := [name for name, at in zip(names, base, strict=True) if not np.isfinite(at)]:
        raise SinewError(
            f"--delays: expected the position of {', '.join(lost)} in the state, or a command that holds it; set"
            " `still` for it in --limits FILE, or describe the actions by --motion"
        )
    return base

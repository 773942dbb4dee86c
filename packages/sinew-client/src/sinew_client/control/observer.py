"""Observe a robot, and check that the cameras and the state are recent and belong together."""

from __future__ import annotations

import math
from typing import Any, Mapping

import numpy as np

from sinew_client.control.controller import AHEAD_S
from sinew_client.control.interfaces import NoObservation, Robot
from sinew_client.control.motion import Motion, state_of
from sinew_client.control.pace import Pace
from sinew_client.control.report import SourceAges
from sinew_client.control.settings import Settings

OTHER_CLOCK = "the newest frame's time is not of this clock (time.monotonic): "


class Observer:
    """Observes a robot for a control loop, and stores the newest valid observation.

    Args:
        robot: The robot.
        settings: The limits for the age of frames and states.
        motion: The motion, which extracts the robot's position from its state.
        dim: Number of values in a command (D).
        pace: The loop's clock.

    Attributes:
        step: Control step of the newest observation; -1 before the first.
        observation: The newest observation.
        state: State of the newest observation, float [S]; None before the first.
        images: The newest frames by camera. In a stream, most observations have a state and no frames.
        age: Age of the newest frame at its observation, in seconds since the exposure.
        fault: The reason why the last invalid observation was rejected.
        ages: The ages of all cameras and of the state, for the report.
    """

    def __init__(self, robot: Robot, settings: Settings, motion: Motion, dim: int, pace: Pace):
        self.robot, self.settings, self.motion, self.dim, self.pace = robot, settings, motion, dim, pace
        self.step = -1
        self.observation: Mapping[str, Any] = {}
        self.state: np.ndarray | None = None
        self.images: Mapping[str, Any] = {}
        self.age = 0.0
        self.fault = ""
        self.ages = SourceAges()
        self._state_age = 0.0  # age of the newest state when it was observed, seconds
        self._stale = math.inf if settings.fusion else settings.stale

    def look(self, step: int, now: float) -> bool:
        """Observe the robot, and check the observation.

        Args:
            step: The control step.
            now: Start of the control step, seconds of the loop's clock.

        Returns:
            True if the observation is valid; ``observation`` then has it. False if not; ``fault`` then has the reason.
        """
        try:
            observation = dict(self.robot.observe())
        except NoObservation as blind:
            self.fault = str(blind)
            return False
        state = state_of(observation["state"])
        times = observation.pop("times", None) or {}
        observation = {**exposed(times, observation), **observation}
        unstated = self.settings.camera_delay if observation.get("images") else 0.0
        stated, age = observation.get("time"), float_of(observation.pop("age", unstated))
        if stated is None:
            self.age, observation["time"] = age, now - age
        else:
            observation["time"] = float_of(stated)
            self.age = now - observation["time"]
            # Read the clock again, because ``observe`` may have taken a long time.
            age = self.pace.now() - observation["time"]
        # For a stream ``_stale`` is infinite, so the age of the frame has no limit here.
        reason = frame_fault(age, self._stale)
        looked = self.pace.now()
        images = observation.get("images", {})
        self.ages.add({name: looked - float_of(at) for name, at in times.items()}, images)
        if not reason:
            reason = sources_fault(times, images, looked, self.settings)
        if not reason and not np.all(np.isfinite(state)):
            reason = "the state is not finite"
        reason = reason or self.motion.lacks(state)
        if reason:
            self.fault = reason
            return False
        self.state = state
        self._state_age = looked - float_of(times["state"]) if "state" in times else age
        self.images = observation.get("images", self.images)
        self.step, self.observation = step, observation
        return True

    def position(self) -> np.ndarray:
        """Return the robot's observed position, float [D] in the order of a command.

        Values that are unknown are NaN. All values are NaN if the state is too old.
        """
        if self.state is None or self._state_age > self.settings.stale:
            return np.full(self.dim, np.nan)
        return self.motion.position(self.state, self.dim)


def float_of(value: Any) -> float:
    """Convert a value to float. The result is NaN if the value is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def frame_fault(age: float, stale: float) -> str:
    """Check the age of a frame.

    Args:
        age: Seconds since the exposure.
        stale: Largest allowed age, seconds.

    Returns:
        The reason why the frame is not valid; "" if it is valid.
    """
    if not math.isfinite(age):
        return OTHER_CLOCK + f"{age} s old"
    if age < -AHEAD_S:
        return OTHER_CLOCK + f"{-age:.3g} s ahead of it"
    return f"the newest frame is older than {stale:g} s" if age > stale else ""


def exposed(times: Mapping[str, Any], observation: Mapping[str, Any]) -> dict[str, float]:
    """Return the time of the oldest frame as {"time": seconds} if the observation states only the time of each camera.
    Otherwise, return {}.
    """
    frames = [float_of(times[name]) for name in observation.get("images", {}) if name in times]
    return {"time": min(frames)} if frames and "age" not in observation else {}


def sources_fault(times: Mapping[str, Any], images: Mapping[str, Any], now: float, settings: Settings) -> str:
    """Check the ages of the cameras and of the state, and the time between frames of different cameras.

    Args:
        times: Time of each camera and of "state", seconds of the loop's clock. Each source with a limit in the settings
            must have a time.
        images: The frames by camera.
        now: Present time, seconds of the loop's clock.
        settings: The limits (``stale_of``, ``stale``, ``skew``).

    Returns:
        The reason why the observation is not valid; "" if it is valid.
    """
    of, skew = settings.stale_of, settings.skew
    for name in [*of, *(images if skew is not None else ())]:
        if name not in times:
            return f"{name}: expected its exposure time in the observation's `times`, got nothing"
    for name in times:
        limit = math.inf if settings.fusion and name != "state" else settings.stale
        if reason := frame_fault(now - float_of(times[name]), of.get(name, limit)):
            return f"{name}: {reason}"
    frames = {name: float_of(times[name]) for name in images if name in times}
    if skew is not None and frames:
        first, last = min(frames, key=frames.__getitem__), max(frames, key=frames.__getitem__)
        if frames[last] - frames[first] > skew:
            return f"frames of {first} and {last} are more than {skew:g} s apart"
    return ""

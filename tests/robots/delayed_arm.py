"""A simulated arm with known delays, and a clock that only the arm moves."""

from __future__ import annotations

from typing import Any

import numpy as np
from sinew_client.control.facts import RobotFacts

FPS = 30.0
READ_S = 0.002  # seconds that one observation takes


class Clock:
    """A clock that only :meth:`sleep` moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        """Return the time in seconds."""
        return self.time

    def sleep(self, seconds: float) -> None:
        """Advance the time."""
        self.time += max(seconds, 1e-6)


class DelayedArm:
    """An arm with two joints and a camera.

    Args:
        clock: The clock of the arm.
        actuation: Seconds from a command until the arm has reached its target.
        camera: Seconds from the exposure of a frame until it is in memory.
        waits: Let ``observe`` wait for the next frame.
        clock_error: Seconds by which the stated times are later than the exposure. None states no times.
        follows: False for an arm that does not move.

    Attributes:
        sent: Times and commands.
    """

    def __init__(
        self,
        clock: Clock,
        actuation: float,
        camera: float,
        waits: bool = False,
        clock_error: float | None = None,
        follows: bool = True,
    ):
        self.clock, self.actuation, self.camera = clock, actuation, camera
        self.waits, self.clock_error, self.follows = waits, clock_error, follows
        self.sent: list[tuple[float, np.ndarray]] = [(0.0, np.array([0.2, -0.1]))]
        self.noise = np.random.default_rng(0)

    def facts(self) -> RobotFacts:
        """Return the facts that the arm states."""
        return RobotFacts(joints=["lift", "turn"], motion={"kind": "absolute"}, concurrent_hold=False)

    def pose(self, time: float) -> np.ndarray:
        """Return the position of the arm at a time, [2]."""
        last = self.sent[0][1]
        for when, row in reversed(self.sent) if self.follows else ():
            if when <= time - self.actuation:
                return row
        return last

    def observe(self) -> dict[str, Any]:
        """Return the newest frame and the state."""
        self.clock.sleep(READ_S)
        newest = np.floor((self.clock.now() - self.camera) * FPS - 0.3)
        if self.waits:
            newest += 1
            self.clock.sleep((newest + 0.3) / FPS + self.camera - self.clock.now())
        exposed, now = (newest + 0.3) / FPS, self.clock.now()
        state = self.pose(now) + self.noise.normal(0, 1e-4, 2)
        seen: dict[str, Any] = {"images": {"front": picture(self.pose(exposed), int(newest))}, "state": state}
        if self.clock_error is not None:
            seen["time"] = exposed + self.clock_error
        return seen

    def act(self, row: np.ndarray) -> None:
        """Receive a command."""
        self.sent.append((self.clock.now(), np.array(row, np.float64)))

    def hold(self) -> None:
        """Keep the last command."""


def picture(pose: np.ndarray, number: int) -> np.ndarray:
    """Return a frame uint8 [48, 64, 3] with a spot at the position of the arm, and the noise of one frame."""
    rows, columns = np.mgrid[:48, :64]
    spot = np.exp(-((rows - 24 - 40 * pose[1]) ** 2 + (columns - 32 - 40 * pose[0]) ** 2) / 18)
    noise = np.random.default_rng(number).normal(0, 3, (48, 64, 1))
    return np.clip(60 + 150 * spot[..., None] + noise, 0, 255).astype(np.uint8).repeat(3, axis=-1)

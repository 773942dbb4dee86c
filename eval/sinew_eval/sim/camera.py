"""A simulated camera whose frames arrive late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Times are sums of control steps. Add this number before rounding down, so that rounding errors lose no frame.
_EPS = 1e-9


@dataclass(frozen=True)
class DelayedCamera:
    """A camera that exposes frames at a fixed rate. Each frame arrives after a delay.

    Attributes:
        fps: Frames per second, a divisor of the control rate.
        delay: Age of a frame when it arrives, in seconds.
        control_hz: Control rate of the task, in Hz.

    Raises:
        ValueError: The rate is no divisor of the control rate, or the delay is negative.
    """

    fps: int
    delay: float
    control_hz: int

    def __post_init__(self) -> None:
        if self.fps <= 0 or self.control_hz % self.fps:
            raise ValueError(f"camera_fps: expected a divisor of {self.control_hz}, got {self.fps}")
        if self.delay < 0:
            raise ValueError(f"camera_delay: expected 0 or more seconds, got {self.delay}")

    def frame_time(self, now: float, back: int = 0) -> float:
        """Return the exposure time of the newest frame that has arrived, in seconds. It is never before reset.

        Args:
            now: Time since reset, in seconds.
            back: Number of frames before the newest frame.
        """
        newest = int(np.floor((now - self.delay) * self.fps + _EPS))
        return max(0, newest - back) / self.fps

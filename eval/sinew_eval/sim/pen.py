"""The falling pen: a test of the time from light to a closed gripper.

Source: "Running VLAs at Real-time Speed" (Ma et al. 2025), section 7. A pen hangs above a pair of jaws and is
released at a random time that the camera cannot show in advance. It falls about 30 cm. The jaws need 60 ms to touch
the pen and must do so while its body is between them, which takes about 56 ms. The simulation is analytic, and the
catch is decided by kinematics. A contact simulation would reward early closing, because the pen gets wedged on closed
jaws.

Observation: ``images`` {"now", "previous"}, two consecutive frames as two cameras; ``state`` float32 [1], the opening
of the jaws from 1 (open) to 0 (closed); ``prompt``. Action float32 [1]: 0.5 and above closes, below opens. One step
is 1/60 s. ``info["frame_age"]`` is the age of "now" in seconds when the policy receives it. A chunk that counts from
the frame begins at its action number ``frame_age * control_hz``.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sinew_eval.sim.camera import DelayedCamera

CONTROL_HZ = 60
GRAVITY = 9.81
PEN_LENGTH = 0.16
PEN_WIDTH = 0.014
DROP = (
    0.26,
    0.34,
)  # usual range of the height of the pen's lower end above the jaws before the release, in metres
RELEASE = (0.40, 0.90)  # range of the release time, in seconds
CLOSING_TIME = 0.075  # time from fully open to fully closed jaws, in seconds
TOUCH = 0.2  # opening at which the jaws touch the pen; 1 is fully open
MARGIN = 0.005  # the pen must extend this many metres on either side of the jaws
PROMPT = "catch the pen"

_VIEW = (-0.07, 0.37)  # range of heights in the camera's image, in metres
_JAW_GAP = 0.05
_PEN_RGB, _CAP_RGB = np.array([225.0, 70.0, 55.0]), np.array([60.0, 60.0, 75.0])
_JAW_RGB = np.array([70.0, 95.0, 160.0])
_WALL_RGB, _FLOOR_RGB = np.array([206.0, 203.0, 196.0]), np.array([168.0, 164.0, 158.0])


@dataclass(frozen=True)
class DropEpisode:
    """All random values of one episode, in seconds and metres.

    Attributes:
        release: Time of the release.
        height: Height of the pen's lower end above the jaws before the release.
        lateral: Sideways offset of the pen.
        camera_z: Vertical offset of the camera.
        camera_x: Sideways offset of the camera.
        camera_scale: Factor of the camera's magnification.
    """

    release: float
    height: float
    lateral: float
    camera_z: float
    camera_x: float
    camera_scale: float

    def bottom(self, time: float) -> float:
        """Return the height of the pen's lower end above the jaws at a time, in metres."""
        falling = max(0.0, time - self.release)
        return self.height - 0.5 * GRAVITY * falling * falling

    @property
    def best_command(self) -> float:
        """Return the time at which the jaws must start to close, so that they touch the pen at its middle. Seconds."""
        middle = self.release + np.sqrt(2 * (self.height + PEN_LENGTH / 2) / GRAVITY)
        return float(middle - CLOSING_TIME * (1 - TOUCH))


class PenEnv(gymnasium.Env):
    """The pen environment.

    Args:
        image_size: Width and height of a frame, in pixels.
        camera_fps: Frames per second, a divisor of 60.
        camera_delay: Seconds from exposure until the frame arrives.
        heights: Range of the height of the pen's lower end above the jaws before the release, in metres.
        render_mode: Gymnasium's render mode.
        render_size: Width and height of a rendered picture, in pixels.

    Raises:
        ValueError: The camera cannot show the heights.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": CONTROL_HZ}  # noqa: RUF012 - gymnasium requires it
    control_hz = CONTROL_HZ
    cameras = ("now", "previous")
    task = "pen"
    task_description = PROMPT

    def __init__(
        self,
        image_size: int = 64,
        camera_fps: int = 30,
        camera_delay: float = 0.0,
        heights: tuple[float, float] = DROP,
        render_mode: str | None = None,
        render_size: int = 256,
    ):
        low, high = self.heights = float(heights[0]), float(heights[1])
        if not 0.0 < low <= high < _VIEW[1]:
            raise ValueError(
                f"heights: expected a range above 0 and below {_VIEW[1]:g} metres, which the camera shows, got"
                f" {low:g} to {high:g}"
            )
        self.image_size, self.camera = image_size, DelayedCamera(camera_fps, camera_delay, CONTROL_HZ)
        self.render_mode, self.render_size = render_mode, render_size
        pixels = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "images": spaces.Dict(dict.fromkeys(self.cameras, pixels)),
                "state": spaces.Box(0.0, 1.0, (1,), np.float32),
                "prompt": spaces.Text(max_length=160, min_length=0, charset=string.printable),
            }
        )
        self.action_space = spaces.Box(0.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        if options:
            raise ValueError(f"options: expected none, got {sorted(options)}")
        rng = self.np_random
        self.drop = DropEpisode(
            release=float(rng.uniform(*RELEASE)),
            height=float(rng.uniform(*self.heights)),
            lateral=float(rng.uniform(-0.01, 0.01)),
            camera_z=float(rng.uniform(-0.012, 0.012)),
            camera_x=float(rng.uniform(-0.01, 0.01)),
            camera_scale=float(rng.uniform(0.97, 1.03)),
        )
        self._slot = 0
        self._openings = [1.0]  # opening at the start of each control step so far
        self.outcome = "waiting"  # later one of "caught", "early", "late"
        return self._observation(), self._info()

    @property
    def opening(self) -> float:
        """Return the present opening of the jaws, from 1 (open) to 0 (closed)."""
        return self._openings[-1]

    @property
    def time(self) -> float:
        """Return the seconds since reset."""
        return self._slot / CONTROL_HZ

    def step(self, action: np.ndarray):
        value = float(np.asarray(action, dtype=np.float64).reshape(()) if np.ndim(action) == 0 else action[0])
        if not np.isfinite(value):
            raise ValueError(f"action: expected a finite number, got {value}")
        before, start = self._openings[-1], self.time
        change = 1.0 / (CLOSING_TIME * CONTROL_HZ)
        after = max(0.0, before - change) if value >= 0.5 else min(1.0, before + change)
        if self.outcome == "waiting":
            if before > TOUCH >= after:
                self.outcome = self._touch(start + (before - TOUCH) * CLOSING_TIME)
            elif self.drop.bottom(start + 1 / CONTROL_HZ) + PEN_LENGTH < MARGIN:
                self.outcome = "late"
        if self.outcome == "caught":
            # The pen between the jaws stops them.
            after = max(after, TOUCH)
        self._openings.append(after)
        self._slot += 1
        info = self._info()
        done = self.outcome != "waiting"
        return self._observation(), float(info["is_success"]), done, False, info

    def _touch(self, time: float) -> str:
        """Return the outcome for jaws that reach the pen's width at ``time``: "early", "caught" or "late"."""
        self.touch_time = time
        bottom = self.drop.bottom(time)
        if bottom > -MARGIN:
            return "early"
        return "caught" if bottom + PEN_LENGTH > MARGIN else "late"

    def _info(self) -> dict[str, Any]:
        return {
            "is_success": self.outcome == "caught",
            "task": self.task,
            "step": self._slot,
            "outcome": self.outcome,
            "frame_age": self.time - self.camera.frame_time(self.time),
            "time": self.time,
        }

    def _observation(self) -> dict[str, Any]:
        now, previous = (self.camera.frame_time(self.time, back) for back in (0, 1))
        images = {"now": self.view(now), "previous": self.view(previous)}
        return {
            "images": images,
            "state": np.array([self._openings[-1]], dtype=np.float32),
            "prompt": PROMPT,
        }

    def view(self, time: float, size: int | None = None) -> np.ndarray:
        """Draw the camera's image at a time that has passed.

        Args:
            time: Seconds since reset.
            size: Width and height in pixels. None for ``image_size``.

        Returns:
            uint8 [size, size, 3].
        """
        opening = self._openings[round(time * CONTROL_HZ)]
        bottom = self.drop.bottom(time)
        if self.outcome == "caught":
            bottom = self.drop.bottom(min(time, self.touch_time))
        return picture(self.drop, bottom, opening, size or self.image_size)

    def render(self) -> np.ndarray:
        return self.view(self.time, self.render_size)


def picture(drop: DropEpisode, bottom: float, opening: float, size: int) -> np.ndarray:
    """Draw the scene with exact area coverage, so that a shift by a hundredth of a pixel changes the picture.

    Args:
        drop: Values of the episode.
        bottom: Height of the pen's lower end above the jaws, in metres.
        opening: Opening of the jaws, from 1 (open) to 0 (closed).
        size: Width and height in pixels.

    Returns:
        uint8 [size, size, 3].
    """
    scale = size / (_VIEW[1] - _VIEW[0]) * drop.camera_scale

    def rows(low: float, high: float) -> np.ndarray:
        bottom_row = (_VIEW[1] + drop.camera_z - low) * scale
        return _coverage((_VIEW[1] + drop.camera_z - high) * scale, bottom_row, size)

    def cols(low: float, high: float) -> np.ndarray:
        middle = size / 2 + drop.camera_x * scale
        return _coverage(middle + low * scale, middle + high * scale, size)

    image = np.empty((size, size, 3))
    image[:] = _WALL_RGB

    def paint(row: np.ndarray, col: np.ndarray, color: np.ndarray) -> None:
        part = image[_touched(row), _touched(col)]
        share = (row[_touched(row), None] * col[None, _touched(col)])[..., None]
        part += share * (color - part)

    everywhere = np.ones(size)
    paint(rows(-1.0, -0.05), everywhere, _FLOOR_RGB)
    pen = cols(drop.lateral - PEN_WIDTH / 2, drop.lateral + PEN_WIDTH / 2)
    paint(rows(bottom, bottom + PEN_LENGTH), pen, _PEN_RGB)
    paint(rows(bottom, bottom + 0.25 * PEN_LENGTH), pen, _CAP_RGB)
    gap = PEN_WIDTH / 2 + (opening - TOUCH) / (1 - TOUCH) * (_JAW_GAP - PEN_WIDTH) / 2
    for inner, outer in ((gap, gap + 0.035), (-gap - 0.035, -gap)):
        paint(rows(-0.012, 0.012), cols(inner, outer), _JAW_RGB)
    return (image + 0.5).astype(np.uint8)


def _coverage(low: float, high: float, size: int) -> np.ndarray:
    """Return the share of each of ``size`` cells that the interval [low, high] covers. Cell i is [i, i + 1]."""
    edge = np.arange(size)
    return np.clip(np.minimum(high, edge + 1) - np.maximum(low, edge), 0.0, 1.0)


def _touched(coverage: np.ndarray) -> slice:
    """Return the slice from the first to the last covered cell."""
    covered = np.flatnonzero(coverage)
    return slice(covered[0], covered[-1] + 1) if len(covered) else slice(0)


def expert_chunk(drop: DropEpisode, frame_time: float, slots: int) -> np.ndarray:
    """Return the expert's commands, based only on the state at the time of a frame.

    While the pen hangs, nothing announces its release. Therefore all commands are 0, even if the jaws have to close
    later in this episode. A policy that learned the future from such frames would only learn the average release
    time.

    Args:
        drop: Values of the episode.
        frame_time: Time of the frame, in seconds.
        slots: Number of commands.

    Returns:
        Commands from ``frame_time`` on, float32 [slots].
    """
    times = frame_time + np.arange(slots) / CONTROL_HZ
    if frame_time <= drop.release:
        return np.zeros(slots, dtype=np.float32)
    return (times >= drop.best_command - 0.5 / CONTROL_HZ).astype(np.float32)


def act(env: PenEnv) -> np.ndarray:
    """Return the expert's action in the environment's present step, float32 [1]."""
    return expert_chunk(env.drop, env.time, 1)

"""The egg task: a force that the camera cannot show in time.

An egg rolls between two jaws at a random time. The jaws close at 0.2 m/s. The egg's thickness is along the camera's
line of sight, so no frame shows when the jaws will touch it. After the touch, the force grows by 1.7 N per control
step, and at 10 N the shell breaks after 25 ms. A camera with 30 frames per second and two frames of delay shows this
too late. A force sensor shows it at once. The simulation is analytic and needs only numpy.

Observation: ``images`` {"front"}, ``state`` float32 [2]: opening of the jaws (1 is 80 mm) and force (1 is 10 N), both
from the fast sensor; ``prompt``. Action float32 [1]: speed of the jaws, where 1 closes at 0.2 m/s and -1 opens. One
step is 1/240 s. ``info["camera_age"]``: seconds since the exposure of the newest frame. A chunk counts its actions
from the fresh state and not from that frame.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sinew_eval.sim.camera import DelayedCamera

CONTROL_HZ = 240
OPEN = 80.0  # distance between the open jaws, in mm
SPEED = 200.0  # largest speed of the jaws, in mm/s
STIFFNESS = 2.0  # stiffness of both shells together, in N/mm
CRUSH = 10.0  # a larger force breaks the egg, in N
HOLD = 1.0  # a smaller force does not hold the egg, in N
HELD_S = 0.1  # the force must be between HOLD and CRUSH for this many seconds
WIDTH = (34.0, 54.0)  # range of the width of an egg, in mm
ARRIVAL = (0.10, 0.35)  # range of the time at which the egg arrives, in seconds
PATIENCE = 0.8  # the egg rolls away this many seconds after its arrival
TOUCH = 0.5  # the expert (the scripted controller) stops closing the jaws at this force, in N
NOISE = 0.03  # standard deviation of the force sensor, in N
PROMPT = "hold the egg"

_EPS = 1e-9
_WALL, _FLOOR = np.array([190.0, 196.0, 200.0]), np.array([150.0, 140.0, 128.0])
_EGG, _JAW = np.array([238.0, 214.0, 180.0]), np.array([70.0, 95.0, 160.0])


class EggEnv(gymnasium.Env):
    """The egg environment.

    Args:
        image_size: Width and height of a frame, in pixels.
        camera_fps: Frames per second, a divisor of 240.
        camera_delay: Seconds from exposure until the frame arrives.
        render_mode: Gymnasium's render mode.
        render_size: Width and height of a rendered picture, in pixels.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60}  # noqa: RUF012 - gymnasium requires it
    control_hz = CONTROL_HZ
    cameras = ("front",)
    task = "egg"
    task_description = PROMPT

    def __init__(
        self,
        image_size: int = 64,
        camera_fps: int = 30,
        camera_delay: float = 2 / 30,
        render_mode: str | None = None,
        render_size: int = 256,
    ):
        self.image_size, self.camera = image_size, DelayedCamera(camera_fps, camera_delay, CONTROL_HZ)
        self.render_mode, self.render_size = render_mode, render_size
        pixels = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        self.observation_space = spaces.Dict(
            {
                "images": spaces.Dict({"front": pixels}),
                "state": spaces.Box(-1.0, 2.0, (2,), np.float32),
                "prompt": spaces.Text(max_length=160, min_length=0, charset=string.printable),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        if options:
            raise ValueError(f"options: expected none, got {sorted(options)}")
        rng = self.np_random
        self.width = float(rng.uniform(*WIDTH))
        self.arrival = float(rng.uniform(*ARRIVAL))
        self.look = look(rng)
        self.opening = OPEN  # opening of the jaws, in mm
        self.step_count = self.held_steps = 0
        self.outcome = "waiting"  # later one of "held", "crushed", "late"
        # Time at which the jaws touched the egg, in seconds. None before the contact.
        self.contact: float | None = None
        self._sense()
        return self._observation(), self._info()

    @property
    def time(self) -> float:
        """Return the seconds since reset."""
        return self.step_count / CONTROL_HZ

    @property
    def force(self) -> float:
        """Return the present force on the egg, in N."""
        return STIFFNESS * max(0.0, self.width - self.opening) if self.time >= self.arrival else 0.0

    def step(self, action: np.ndarray):
        speed = float(np.clip(np.asarray(action, np.float64).reshape(-1)[0], -1.0, 1.0))
        if not np.isfinite(speed):
            raise ValueError(f"action: expected a finite number, got {speed}")
        before, start = self.opening, self.time
        # Jaws that are closed too early stop the egg in front of them, so they hold nothing.
        self.opening = float(np.clip(before - speed * SPEED / CONTROL_HZ, 0.0, OPEN))
        self.step_count += 1
        if self.contact is None and self.force > 0.0:
            share = (before - self.width) / max(before - self.opening, _EPS)
            self.contact = start + float(np.clip(share, 0.0, 1.0)) / CONTROL_HZ
        self.held_steps = self.held_steps + 1 if HOLD <= self.force <= CRUSH else 0
        if self.outcome == "waiting":
            if self.force > CRUSH:
                self.outcome = "crushed"
            elif self.held_steps >= HELD_S * CONTROL_HZ:
                self.outcome = "held"
            elif self.time > self.arrival + PATIENCE:
                self.outcome = "late"
        self._sense()
        info = self._info()
        return self._observation(), float(info["is_success"]), self.outcome != "waiting", False, info

    def _sense(self) -> None:
        noise = float(self.np_random.normal(0.0, NOISE))
        self.sample = np.array([self.opening / OPEN, (self.force + noise) / CRUSH], np.float32)

    def _info(self) -> dict[str, Any]:
        return {
            "is_success": self.outcome == "held",
            "task": self.task,
            "step": self.step_count,
            "outcome": self.outcome,
            "camera_age": self.time - self.frame_time,
            "time": self.time,
            "stimuli": {"image": self.arrival, "sensor": self.contact},
        }

    @property
    def frame_time(self) -> float:
        """Return the exposure time of the newest frame that has arrived, in seconds. It is never before reset."""
        return self.camera.frame_time(self.time)

    def _observation(self) -> dict[str, Any]:
        there = self.frame_time >= self.arrival
        if getattr(self, "_drawn", None) != (there, self.look):
            self._frame, self._drawn = picture(there, self.look, self.image_size), (there, self.look)
        return {"images": {"front": self._frame.copy()}, "state": self.sample.copy(), "prompt": PROMPT}

    def render(self) -> np.ndarray:
        return picture(self.time >= self.arrival, self.look, self.render_size)


def look(rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Draw the position (x, y) of an egg in the picture, its length, and the light."""
    return (
        float(rng.uniform(-0.08, 0.08)),
        float(rng.uniform(-0.05, 0.05)),
        float(rng.uniform(0.16, 0.22)),
        float(rng.uniform(0.85, 1.1)),
    )


def picture(there: bool, look: tuple[float, float, float, float], size: int) -> np.ndarray:
    """Draw the camera's picture along the direction of the jaws, with the far jaw.

    Args:
        there: True to draw the egg.
        look: Position (x, y) of the egg, its length, and the light.
        size: Width and height in pixels.

    Returns:
        uint8 [size, size, 3].
    """
    x, y, length, light = look
    rows, cols = np.mgrid[0:size, 0:size] / size - 0.5  # [size, size] each
    image = np.where((rows > 0.25)[..., None], _FLOOR, _WALL)
    image = np.where(((np.abs(cols) < 0.3) & (np.abs(rows) < 0.12))[..., None], _JAW, image)
    if there:
        inside = ((cols - x) / length) ** 2 + ((rows - y) / (0.75 * length)) ** 2
        share = np.clip((1.0 - inside) * 6.0, 0.0, 1.0)[..., None]
        image = image + share * (_EGG - image)
    return np.clip(image * light + 0.5, 0, 255).astype(np.uint8)


def expert_action(there: bool, force: float) -> float:
    """Return the speed of an expert: close until the egg is touched, then stop. Nothing announces the touch, so a
    plan that was made before it continues to close.

    Args:
        there: True if the expert has seen an egg.
        force: Present force, in N.
    """
    return 1.0 if there and force < TOUCH else 0.0


def act(env: EggEnv) -> np.ndarray:
    """Return the expert's action in the environment's present step, float32 [1]."""
    return np.array([expert_action(env.frame_time >= env.arrival, CRUSH * float(env.sample[1]))], np.float32)

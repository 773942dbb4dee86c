"""gym-pusht: a disc pushes a T onto its outline, with absolute positions in [0, 512] at 10 Hz. Frames need no OpenGL.

Sources: gym_pusht ``envs/pusht.py`` (success: 95 % covered), LeRobot ``envs/configs.py`` (300 steps; the camera is
``image``) and the instruction of its data set ``pusht``.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import gymnasium
import numpy as np

from sinew_eval.suites.base import Registered
from sinew_eval.suites.mapping import Mapping

MAPPING = Mapping(
    images={"image": "pixels"},
    known_as={"pixels": ("top", "camera1", "base_0_rgb", "pixels")},
    unseen=("left_wrist_0_rgb", "right_wrist_0_rgb"),
    state=("agent_pos",),
    hold="last",
    control_hz=10.0,
)


class Simulator(Registered):
    max_steps = 300
    action_space = gymnasium.spaces.Box(0, 512, (2,), np.float32)
    task_description = "Push the T-shaped block onto the T-shaped target."

    def __init__(self, tasks: Sequence[str], size: int = 96):
        # Importing the package registers its environment.
        importlib.import_module("gym_pusht")
        super().__init__(tasks, obs_type="pixels_agent_pos", observation_width=size, observation_height=size)

"""gym-aloha: two ViperX arms with absolute joint positions at 50 Hz, and one camera above.

Sources: gym_aloha ``env.py`` and ``tasks/sim.py`` (state and action: 6 joints in radians and a gripper from 0,
closed, to 1, open, left arm first; success is reward 4), openpi ``examples/aloha_sim/env.py`` (the camera is
``cam_high``), LeRobot ``envs/configs.py`` (``top``, 400 steps). The instructions are those of LeRobot's data sets
``aloha_sim_transfer_cube_human`` and ``aloha_sim_insertion_human``. openpi's checkpoint was trained with "Transfer
cube" (``--env-options '{"prompt": "Transfer cube"}'``).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np

from sinew_eval.suites.base import Registered, SimulatorFrame
from sinew_eval.suites.mapping import Mapping

MAPPING = Mapping(
    images={"top": "pixels/top"},
    known_as={"pixels/top": ("cam_high", "base_0_rgb", "camera1", "image")},
    unseen=("cam_low", "cam_left_wrist", "cam_right_wrist", "left_wrist_0_rgb", "right_wrist_0_rgb"),
    state=("agent_pos",),
    hold="last",
    # The environment declares actions in [-1, 1], but accepts joint angles outside of this range.
    clip=False,
    control_hz=50.0,
)
SENTENCES = {
    "gym_aloha/AlohaTransferCube-v0": "Pick up the cube with the right arm and transfer it to the left arm.",
    "gym_aloha/AlohaInsertion-v0": "Insert the peg into the socket.",
}


class Simulator(Registered):
    max_steps = 400
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (14,), np.float32)

    def __init__(self, tasks: Sequence[str]):
        # Importing the package registers its environments.
        importlib.import_module("gym_aloha")
        super().__init__(tasks, obs_type="pixels_agent_pos")

    def open(self, task: str) -> None:
        super().open(task)
        self.task_description = SENTENCES[task]
        # The task draws three cameras in every control step. Sinew uses only one of them, and only in the steps
        # that request a chunk.
        dm_task = self.env.unwrapped._env.task  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public name for the task
        dm_task.get_observation = lambda physics: _observe(dm_task, physics)

    def begin(self, trial: int) -> Any:
        self._last = super().begin(trial)
        return self._last

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the simulator. An episode fails if its physics becomes unstable, for example because of joint angles
        in a wrong unit.
        """
        from dm_control.rl.control import PhysicsError

        try:
            self._last, *rest = self.env.step(action)
        except PhysicsError:
            return self._last, 0.0, True, False, {"is_success": False}
        return (self._last, *rest)


def _observe(task: Any, physics: Any) -> dict[str, Any]:
    top = SimulatorFrame(lambda: physics.render(height=480, width=640, camera_id="top"))
    return {"qpos": task.get_qpos(physics), "images": {"top": top}}

"""SimplerEnv: BridgeData's WidowX in simulation at 5 Hz. Needs an NVIDIA GPU with Vulkan. We have never run this
file.

Sources: SimplerEnv ``simpler_env/__init__.py``, ``utils/env/observation_utils.py`` (camera ``3rd_view_camera``),
``scripts/octo_bridge.sh`` (60 control steps, 120 for the eggplant; 24 placements of the objects),
``policies/octo/octo_model.py`` (roll, pitch, yaw become axis and angle; the gripper opens at +1 above 0.5); vla.cpp
``eval/sim/simpler/simpler_env.py`` (state [8] in BridgeData's frame; rotations of GR00T are not converted).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from sinew.core import SinewError

from sinew_eval.suites import SIMULATORS
from sinew_eval.suites.base import Tasks, drawing
from sinew_eval.suites.mapping import Mapping

_CAMERA = "3rd_view_camera"
MAPPING = Mapping(
    images={"image_0": "image"},
    known_as={"image": ("base_0_rgb", "camera1", "image", "primary", "front", _CAMERA)},
    unseen=("left_wrist_0_rgb", "right_wrist_0_rgb", "camera2", "camera3"),
    state=("eef_pos|bridge",),
    action={
        "axis-angle": "opening_to_sign",
        "opening": "euler_and_opening",
        # BridgeData records the opening of the gripper.
        "recorded": "euler_and_opening",
    },
    hold="rest",
    rest=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    # SimplerEnv's controllers clip the actions.
    clip=False,
    control_hz=5.0,
)
_PLACEMENTS = 24


class Simulator(Tasks):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (7,), np.float32)

    def __init__(self, tasks: Sequence[str]):
        if importlib.util.find_spec("simpler_env") is None:
            raise SinewError(f"this interpreter has no package simpler_env. {SIMULATORS['simpler'].by_hand}")
        super().__init__(tasks)
        self._env: Any = None

    @property
    def max_steps(self) -> int:  # type: ignore[override]
        return 120 if "eggplant" in self._current else 60

    def open(self, task: str) -> None:
        with drawing():
            import simpler_env

            # Disable the environment's own time limit, because Sinew's limit applies.
            self._env = simpler_env.make(task.partition("/")[2], max_episode_steps=10_000)

    def begin(self, trial: int) -> Any:
        options = {"obj_init_options": {"episode_id": trial % _PLACEMENTS}}
        with drawing():
            raw, _ = self._env.reset(seed=trial, options=options)
        self.task_description = self._env.unwrapped.get_language_instruction()
        return self._observe(raw)

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        raw, reward, done, _, _ = self._env.step(action)
        return self._observe(raw), reward, bool(done), False, {"is_success": bool(done)}

    def _observe(self, raw: Any) -> dict[str, Any]:
        return {"image": raw["image"][_CAMERA]["rgb"], "eef_pos": raw["agent"]["eef_pos"]}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None
        super().close()

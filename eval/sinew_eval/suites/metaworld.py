"""Meta-World: a Sawyer arm and 50 tasks, with a displacement and a gripper in [-1, 1] at 80 Hz. State [4]: hand
position and gripper opening.

Sources: LeRobot ``envs/metaworld.py`` (camera ``corner2``, moved and turned by 180 degrees, 480 x 480; state: the
first four numbers; success ends the episode; objects placed by the seed) and metaworld ``sawyer_xyz_env.py`` (500
steps). The instructions with which published policies were trained are read from LeRobot's package, which is
installed only for this file.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from sinew.core import SinewError, VectorSpec
from sinew_client.untrusted import read_json

from sinew_eval.sim.experts import Act, Expert, expert_spec
from sinew_eval.suites import METAWORLD
from sinew_eval.suites.base import SimulatorFrame, Tasks, drawing
from sinew_eval.suites.mapping import Mapping

MAPPING = Mapping(
    images={"image": "pixels"},
    known_as={"pixels": ("corner2", "camera1", "top", "base_0_rgb", "pixels")},
    unseen=("left_wrist_0_rgb", "right_wrist_0_rgb"),
    state=("state",),
    hold="rest",
    rest=(0.0, 0.0, 0.0, -1.0),  # the last number opens the gripper
    turned=True,
    control_hz=80.0,
)
_CAMERA, _CAMERA_POSITION = "corner2", (0.75, 0.075, 0.7)


class Simulator(Tasks):
    """Meta-World's simulator.

    Args:
        tasks: Names of the tasks.
        size: Width and height of a frame, in pixels.
        state: Size of the state: 4 for published policies, or 39 for all numbers, including the positions of objects
            and goal.
        plain: True to draw without shadows and anti-aliasing. This is about ten times as fast without a GPU, but
            differs from the frames in the training data of published policies.
    """

    max_steps = 500
    action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)

    def __init__(self, tasks: Sequence[str], size: int = 480, state: int = 4, plain: bool = False):
        super().__init__(tasks)
        if state not in (4, 39):
            raise SinewError(f"state: expected 4 or 39, got {state}")
        self._size, self._numbers, self._plain = size, state, plain
        self._sentences = _sentences()
        self._env: Any = None

    def open(self, task: str) -> None:
        import metaworld

        name = _name(task)
        mt1 = metaworld.MT1(name, seed=42)
        with drawing():
            env = mt1.train_classes[name](
                render_mode="rgb_array", camera_name=_CAMERA, width=self._size, height=self._size
            )
        env.set_task(mt1.train_tasks[0])
        env.model.cam_pos[env.model.camera(_CAMERA).id] = _CAMERA_POSITION
        if self._plain:
            env.model.vis.quality.shadowsize = env.model.vis.quality.offsamples = 0
        # The environment's own random numbers place the objects and the goal at each reset.
        env._freeze_rand_vec, env.seeded_rand_vec = False, True  # noqa: SLF001 - same as LeRobot; there is no public way
        self._env, self.task_description = env, self._sentences[name]

    def begin(self, trial: int) -> Any:
        self._env.seed(trial)
        self.full_state, _ = self._env.reset()
        return self._observe()

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.full_state, reward, _, truncated, info = self._env.step(action)
        success = bool(info["success"])
        return self._observe(), reward, success, truncated, {"is_success": success}

    def _observe(self) -> dict[str, Any]:
        return {"pixels": SimulatorFrame(self._draw), "state": self.full_state[: self._numbers]}

    def _draw(self) -> np.ndarray:
        with drawing():
            return self._env.render()

    def label(self, task: str) -> str:
        name = task.partition("/")[2]
        return f"{next(level for level, names in METAWORLD.items() if name in names)}/{name}"

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None
        super().close()

    def expert(self) -> Expert:
        """Return the expert of ``sinew eval expert``. It shows the highest possible success, and tests everything
        except a policy.
        """
        return Expert(expert_spec("Meta-World's scripted policies", VectorSpec(4)), _scripted)


def _scripted(simulator: Any) -> Act:
    """Start Meta-World's own scripted policy for the open task. It reads the full state from the simulator."""
    from metaworld.policies import ENV_POLICY_MAP

    assert isinstance(simulator, Simulator)
    policy = ENV_POLICY_MAP[_name(simulator._current)]()  # noqa: SLF001 - an attribute of our own class
    return lambda: np.asarray(policy.get_action(simulator.full_state), np.float32)[None]


def _name(task: str) -> str:
    return task.partition("/")[2] + "-v3"


def _sentences() -> dict[str, str]:
    # Find the package without importing it, because the import needs PyTorch.
    spec = importlib.util.find_spec("lerobot")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "envs" / "metaworld_config.json"
        if path.is_file():
            return read_json(path)["TASK_DESCRIPTIONS"]
    raise SinewError(
        "the instructions of the tasks are missing; run `pip install --no-deps lerobot` in this interpreter, or"
        " `sinew eval --setup metaworld`"
    )

"""The blocks task: "put the red block into the left bin", with a gantry gripper and contact physics.

Observation, in Sinew's format: ``images`` {"front", "wrist"} uint8 [size, size, 3]; ``state`` float32 [4]: x, y, z of
the point between the fingertips, and the opening between the fingers, all in metres; ``prompt``. Action float32 [4]
in [-1, 1]: displacement of the fingertip point from its present position, with 2 cm per unit and axis, and the
gripper (open above 0, else close). The control rate is 20 Hz.

For policies without language, the state has five more numbers for the goal: 1 for the named colour, 1 for the named
side, else 0.
"""

from __future__ import annotations

import os
import string
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sinew_eval.sim import blocks_scene as scene
from sinew_eval.sim.prompts import COLORS, HELD_OUT, PHRASINGS, SIDES, instruction
from sinew_eval.sim.render import Boxes, RenderedFrame, draw, rotation_from_quaternion

# Only MuJoCo's physics is used. Unless the user chose a backend, MuJoCo would import one that opens windows.
os.environ.setdefault("MUJOCO_GL", "disable")
import mujoco

STEP_SIZE = 0.02  # metres per unit of action
_FIXED_CAMERAS = {"front": scene.FRONT, "overview": scene.OVERVIEW}


@dataclass(frozen=True)
class World:
    """State of the scene, which the expert reads and a policy has to infer from the images. Lengths are in
    metres.

    Attributes:
        ee: Point between the fingertips, [3].
        opening: Distance between the fingers.
        blocks: Centres of the blocks in the order of COLORS, [3, 3].
        color: Index of the block in the instruction.
        side: Index of the bin in the instruction.
    """

    ee: np.ndarray
    opening: float
    blocks: np.ndarray
    color: int
    side: int


class BlocksEnv(gymnasium.Env):
    """The blocks environment. An episode is a function of ``reset``'s seed and options, and of the actions.

    Options of ``reset``: "color", "side" and "phrasing" (an index into PHRASINGS, or "held_out") fix values that are
    drawn otherwise. "switch": (step, color, side) changes the instruction before that step.

    Args:
        image_size: Width and height of a frame, in pixels.
        shove_step: Before this step, the named block jumps to another free place that is at least 5 cm away. None for
            no jump.
        render_mode: Gymnasium's render mode.
        render_size: Width and height of a rendered picture, in pixels.
        goal_in_state: True to append the goal to the state, as numbers.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": scene.CONTROL_HZ}  # noqa: RUF012 - gymnasium requires it
    control_hz = scene.CONTROL_HZ
    cameras = ("front", "wrist")
    action_names = ("x", "y", "z", "gripper")

    def __init__(
        self,
        image_size: int = 64,
        shove_step: int | None = None,
        render_mode: str | None = None,
        render_size: int = 256,
        goal_in_state: bool = False,
    ):
        self.image_size, self.shove_step = image_size, shove_step
        self.render_mode, self.render_size = render_mode, render_size
        self.goal_in_state = goal_in_state
        self._model = mujoco.MjModel.from_xml_string(scene.model_xml())
        self._data = mujoco.MjData(self._model)
        joint = {n: self._model.joint(n) for n in ("x", "y", "z", "finger-1", "finger1", *COLORS)}
        self._hand_q = np.array([int(joint[n].qposadr[0]) for n in ("x", "y", "z")])
        self._finger_q = np.array([int(joint[n].qposadr[0]) for n in ("finger-1", "finger1")])
        self._block_q = np.array([int(joint[c].qposadr[0]) for c in COLORS])
        self._block_v = np.array([int(joint[c].dofadr[0]) for c in COLORS])
        self._static = scene.static_boxes()
        self._backgrounds: dict[tuple[str, int], RenderedFrame] = {}

        pixels = spaces.Box(0, 255, (image_size, image_size, 3), np.uint8)
        numbers = 4 + goal_in_state * (len(COLORS) + len(SIDES))
        self.observation_space = spaces.Dict(
            {
                "images": spaces.Dict(dict.fromkeys(self.cameras, pixels)),
                "state": spaces.Box(-1.0, 1.0, (numbers,), np.float32),
                "prompt": spaces.Text(max_length=160, min_length=0, charset=string.printable),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    @property
    def task(self) -> str:
        """Return the goal, one of six, such as "red/left"."""
        return f"{COLORS[self._color]}/{SIDES[self._side]}"

    @property
    def task_description(self) -> str:
        return self._prompt

    def switch_instruction(self, color: str, side: str, phrasing: int | str = 0) -> None:
        """Change the goal during an episode. The next observation has the new prompt.

        Args:
            color: Colour of the block.
            side: Side of the bin.
            phrasing: Index into PHRASINGS, or "held_out".
        """
        self._color, self._side = COLORS.index(color), SIDES.index(side)
        self.phrasing = -1 if phrasing == "held_out" else int(phrasing)
        self._prompt = instruction(color, side, HELD_OUT if self.phrasing < 0 else PHRASINGS[self.phrasing])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        options = dict(options or {})
        draw_color, draw_side = self.np_random.integers(len(COLORS)), self.np_random.integers(len(SIDES))
        draw_phrasing = int(self.np_random.integers(len(PHRASINGS)))
        self.switch_instruction(
            options.pop("color", COLORS[draw_color]),
            options.pop("side", SIDES[draw_side]),
            options.pop("phrasing", draw_phrasing),
        )
        self._switch = options.pop("switch", None)
        if options:
            raise ValueError(f"options: expected color, side, phrasing or switch, got {sorted(options)}")

        data = self._data
        mujoco.mj_resetData(self._model, data)
        home = scene.HOME + self.np_random.uniform([-0.03, -0.03, -0.01], [0.03, 0.03, 0.02])
        data.qpos[self._hand_q] = home
        data.qpos[self._finger_q] = scene.OPENING_MAX / 2
        placed: list[np.ndarray] = []
        for _ in COLORS:
            placed.append(self._free_place(placed, self.np_random))
        for index, xy in enumerate(placed):
            self._put_block(index, xy, self.np_random.uniform(-0.25, 0.25))
        # Draw the random numbers of the shove now, so that the shove does not depend on earlier actions.
        self._shove_rng = np.random.default_rng(self.np_random.integers(2**63))
        mujoco.mj_forward(self._model, data)
        self._step = 0
        return self.observation(), self._info()

    def step(self, action: np.ndarray):
        action = np.clip(np.asarray(action, dtype=np.float64).reshape(4), -1.0, 1.0)
        if not np.isfinite(action).all():
            raise ValueError(f"action: expected 4 finite numbers, got {action}")
        if self._switch is not None and self._step == self._switch[0]:
            self.switch_instruction(*self._switch[1:])
        if self.shove_step is not None and self._step == self.shove_step:
            self.shove(self._shove_rng)
        target = np.clip(self._ee() + STEP_SIZE * action[:3], scene.REACH_LOW, scene.REACH_HIGH)
        self._data.ctrl[:3] = target
        self._data.ctrl[3:] = scene.OPENING_MAX / 2 if action[3] > 0 else 0.0
        mujoco.mj_step(self._model, self._data, scene.SUBSTEPS)
        self._step += 1
        info = self._info()
        return self.observation(), float(info["is_success"]), info["is_success"], False, info

    def shove(self, rng: np.random.Generator) -> None:
        """Move the named block to a free place that is at least 5 cm away."""
        blocks = self._blocks()[:, :2]
        others = [blocks[i] for i in range(len(COLORS)) if i != self._color]
        for _ in range(100):
            xy = self._free_place(others, rng)
            if np.abs(xy - blocks[self._color]).max() > 0.05:
                break
        self._put_block(self._color, xy, rng.uniform(-0.25, 0.25))
        mujoco.mj_forward(self._model, self._data)

    def world(self) -> World:
        return World(self._ee(), self._opening(), self._blocks(), self._color, self._side)

    def _ee(self) -> np.ndarray:
        return self._data.qpos[self._hand_q].copy()

    def _opening(self) -> float:
        return float(self._data.qpos[self._finger_q].sum())

    def _blocks(self) -> np.ndarray:
        return self._data.qpos[self._block_q[:, None] + np.arange(3)]

    def _put_block(self, index: int, xy: np.ndarray, yaw: float) -> None:
        q, v = self._block_q[index], self._block_v[index]
        self._data.qpos[q : q + 7] = [*xy, scene.BLOCK_HALF, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)]
        self._data.qvel[v : v + 6] = 0.0

    @staticmethod
    def _free_place(others: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """Draw a random point of the table that is at least SPACING metres away from all points in ``others``. After
        200 draws without success, return the last one.
        """
        for _ in range(200):
            xy = rng.uniform(-scene.FIELD, scene.FIELD)
            if all(np.hypot(*(xy - o)) > scene.SPACING for o in others):
                break
        return xy

    def _info(self) -> dict[str, Any]:
        block, center = self._blocks()[self._color], scene.BIN_CENTERS[self._side]
        in_bin = np.abs(block[:2] - center).max() < scene.BIN_INNER and block[2] < 0.075
        released = self._opening() > 0.8 * scene.OPENING_MAX and self._ee()[2] > 0.09
        return {"is_success": bool(in_bin and released), "task": self.task, "step": self._step}

    def observation(self) -> dict[str, Any]:
        """Return the present observation, also after :meth:`switch_instruction` or :meth:`shove`."""
        goal = (
            [*np.eye(len(COLORS))[self._color], *np.eye(len(SIDES))[self._side]] if self.goal_in_state else ()
        )
        state = np.array([*self._ee(), self._opening(), *goal], dtype=np.float32)
        images = {"front": self.view("front"), "wrist": self.view("wrist")}
        return {"images": images, "state": state, "prompt": self._prompt}

    def view(self, camera: str, size: int | None = None) -> np.ndarray:
        """Draw the image of a camera.

        Args:
            camera: One of ``cameras``, or "overview", which policies do not receive.
            size: Width and height in pixels. None for ``image_size``.

        Returns:
            uint8 [size, size, 3].
        """
        size = size or self.image_size
        ee = self._ee()
        moving = scene.hand_boxes(ee, self._opening()).joined(self._block_boxes())
        if camera in _FIXED_CAMERAS:
            key = (camera, size)
            if key not in self._backgrounds:
                frame = RenderedFrame.empty(size, scene.BACKGROUND)
                self._backgrounds[key] = draw(frame, _FIXED_CAMERAS[camera], self._static)
            return draw(self._backgrounds[key].copy(), _FIXED_CAMERAS[camera], moving).color
        frame = RenderedFrame.empty(size, scene.BACKGROUND)
        return draw(frame, scene.WRIST.moved(ee), self._static.joined(moving)).color

    def _block_boxes(self) -> Boxes:
        poses = self._data.qpos[self._block_q[:, None] + np.arange(7)]
        return scene.block_boxes(poses[:, :3], rotation_from_quaternion(poses[:, 3:]))

    def pose(self) -> np.ndarray:
        """Return the generalised positions of all bodies, float64 [nq], from which a film is drawn."""
        return self._data.qpos.copy()

    def render(self) -> np.ndarray:
        return self.view("overview", self.render_size)

"""LIBERO: a Panda arm with displacements and a gripper in [-1, 1] at 20 Hz, and two cameras, both upside down.

Sources: openpi ``examples/libero/main.py`` (256-pixel frames turned by 180 degrees; state [8]: position, axis-angle,
both fingers; 10 steps in which objects settle, at [0, 0, 0, 0, 0, 0, -1]; the simulator's seed is 7; the first 50
recorded initial states; done is success), LeRobot ``envs/libero.py`` and ``processor/env_processor.py`` (the same),
hf-libero ``benchmark/__init__.py`` (order of tasks).

The gripper closes at +1. Policies that were trained on the unchanged recordings return this value. Other policies
return an opening from 0 to 1 (vla.cpp ``eval/utils/sim_adapters/libero.py``, openvla
``experiments/robot/robot_utils.py``). The units of a policy's actions state which of both it returns.

Only hf-libero's simulator is used. Its module ``benchmark`` needs torch to read arrays, so this module reads them
itself.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import pickletools
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from sinew.core import SinewError, VectorSpec
from sinew_client.untrusted import open_archive

from sinew_eval.sim.experts import Expert, expert_spec
from sinew_eval.suites import LIBERO, SIMULATORS, libero_expert
from sinew_eval.suites.base import SimulatorFrame, Tasks, drawing
from sinew_eval.suites.mapping import Mapping

MAPPING = Mapping(
    images={"image": "agentview_image", "image2": "robot0_eye_in_hand_image"},
    known_as={
        "agentview_image": ("base_0_rgb", "camera1", "agentview", "front", "full_image", "image_0"),
        "robot0_eye_in_hand_image": ("left_wrist_0_rgb", "camera2", "wrist_image", "wrist", "image_1"),
    },
    unseen=("right_wrist_0_rgb", "camera3", "empty_camera_0", "image_2"),
    turned=True,
    state=("robot0_eef_pos", "robot0_eef_quat|axis_angle", "robot0_gripper_qpos"),
    action={"opening": "opening_to_closing", "recorded": "as_is"},
    hold="rest",
    rest=(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0),
    control_hz=20.0,
)

CAMERAS = ("agentview", "robot0_eye_in_hand")


class Simulator(Tasks):
    """LIBERO's simulator with frames that are drawn on demand.

    robosuite draws both cameras in every control step, after its first physics step. This class only copies the state
    of the simulator at that time, and draws a frame when it is read. The pixels are equal.

    Args:
        tasks: Names of the tasks.
        size: Width and height of a frame, in pixels.
        settle: Control steps before the policy's first action.
        seed: Seed of the simulator, which determines what the initial state leaves open.
        drawn: True to draw the initial state from the task's own regions, with the trial as the seed. False for the
            50 recorded states. Demonstrations use drawn states, so that the recorded ones stay reserved for
            evaluation.
    """

    action_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)

    def __init__(
        self, tasks: Sequence[str], size: int = 256, settle: int = 10, seed: int = 7, drawn: bool = False
    ):
        super().__init__(tasks)
        self._drawn = drawn
        self._root = _root()
        self._size, self._settle, self._seed = size, settle, seed
        self._names = _task_names(self._root)
        self._env: Any = None

    @property
    def max_steps(self) -> int:  # type: ignore[override]
        return LIBERO[(self._current or self.tasks[0]).partition("/")[0]][1]

    def open(self, task: str) -> None:
        benchmark, name = task.partition("/")[0], self._file(task)
        with drawing():
            from libero.libero.envs import OffScreenRenderEnv

            self._env = OffScreenRenderEnv(
                bddl_file_name=str(self._root / "bddl_files" / benchmark / f"{name}.bddl"),
                camera_heights=self._size,
                camera_widths=self._size,
            )
        self._states = read_states(self._root / "init_files" / benchmark / f"{name}.pruned_init")
        self.task_description = sentence(name)

    def begin(self, trial: int) -> Any:
        with drawing():
            self._env.seed(trial if self._drawn else self._seed)
            raw = self._env.reset()
            self._draw_later()
            if not self._drawn:
                raw = self._env.set_init_state(self._states[trial % len(self._states)])
            for _ in range(self._settle):
                raw, _, _, _ = self._env.step(MAPPING.rest)
        return self._with_frames(raw)

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        raw, reward, done, _ = self._env.step(action)
        return self._with_frames(raw), reward, bool(done), False, {"is_success": bool(done)}

    def _draw_later(self) -> None:
        """Replace the first camera's sensor by one that copies the simulator's data, and the others by one that does
        nothing.
        """
        from robosuite.utils.observables import sensor

        data = self._env.sim.data._data  # noqa: SLF001 - mujoco's own object, which robosuite wraps
        self._seen = copy.copy(data)
        first, *others = (f"{name}_image" for name in CAMERAS)

        @sensor(modality="image")
        def keep(_: Any) -> np.ndarray:
            # mj_copyData would be faster, but the pinned MuJoCo does not have it.
            self._seen = copy.copy(data)
            return np.zeros(1)

        @sensor(modality="image")
        def nothing(_: Any) -> np.ndarray:
            return np.zeros(1)

        for name, of in ((first, keep), *((name, nothing) for name in others)):
            self._env.env.modify_observable(name, "sensor", of)

    def _with_frames(self, raw: dict[str, Any]) -> dict[str, Any]:
        frames = {f"{name}_image": SimulatorFrame(partial(self._draw, name)) for name in CAMERAS}
        return {**raw, **frames}

    def _draw(self, camera: str) -> np.ndarray:
        """Draw a frame uint8 [size, size, 3] of the copied state. The first row is the lowest one."""
        sim = self._env.sim
        context = sim._render_context_offscreen  # noqa: SLF001 - the context in which sim.render draws
        now, context.data = context.data, SimpleNamespace(_data=self._seen)
        try:
            with drawing():
                return np.array(sim.render(camera_name=camera, width=self._size, height=self._size))
        finally:
            context.data = now

    def expert(self) -> Expert:
        """Return the scripted expert of ``sinew eval expert``. It shows that success is possible and detected."""
        return Expert(expert_spec("LIBERO's scripted expert", VectorSpec(7)), libero_expert.begin)

    @property
    def robosuite(self) -> Any:
        """Return the robosuite environment inside of LIBERO's wrapper."""
        return self._env.env

    @property
    def current(self) -> str:
        """Return the name of the open task."""
        return self._current

    def label(self, task: str) -> str:
        return f"{task.partition('/')[0]}/{self._file(task)}"

    def _file(self, task: str) -> str:
        benchmark, _, index = task.partition("/")
        return self._names[benchmark][int(index)]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None
        super().close()


def sentence(name: str) -> str:
    """Return the instruction in a task's file name. In LIBERO-90 and -10, the scene precedes it in capitals."""
    words = name.split("_")
    first = next((i + 1 for i, word in enumerate(words) if word.startswith("SCENE")), 0)
    return " ".join(words[first:])


def _root() -> Path:
    """Return the folder of LIBERO's files. It checks for the meshes first, because LIBERO's import would ask for
    missing files in the terminal or on the network.
    """
    spec = importlib.util.find_spec("libero")
    root = Path(next(iter(spec.submodule_search_locations or ("",)))) / "libero" if spec is not None else None
    if root is None or not (root / "bddl_files").is_dir():
        raise SinewError("LIBERO is not installed in this interpreter; run `sinew eval --setup libero`")
    meshes = SIMULATORS["libero"].meshes
    assert meshes is not None
    if not (root / "assets" / meshes.has).is_file():
        raise SinewError(
            f"{root / 'assets'} has no {meshes.has}; run `sinew eval --setup libero`, or link the data set {meshes.hub}"
            " of the Hugging Face hub to this folder"
        )
    config = Path(os.environ.setdefault("LIBERO_CONFIG_PATH", str(root / "sinew")))
    config.mkdir(parents=True, exist_ok=True)
    if not (config / "config.yaml").is_file():
        folders = {
            "benchmark_root": "",
            "bddl_files": "bddl_files",
            "init_states": "init_files",
            "assets": "assets",
        }
        lines = [
            f"{key}: {root / folder}\n" for key, folder in {**folders, "datasets": "../datasets"}.items()
        ]
        (config / "config.yaml").write_text("".join(lines))
    return root


def _task_names(root: Path) -> dict[str, list[str]]:
    """For each benchmark, return the names of its tasks in the order of their numbers."""
    path = root / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("libero_suite_task_map", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.libero_task_map


def read_states(path: Path) -> np.ndarray:
    """Read the initial states of a task. torch has saved them as a pickle in a zip file.

    The pickle is parsed and not executed: its opcodes contain the shape, the type, and one text with the bytes of the
    numbers.

    Args:
        path: The file.

    Returns:
        float64 [50, N].

    Raises:
        SinewError: The file does not contain one float64 array.
    """
    try:
        with open_archive(path) as archive:
            data = archive.read(next(name for name in archive.names if name.endswith("/data.pkl")))
        opcodes = [(op.name, value) for op, value, _ in pickletools.genops(bytes(data))]
    except (OSError, StopIteration, ValueError) as error:
        raise SinewError(
            f"{path}: not a file of LIBERO's initial states ({error}); run `sinew eval --setup libero` again"
        ) from error
    integers = [value for name, value in opcodes if "BININT" in name and isinstance(value, int)]
    texts = [value for name, value in opcodes if "UNICODE" in name and isinstance(value, str)]
    numbers = max(texts, key=len, default="").encode("latin1")
    # The first integer in the pickle is the length of an empty array.
    version, rows, columns = (*integers[1:4], 0, 0, 0)[:3]
    if version != 1 or not {"f8", "<"} <= set(texts) or len(numbers) != 8 * rows * columns:
        raise SinewError(f"{path}: expected one float64 array of initial states")
    return np.frombuffer(numbers, "<f8").reshape(rows, columns)

"""Adapters of the field's simulators: their conventions on arrays, and the simulators themselves where installed."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium", reason="evaluation needs the sim extra")

import sinew  # noqa: E402
from benchmarks.checkpoints.smolvla import write_checkpoint  # noqa: E402
from benchmarks.checkpoints.smolvla_layout import TINY  # noqa: E402
from eval.tests.test_evaluate import PUSHT  # noqa: E402
from sinew.bundle import Bundle, write_bundle  # noqa: E402
from sinew.cli import main  # noqa: E402
from sinew.cli.run_robot import RobotFlags  # noqa: E402
from sinew.convert import convert  # noqa: E402
from sinew.core import ActionChunk, CameraSpec, Observation, PolicySpec, SinewError, VectorSpec  # noqa: E402
from sinew.core.registry import architectures  # noqa: E402
from sinew.lowbit.sources import lowbit_sources  # noqa: E402
from sinew.serve.policies import Deployment  # noqa: E402
from sinew.serve.process import Process  # noqa: E402
from sinew.serve.scheduler import Scheduler  # noqa: E402
from sinew.serve.served import ServedPolicy  # noqa: E402
from sinew.serve.service import Service  # noqa: E402
from sinew.serve.transport.listen import Listen  # noqa: E402
from sinew.serve.wires import open_wires, parse  # noqa: E402

import sinew_eval  # noqa: E402
from sinew_eval import suites  # noqa: E402
from sinew_eval.episodes import campaign  # noqa: E402
from sinew_eval.episodes.adapters import Mapped, read_mapping  # noqa: E402
from sinew_eval.episodes.runner import EpisodeSettings, run_episode  # noqa: E402
from sinew_eval.episodes.settings import Task, Variant  # noqa: E402
from sinew_eval.foreign import run as foreign  # noqa: E402
from sinew_eval.foreign import worker as foreign_worker  # noqa: E402
from sinew_eval.report.report import suite_rows  # noqa: E402
from sinew_eval.suites import aloha, conventions, libero, metaworld, pusht, simpler  # noqa: E402
from sinew_eval.suites.base import SimulatorFrame, Tasks, drawing  # noqa: E402
from sinew_eval.suites.mapping import Mapping  # noqa: E402

PACKAGE = Path(sinew.__file__).resolve().parent
PEN = PACKAGE / "assets" / "pen.gguf"
HALF = np.sqrt(0.5)
PLAIN = {"size": 64, "plain": True}  # Meta-World drawn in 13 ms instead of hundreds


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Run the verb in this process; the exit code, its JSON and standard error in one line."""
    code = main(["eval", *map(str, arguments), "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else {}, " ".join(said.err.split())


# ----------------------------------------------------------------------------- orientations, grippers, frames


@pytest.mark.parametrize(
    ("quaternion", "expected"),
    [
        ((0, 0, 0, 1), (0, 0, 0)),
        ((0, 0, HALF, HALF), (0, 0, np.pi / 2)),
        ((1, 0, 0, 0), (np.pi, 0, 0)),  # a gripper that points down
        ((0, 0, HALF, -HALF), (0, 0, 3 * np.pi / 2)),  # the same turn as -90 degrees, the long way round
        ((0.5, 0.5, -0.5, 0.5), np.array([1, 1, -1]) * (2 * np.pi / 3) / np.sqrt(3)),
        ((0, 0, 0, 1.0000001), (0, 0, 0)),
    ],
)
def test_axis_angle_is_robosuites(quaternion: Any, expected: Any) -> None:
    assert conventions.axis_angle(np.array(quaternion)) == pytest.approx(np.array(expected), abs=1e-7)


def test_matrix_and_angles() -> None:
    about_y = conventions.matrix(np.array([0, HALF, 0, HALF]))
    assert about_y == pytest.approx(np.array([[0, 0, 1], [0, 1, 0], [-1, 0, 0]]), abs=1e-12)
    about_z = conventions.matrix(np.array([0, 0, np.sin(0.15), np.cos(0.15)]))
    assert conventions.roll_pitch_yaw(about_z) == pytest.approx([0, 0, 0.3])
    about_x = conventions.matrix(np.array([np.sin(-0.2), 0, 0, np.cos(-0.2)]))
    assert conventions.roll_pitch_yaw(about_z @ about_x) == pytest.approx([-0.4, 0, 0.3])
    assert conventions.roll_pitch_yaw(about_z @ about_y) == pytest.approx([0, np.pi / 2, 0.3])


def test_bridge_state_is_level_when_the_gripper_points_down() -> None:
    pose = np.array([0.1, 0.2, 0.3, HALF, 0, HALF, 0, 0.9])  # quaternion wxyz, about y by 90 degrees
    assert conventions.bridge_state(pose) == pytest.approx([0.1, 0.2, 0.3, 0, 0, 0, 0, 0.9], abs=1e-7)
    # turned about the vertical by 0.3 before: yaw, and nothing else
    c, s = np.cos(0.15), np.sin(0.15)
    pose[3:7] = [c * HALF, -s * HALF, c * HALF, s * HALF]
    assert conventions.bridge_state(pose)[3:6] == pytest.approx([0, 0, 0.3], abs=1e-7)


@pytest.mark.parametrize(
    ("angles", "expected"),
    [
        ((0.2, 0, 0), (0.2, 0, 0)),
        ((0, -0.3, 0), (0, -0.3, 0)),
        ((0, 0, 0.1), (0, 0, 0.1)),
        # Ry(90) Rx(90) has the quaternion (1, 1, -1, 1) / 2: 120 degrees about (1, 1, -1)
        ((np.pi / 2, np.pi / 2, 0), np.array([1, 1, -1]) * (2 * np.pi / 3) / np.sqrt(3)),
    ],
)
def test_euler_angles_to_axis_and_angle(angles: Any, expected: Any) -> None:
    assert conventions.axis_angle_of_rpy(np.array(angles)) == pytest.approx(np.array(expected), abs=1e-7)


@pytest.mark.parametrize(
    ("name", "opened", "closed"),
    [("opening_to_closing", -1.0, 1.0), ("opening_to_sign", 1.0, -1.0), ("euler_and_opening", 1.0, -1.0)],
)
def test_grippers(name: str, opened: float, closed: float) -> None:
    convert_action = conventions.ACTIONS[name]
    for value, expected in ((0.0, closed), (0.5, closed), (0.51, opened), (1.0, opened)):
        row = np.array([0.1, 0.2, 0.3, 0.0, 0.0, 0.4, value], np.float32)
        before = row.copy()
        assert convert_action(row) == pytest.approx([0.1, 0.2, 0.3, 0.0, 0.0, 0.4, expected], abs=1e-6)
        assert np.array_equal(row, before)  # a row of a chunk is not ours to change


def test_frames_are_turned_not_mirrored() -> None:
    frame = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    turned = conventions.turned(frame)
    assert turned[0, 0].tolist() == frame[1, 2].tolist()
    assert turned[0, 2].tolist() == frame[1, 0].tolist()
    assert turned.flags.c_contiguous


# ----------------------------------------------------------------------------- the suites' mappings


class Still(gymnasium.Env):
    task_description = "go"
    max_steps = 9

    def __init__(self, action_space: Any):
        self.action_space = action_space


def served(architecture: str, action_dim: int, *cameras: str) -> dict[str, Any]:
    """What a server says about its policy."""
    cameras_ = tuple(CameraSpec(name, 8, 8) for name in cameras)
    dims = {"state": VectorSpec(action_dim), "action": VectorSpec(action_dim)}
    return PolicySpec(
        architecture, "x", cameras_, **dims, chunk_size=1, noise_dim=0, solver_steps=0, max_prompt_tokens=8
    ).to_dict()


def test_libero_observation_and_action() -> None:
    adapter = Mapped(Still(libero.Simulator.action_space), libero.MAPPING)
    frames = np.zeros((2, 2, 2, 3), np.uint8)
    frames[:, 0, 1] = 200  # top right
    raw = {
        "agentview_image": frames[0],
        "robot0_eye_in_hand_image": frames[1],
        "robot0_eef_pos": np.array([0.1, 0.2, 0.3]),
        "robot0_eef_quat": np.array([1.0, 0, 0, 0]),
        "robot0_gripper_qpos": np.array([0.04, -0.04]),
    }
    adapter.fit(served("pi05", 7, "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"))
    seen = adapter.observation(raw)
    assert set(seen["images"]) == {"base_0_rgb", "left_wrist_0_rgb"}
    assert seen["images"]["base_0_rgb"][1, 0, 0] == 200  # bottom left
    assert seen["state"] == pytest.approx([0.1, 0.2, 0.3, np.pi, 0, 0, 0.04, -0.04])
    assert seen["state"].dtype == np.float32
    row = np.array([0.5, -2.0, 0, 0, 0, 0, 0.3], np.float32)
    assert adapter.action(row).tolist() == [0.5, -1.0, 0, 0, 0, 0, np.float32(0.3)]
    assert adapter.hold(None).tolist() == [0, 0, 0, 0, 0, 0, -1]  # -1 opens
    assert adapter.hold(np.array([0.5, 0, 0, 0, 0, 0, 1.0])).tolist() == [0, 0, 0, 0, 0, 0, 1]

    adapter.fit(served("GR00T-N1.6", 7, "image", "wrist_image"))  # an opening from 0 to 1
    assert adapter.action(np.array([0, 0, 0, 0, 0, 0, 0.9], np.float32))[-1] == -1.0
    assert set(adapter.observation(raw)["images"]) == {"image", "wrist_image"}


def test_a_gripper_goes_by_what_the_actions_say() -> None:
    """A family that the project does not know closes a hand the wrong way unless its bundle says how."""
    adapter = Mapped(Still(libero.Simulator.action_space), libero.MAPPING)
    row = np.array([0, 0, 0, 0, 0, 0, 0.9], np.float32)
    policy = served("somebodys", 7, "image")
    for unit, expected in (("opening", -1.0), ("recorded", np.float32(0.9))):
        adapter.fit({**policy, "action": {"dim": 7, "names": (), "units": ("",) * 6 + (unit,)}})
        assert adapter.action(row)[-1] == expected
    adapter.fit({**served("pi0", 7, "image"), "action": {"dim": 7, "units": ("",) * 6 + ("opening",)}})
    assert adapter.action(row)[-1] == -1.0  # its own word, not its family's
    adapter.fit(served("vla_adapter", 7, "image"))  # as OpenVLA-OFT: its statistics are of the same data sets
    assert adapter.action(row)[-1] == -1.0
    with pytest.raises(
        SinewError, match=r"action.units: expected one of opening, recorded, got none; .*--env-options"
    ):
        adapter.fit(policy)
    adapter = Mapped(
        Still(libero.Simulator.action_space), replace(libero.MAPPING, action="opening_to_closing")
    )
    adapter.fit(policy)
    assert adapter.action(row)[-1] == -1.0


class Hand(Still):
    """LIBERO without its simulator: what it was told last."""

    def __init__(self, tasks: Any):
        super().__init__(gymnasium.spaces.Box(-1, 1, (6,), np.float32))
        self.told: list[float] = []

    def reset(self, **_: Any) -> Any:
        frame = np.zeros((8, 8, 3), np.uint8)
        pose = {"robot0_eef_pos": np.zeros(3), "robot0_eef_quat": np.array([0, 0, 0, 1.0])}
        fingers = {"robot0_gripper_qpos": np.zeros(0)}
        return {"agentview_image": frame, "robot0_eye_in_hand_image": frame, **pose, **fingers}, {}

    def step(self, action: np.ndarray) -> Any:
        self.told.append(float(action[-1]))
        return self.reset()[0], 0.0, False, False, {"is_success": False}


def with_units(bundle: Path, out: Path, unit: str) -> Path:
    """Copy a bundle whose last action number is a gripper in these units."""
    opened = Bundle(bundle)
    manifest = opened.manifest
    action = replace(manifest.spec.action, units=("",) * (manifest.spec.action.dim - 1) + (unit,))
    said = replace(manifest, spec=replace(manifest.spec, action=action))
    write_bundle(out, lambda: said, lowbit_sources(opened, {}))
    return out


@pytest.mark.parametrize("unit", ["opening", "recorded"])
def test_a_policy_in_this_process_is_asked_for_its_gripper_too(
    unit: str, smolvla_bundle: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only servers were: the same bundle, evaluated or run without one, closed its hand the wrong way."""
    monkeypatch.setattr(libero, "Simulator", Hand)
    bundle = with_units(smolvla_bundle(), tmp_path / "hand.gguf", unit)
    spec = Bundle(bundle).manifest.spec
    cameras = {"cameras": {camera.name: "agentview_image" for camera in spec.cameras}}
    player = campaign.EpisodePlayer(Task("libero_spatial/0", env_options={**cameras, "max_steps": 2}))
    player.play(Variant(str(bundle)), 0)
    robot = RobotFlags("gym:libero_spatial/0", json.dumps(cameras)).opener()(spec.to_dict())
    robot.act(np.full(6, 0.9, np.float32))
    assert robot.env.told == [-1.0 if unit == "opening" else pytest.approx(0.9)]
    assert all(abs(each) == 1.0 for each in player.env.told) == (unit == "opening")


@pytest.mark.parametrize("suite", [libero, simpler], ids=lambda suite: suite.__name__.rpartition(".")[2])
@pytest.mark.parametrize("architecture", sorted(architectures()))
def test_every_family_says_how_its_gripper_goes(suite: Any, architecture: str) -> None:
    """What drives and has none is refused."""
    adapter = Mapped(Still(suite.Simulator.action_space), suite.MAPPING)
    drives = architecture.startswith("omnivla")
    with pytest.raises(SinewError, match="action.units: .* got none") if drives else nullcontext():
        adapter.fit(served(architecture, 7, "camera1"))


def test_aloha_takes_joint_angles_beyond_its_declared_space() -> None:
    adapter = Mapped(Still(aloha.Simulator.action_space), aloha.MAPPING)
    pose = np.array([0, -0.96, 1.16, 0, -0.3, 0, 0.1] * 2)
    frame = np.zeros((4, 4, 3), np.uint8)
    adapter.fit(served("pi0", 14, "base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"))
    seen = adapter.observation({"pixels": {"top": frame}, "agent_pos": pose})
    assert list(seen["images"]) == ["base_0_rgb"]
    assert adapter.action(pose.astype(np.float32))[2] == np.float32(1.16)
    assert adapter.hold(None) == pytest.approx(pose)  # absolute: to hold is to be told where one is


def test_metaworld_and_pusht_mappings() -> None:
    adapter = Mapped(Still(metaworld.Simulator.action_space), metaworld.MAPPING)
    frame = np.zeros((2, 2, 3), np.uint8)
    frame[0, 0] = 9
    seen = adapter.observation({"pixels": frame, "state": np.arange(4.0)})
    assert seen["images"]["image"][1, 1, 0] == 9
    assert seen["state"].tolist() == [0, 1, 2, 3]
    assert adapter.action(np.full(4, 2.0, np.float32)).tolist() == [1, 1, 1, 1]
    adapter = Mapped(Still(pusht.Simulator.action_space), pusht.MAPPING)
    assert adapter.action(np.array([-3, 600], np.float32)).tolist() == [0, 512]


def test_simpler_mapping() -> None:
    adapter = Mapped(Still(simpler.Simulator.action_space), simpler.MAPPING)
    adapter.fit(served("pi0", 7, "base_0_rgb"))
    pose = np.array([0.1, 0.2, 0.3, HALF, 0, HALF, 0, 0.9])
    state = adapter.observation({"image": np.zeros((2, 2, 3), np.uint8), "eef_pos": pose})["state"]
    assert state == pytest.approx([0.1, 0.2, 0.3, 0, 0, 0, 0, 0.9], abs=1e-6)
    row = np.array([0, 0, 0, np.pi / 2, np.pi / 2, 0, 0.2], np.float32)
    assert adapter.action(row)[3:] == pytest.approx([1.2092, 1.2092, -1.2092, -1.0], abs=1e-4)
    adapter.fit(served("gr00t_n1_6", 7, "image_0"))
    assert adapter.action(row)[3:] == pytest.approx([np.pi / 2, np.pi / 2, 0, -1.0])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (served("smolvla", 7, "camera1", "front_left"), "no frame for the policy's cameras front_left"),
        (served("smolvla", 7, "right_wrist_0_rgb"), "no frame for the policy's cameras right_wrist_0_rgb"),
        (served("smolvla", 6, "camera1"), "actions have 6 numbers, but the environment expects 7"),
    ],
)
def test_a_policy_that_does_not_fit_is_refused(policy: dict[str, Any], message: str) -> None:
    adapter = Mapped(Still(libero.Simulator.action_space), libero.MAPPING)
    with pytest.raises(SinewError, match=message):
        adapter.fit(policy)


def test_mapping_files_have_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    words = {"images": {"a": "x"}, "state": ["q|axis_angle"], "hold": "rest", "rest": [0, -1], "turned": True}
    path.write_text(json.dumps(words))
    assert read_mapping(path).rest == (0, -1)
    for bad, message in (
        ({"action": "flip"}, "action: "),
        ({"hold": "state"}, "hold: "),
        ({"state": ["q|x"]}, "state: "),
    ):
        path.write_text(json.dumps({**words, **bad}))
        with pytest.raises(SinewError, match=message):
            read_mapping(path)


# ----------------------------------------------------------------------------- suites


def test_suites_and_their_tasks() -> None:
    mt50 = suites.SUITES["metaworld_mt50"].tasks
    assert len(mt50) == len(set(mt50)) == 50
    assert [len(suites.SUITES[f"metaworld_{level}"].tasks) for level in suites.METAWORLD] == [28, 11, 6, 5]
    assert len(suites.SUITES["libero"].tasks) == 40
    assert suites.SUITES["libero"].tasks[10] == "libero_object/0"
    suite, tasks = suites.find("gym_aloha/AlohaTransferCube-v0") or (None, ())
    assert suite is suites.SUITES["aloha"]
    assert tasks == ("gym_aloha/AlohaTransferCube-v0",)
    assert suites.find("sinew/Blocks-v0") is None
    assert {suite.simulator for suite in suites.SUITES.values()} == set(suites.SIMULATORS)


def test_the_seed_chooses_task_and_trial() -> None:
    class Recorded(Tasks):
        opened: list[str] = []  # noqa: RUF012
        begun: list[int] = []  # noqa: RUF012

        def open(self, task: str) -> None:
            self.opened.append(task)

        def begin(self, trial: int) -> Any:
            self.begun.append(trial)

    env = Recorded(("a", "b", "c"))
    names = [env.reset(seed=seed)[1]["task"] for seed in (0, 3, 4, 5)]
    assert names == ["a", "a", "b", "c"]
    assert env.opened == ["a", "b", "c"]  # not opened again for the second trial
    assert env.begun == [0, 1, 1, 1]
    with pytest.raises(SinewError, match="need a seed"):
        env.reset()


def test_frames_are_drawn_only_for_chunks() -> None:
    drawn: list[int] = []

    class Drawing(Still):
        metadata = {"render_fps": 10}  # noqa: RUF012

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return self.look(), {}

        def look(self) -> dict[str, Any]:
            def draw() -> np.ndarray:
                drawn.append(self.steps)
                return np.zeros((2, 2, 3), np.uint8)

            return {"frame": SimulatorFrame(draw), "q": np.zeros(2)}

        def step(self, action):
            self.steps += 1
            return self.look(), 0.0, False, False, {}

    class Zeros:
        chunk_size = 4
        committed_rows = 0
        served: ClassVar[dict[str, Any]] = {}
        motion = None

        def start(self, env: object) -> None: ...

        def infer(self, observation: Any, seed: int) -> tuple[np.ndarray, float]:
            return np.zeros((4, 2), np.float32), 0.0

        def close(self) -> None: ...

    env = Drawing(gymnasium.spaces.Box(-1, 1, (2,), np.float32))
    adapter = Mapped(env, Mapping({"top": "frame"}, ("q",)))
    episode = run_episode(env, adapter, Zeros(), EpisodeSettings(replan=4), seed=0)
    assert (episode.steps, episode.chunks) == (9, 3)
    assert drawn == [0, 4, 8]


def test_no_opengl_is_said_in_one_line() -> None:
    with pytest.raises(SinewError, match=r"cannot draw here .*libegl1"), drawing():
        raise RuntimeError("an OpenGL platform library has not been loaded")
    with pytest.raises(ValueError, match="something else"), drawing():
        raise ValueError("something else")


def test_libero_sentences_and_initial_states(tmp_path: Path) -> None:
    assert libero.sentence("pick_up_the_milk_and_place_it") == "pick up the milk and place it"
    assert libero.sentence("LIVING_ROOM_SCENE2_put_both_in_the_basket") == "put both in the basket"
    assert libero.sentence("KITCHEN_SCENE10_close_it") == "close it"

    torch = pytest.importorskip("torch")
    states = np.random.default_rng(0).normal(size=(50, 92))
    torch.save(states, tmp_path / "a.pruned_init", pickle_protocol=2)
    assert np.array_equal(libero.read_states(tmp_path / "a.pruned_init"), states)
    for content in ({"a": 1}, states.astype(np.float32), ["f8", "<", "x"]):
        torch.save(content, tmp_path / "b.pruned_init", pickle_protocol=2)
        with pytest.raises(SinewError, match="expected one float64 array"):
            libero.read_states(tmp_path / "b.pruned_init")
    (tmp_path / "c.pruned_init").write_bytes(b"not a zip")
    with pytest.raises(SinewError, match="not a file of LIBERO's initial states"):
        libero.read_states(tmp_path / "c.pruned_init")


def test_table_by_suite() -> None:
    def entry(wins: int, count: int, low: float, high: float) -> dict[str, Any]:
        return {"wins": wins, "episodes": count, "success": wins / count, "interval": [low, high]}

    by_task = {
        "libero_goal/a": entry(1, 2, 0.0945, 0.9055),
        "libero_spatial/b": entry(2, 2, 0.3424, 1.0),
        "libero_goal": entry(1, 2, 0.0945, 0.9055),
        "libero_spatial": entry(2, 2, 0.3424, 1.0),
        "a": entry(1, 2, 0.0945, 0.9055),
        "b": entry(2, 2, 0.3424, 1.0),
    }
    assert suite_rows([{"label": "p.gguf", "by_task": by_task, **entry(3, 4, 0.3006, 0.9544)}]) == [
        ["libero_goal", "50.0 [9.4, 90.5] of 2"],
        ["libero_spatial", "100.0 [34.2, 100.0] of 2"],
        ["all", "75.0 [30.1, 95.4] of 4"],
    ]
    assert suite_rows([{"label": "p", "by_task": {"reach": entry(1, 1, 0.2, 1.0)}}]) == []


# ----------------------------------------------------------------------------- the other interpreter


def test_what_the_other_interpreter_imports_needs_no_torch() -> None:
    """Nor anything else of ours beyond numpy, gymnasium and the client."""
    code = (
        "import sys\n"
        "for name in ('torch', 'gguf', 'msgspec', 'aiohttp', 'tokenizers', 'rich', 'cyclopts', 'mujoco'):\n"
        "    sys.modules[name] = None\n"
        "import sinew_client, sinew_eval.episodes.campaign, sinew_eval.episodes.adapters\n"
        "from sinew_eval.suites import aloha, libero, metaworld, pusht, simpler\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_it_may_be_an_older_python() -> None:
    """The syntax, at least; the worker itself must be read by any, to say so."""
    ast.parse(Path(foreign_worker.__file__).read_text(), feature_version=(3, 8))
    eval_ = Path(sinew_eval.__file__).parent
    for path in (
        *eval_.rglob("*.py"),
        *(PACKAGE / "core").rglob("*.py"),
        PACKAGE / "__init__.py",
    ):
        ast.parse(path.read_text(), feature_version=foreign_worker.PYTHON)


def content(episodes: list[Any]) -> list[dict[str, Any]]:
    """Without what the clock says."""
    return [
        {k: v for k, v in e.to_dict().items() if k not in ("latency_ms", "wall_s", "peak_bytes")}
        for e in episodes
    ]


@pytest.mark.skipif(not PEN.exists(), reason="no trained policy at sinew/assets/pen.gguf")
@pytest.mark.usefixtures("forked")
def test_the_other_interpreter_plays_the_same_episodes(tmp_path: Path) -> None:
    """Bundle served, socket, worker process: the numbers are those of one process."""
    pytest.importorskip("mujoco", reason="the embedded tasks need the sim extra")
    task, variants = Task("sinew/Pen-v0"), [Variant(str(PEN), 8), Variant(str(PEN), 0)]
    here = campaign.run(task, variants, range(2))
    elsewhere = foreign.Foreign(Path(sys.executable), tmp_path / "serve.log")
    assert elsewhere.control_hz(task) == 60
    there = campaign.run(task, variants, range(2), workers=2, elsewhere=elsewhere)
    assert [content(e) for e in here] == [content(e) for e in there]
    assert there[0][0].peak_bytes > PEN.stat().st_size  # of the server, which was asked


@pytest.mark.slow
@pytest.mark.skipif(not PEN.exists(), reason="no trained policy at sinew/assets/pen.gguf")
@pytest.mark.usefixtures("forked")
def test_a_simulator_that_is_killed_is_started_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its episode is played again: the same one. What is killed each time is named."""
    pytest.importorskip("mujoco", reason="the embedded tasks need the sim extra")
    task, variants = Task("sinew/Pen-v0"), [Variant(str(PEN), 8)]
    here = campaign.run(task, variants, range(4))
    kills, play = iter([0, 2, 1]), foreign.Worker.play

    def killed(worker: Any, variant: Variant, seed: int) -> Any:
        if next(kills, 0):
            worker._process.kill()
        return play(worker, variant, seed)

    monkeypatch.setattr(foreign.Worker, "play", killed)
    elsewhere = foreign.Foreign(Path(sys.executable), tmp_path / "serve.log")
    there = campaign.run(task, variants, range(4), workers=1, elsewhere=elsewhere)
    assert content(here[0]) == content(there[0])
    assert next(kills, None) is None
    kills = iter([1] * foreign.DEATHS)
    with pytest.raises(SinewError, match="the simulator's process ended with exit code -9"):
        campaign.run(task, variants, range(1), workers=1, elsewhere=elsewhere)


def test_its_server_is_told_all_that_the_variant_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variants of one bundle that are run differently have servers of their own."""
    told: list[tuple[str, ...]] = []

    @contextmanager
    def served(_bundle: Path, _log: Path, *flags: str) -> Iterator[str]:
        told.append(flags)
        yield "tcp://127.0.0.1:1"

    monkeypatch.setattr(foreign, "serving", served)
    monkeypatch.setattr(foreign, "Worker", lambda *_: nullcontext())
    monkeypatch.setattr(foreign, "_share", lambda *_: iter(()))
    one = Variant("a.gguf", engine="eager", device="cpu")
    two = replace(one, engine="plan", dtype="bf16", rename=("front=top",), allow_missing_cameras=True)
    played = [one, replace(one, replan=8), two]
    list(
        foreign.Foreign(Path(sys.executable)).play(Task("sinew/Pen-v0"), played, [(0, 0), (1, 0), (2, 0)], 1)
    )
    assert [" ".join(flags) for flags in told] == [
        "--device cpu --engine eager --threads 1",
        "--device cpu --engine plan --dtype bf16 --allow-missing-cameras --rename front=top --threads 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--suite", "libero_soup"), "--suite: expected one of aloha, pusht, metaworld_mt50"),
        (("--suite", "aloha", "--env", "sinew/Pen-v0"), "--suite, --env"),
        (("--suite", "simpler_widowx"), "needs an NVIDIA GPU with Vulkan"),
        (("--suite", "aloha", "--interpreter", "/nowhere/python"), "expected a Python interpreter"),
        (
            ("--suite", "simpler_widowx", "--interpreter", sys.executable),
            "this interpreter has no package simpler_env",
        ),
        (
            ("--suite", "libero", "--interpreter", sys.executable),
            "LIBERO is not installed in this interpreter",
        ),
        (("--suite", "pusht", "--interpreter", sys.executable), "lacks gym_pusht"),
        (
            ("--suite", "pusht", "--interpreter", shutil.which("false")),
            "cannot read the versions of its packages",
        ),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, said = evaluate(capsys, "expert", "--episodes", 1, "--workers", 1, *arguments)
    assert code == 1
    assert message in said


def test_what_is_not_installed_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINEW_SIMS", str(tmp_path))
    code, _, said = evaluate(capsys, "expert", "--suite", "aloha", "--episodes", 1)
    assert (code, said) == (1, "error: aloha is not installed; run `sinew eval --setup aloha`")
    (tmp_path / "aloha").mkdir()
    (tmp_path / "aloha" / foreign.STAMP).write_text("from another list")
    assert "was made from other versions" in evaluate(capsys, "expert", "--suite", "aloha")[2]
    assert "--setup: expected one of aloha, pusht" in evaluate(capsys, "--setup", "doom")[2]
    assert "clone github.com/simpler-env/SimplerEnv" in evaluate(capsys, "--setup", "simpler")[2]
    assert "expected a bundle file" in evaluate(capsys)[2]


# ----------------------------------------------------------------------------- a scripted policy behind the real server


class Scripted(ServedPolicy):
    """Answers with one action, from a function of the observation. ``seen``: all observations."""

    def __init__(self, spec: PolicySpec, act: Callable[[Observation], np.ndarray]):
        self.spec, self.act = spec, act
        self.seen: list[Observation] = []

    def warm_up(self) -> None: ...

    def prepare(self, observation: Observation) -> Observation:
        assert observation.state.shape == (self.spec.state.dim,)
        assert set(observation.images) == {camera.name for camera in self.spec.cameras}
        return observation

    def run(self, observation: Observation, *, cancel: threading.Event | None = None) -> ActionChunk:
        self.seen.append(observation)
        return ActionChunk(np.asarray(self.act(observation), np.float32)[None], seed=observation.seed)


@contextlib.contextmanager
def serving(policy: Scripted) -> Iterator[str]:
    """Sinew's server over a socket, with this policy for a bundle."""
    wires = open_wires(parse(["native:0"]), Listen())
    scheduler = Scheduler(policy)
    scheduler.start()
    about = {"version": "0", "device": "cpu", "dtype": "", "hardware": "scripted"}
    service = Service(Deployment(scheduler, policy.spec, {"server": about, "policy": policy.spec.to_dict()}))
    process, ready = Process(wires), threading.Event()
    address = wires[0].address
    thread = threading.Thread(target=process.run, args=(service, ready.set))
    thread.start()
    try:
        assert ready.wait(60)
        yield address
    finally:
        process.stop()
        thread.join(60)


def spec_of(state: int, action: int, camera: str = "image", size: int = 64) -> PolicySpec:
    return PolicySpec(
        "scripted", "script", (CameraSpec(camera, size, size),), VectorSpec(state), VectorSpec(action),
        chunk_size=1, noise_dim=0, solver_steps=0, max_prompt_tokens=64,
    )  # fmt: skip


def test_a_suite_whose_package_is_in_this_interpreter_plays_here(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If its own interpreter is not set up. One of other versions is never passed over."""
    (tmp_path / "gym_pusht.py").write_text(PUSHT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SINEW_SIMS", str(tmp_path / "sims"))
    policy = Scripted(spec_of(2, 2, "image", 96), lambda observation: np.array([256.0, 256.0]))
    try:
        with serving(policy) as address:
            for flag, name in (("--env", "gym_pusht/PushT-v0"), ("--suite", "pusht")):
                code, report, said = evaluate(
                    capsys, address, flag, name, "--episodes", 2, "--replan", 1, "--workers", 1
                )
                assert code == 0, said
                assert f"{name}: plays in this Python environment, which has the package of pusht" in said
                assert "`sinew eval --setup pusht`" in said
                assert (report["control_hz"], report["variants"][0]["success"]) == (10, 1.0)
            (tmp_path / "sims" / "pusht").mkdir(parents=True)
            (tmp_path / "sims" / "pusht" / foreign.STAMP).write_text("from another list")
            assert "was made from other versions" in evaluate(capsys, address, "--suite", "pusht")[2]
    finally:
        gymnasium.registry.pop("gym_pusht/PushT-v0", None)
        sys.modules.pop("gym_pusht", None)


def needs(simulator: str) -> pytest.MarkDecorator:
    try:
        foreign.interpreter(simulator)
    except SinewError as error:
        return pytest.mark.skipif(True, reason=str(error))
    return pytest.mark.skipif(False, reason="")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """A random SmolVLA policy of a million parameters with one camera."""

    def make(state: int, action: int) -> Path:
        folder = tmp_path_factory.mktemp("random")
        made = write_checkpoint(folder, cameras=1, state_dim=state, action_dim=action, widths=TINY)
        convert(made.policy, folder / "policy.gguf", vlm=made.vlm, name="random")
        return folder / "policy.gguf"

    return make


# ----------------------------------------------------------------------------- the simulators


@pytest.mark.sims
@pytest.mark.parametrize(
    "simulator",
    [pytest.param(name, marks=needs(name)) for name, s in suites.SIMULATORS.items() if not s.by_hand],
)
def test_every_installed_version_is_pinned(simulator: str) -> None:
    python = foreign.interpreter(simulator)
    freeze = [str(python), "-m", "pip", "--disable-pip-version-check", "freeze"]
    listed = subprocess.run(freeze, capture_output=True, text=True, check=True, timeout=60).stdout
    texts = [path.read_text() for path in foreign.VERSIONS.glob(f"{simulator}*.txt")]
    pinned = [line.partition(" --hash")[0] for text in texts for line in text.splitlines()]
    assert {line for line in listed.splitlines() if line} <= set(pinned)
    assert not any(line.startswith("torch==") for line in listed.splitlines())


@pytest.mark.sims
@needs("aloha")
def test_aloha_with_a_served_bundle(
    bundle: Callable[[int, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, _ = evaluate(
        capsys, bundle(14, 14), "--suite", "aloha", "--episodes", 2, "--workers", 1, "--replan", 10,
        "--env-options", json.dumps({"max_steps": 30}), "--out", tmp_path,
    )  # fmt: skip
    assert code == 0
    entry = report["variants"][0]
    assert set(entry["by_task"]) == {"AlohaTransferCube-v0", "AlohaInsertion-v0"}
    assert (entry["episodes"], entry["chunks"], entry["actions_per_chunk"]) == (2, 6, 10)
    assert entry["policy"]["kind"] == "bundle"
    assert entry["latency_ms"]["p50"] > 0
    assert report["control_hz"] == 50
    log = (tmp_path / campaign.LOG).read_text().splitlines()
    assert [json.loads(line)["steps"] for line in log] == [30, 30]
    assert "| AlohaInsertion-v0 | 0/1" in (tmp_path / "report.md").read_text()


@pytest.mark.sims
@needs("aloha")
def test_aloha_holds_a_pose_beyond_one_radian(capsys: pytest.CaptureFixture[str]) -> None:
    """Absolute actions in the state's units: told where it is, the robot stays there, an elbow at 1.16 included."""
    policy = Scripted(spec_of(14, 14, "top"), lambda observation: policy.seen[0].state)
    with serving(policy) as address:
        code, report, _ = evaluate(
            capsys, address, "--env", "gym_aloha/AlohaTransferCube-v0", "--episodes", 1, "--replan", 1,
            "--workers", 1, "--env-options", json.dumps({"max_steps": 12}),
        )  # fmt: skip
    assert code == 0
    first, last = policy.seen[0], policy.seen[-1]
    assert len(policy.seen) == 12
    assert first.state[2] == pytest.approx(1.16, abs=1e-3)
    assert last.state == pytest.approx(first.state, abs=0.03)
    frame = first.images["top"]
    assert frame.shape == (480, 640, 3)
    red = (frame[..., 0] > 180) & (frame[..., 1] < 90)
    assert 20 < red.sum() < 5000  # the cube
    assert first.prompt.startswith("Pick up the cube")


SAME = """
import sys
sys.path.insert(0, sys.argv[1])
import gymnasium, gym_aloha, numpy as np
from sinew_eval.suites.aloha import Simulator  # noqa: E402
task = "gym_aloha/AlohaTransferCube-v0"
ours, theirs = Simulator([task]), gymnasium.make(task, obs_type="pixels_agent_pos", disable_env_checker=True)
a, _ = ours.reset(seed=7)
b, _ = theirs.reset(seed=7)
rng = np.random.default_rng(0)
for step in range(6):
    assert np.array_equal(a["agent_pos"], b["agent_pos"]), step
    if step in (0, 5):
        assert np.array_equal(np.asarray(a["pixels"]["top"]), b["pixels"]["top"]), step
    action = b["agent_pos"] + rng.normal(size=14) * 0.2
    a, reward_a, *_ = ours.step(action)
    b, reward_b, *_ = theirs.step(action)
    assert reward_a == reward_b
ours.reset(seed=0)
for step in range(400):  # angles that no arm has: the physics breaks down, and the episode with it
    _, reward, terminated, _, info = ours.step(np.linspace(-30, 25, 14) + 20 * rng.normal(size=14))
    if terminated:
        break
assert terminated and not info["is_success"] and reward == 0, (step, info)
"""


@pytest.mark.sims
@needs("aloha")
def test_aloha_is_gym_aloha_with_fewer_drawings() -> None:
    command = [str(foreign.interpreter("aloha")), "-c", SAME, str(PACKAGE.parent)]
    variables = {**os.environ, "MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=variables)
    assert done.returncode == 0, done.stderr


@pytest.mark.sims
@needs("pusht")
def test_pusht_goes_where_it_is_sent(capsys: pytest.CaptureFixture[str]) -> None:
    policy = Scripted(spec_of(2, 2, "image", 96), lambda observation: np.array([400.0, 120.0]))
    with serving(policy) as address:
        code, report, _ = evaluate(
            capsys, address, "--suite", "pusht", "--episodes", 1, "--replan", 1, "--workers", 1,
            "--env-options", json.dumps({"max_steps": 40}),
        )  # fmt: skip
    assert code == 0
    assert policy.seen[-1].state == pytest.approx([400, 120], abs=3)
    assert policy.seen[0].images["image"].shape == (96, 96, 3)
    assert report["control_hz"] == 10


@pytest.mark.sims
@needs("pusht")
def test_pusht_with_a_served_bundle(
    bundle: Callable[[int, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = bundle(2, 2)
    code, report, _ = evaluate(
        capsys, path, "--suite", "pusht", "--episodes", 2, "--workers", 2, "--compare", "replan=4",
        "--env-options", json.dumps({"max_steps": 20}),
    )  # fmt: skip
    assert code == 0
    assert [v["episodes"] for v in report["variants"]] == [2, 2]
    assert [v["chunks"] for v in report["variants"]] == [6, 10]


def metaworld_experts() -> dict[str, Any]:
    """Sentence -> Meta-World's own scripted policy. They are numpy alone; their package would import mujoco."""
    python = foreign.interpreter("metaworld")
    packages = next(python.parent.parent.glob("lib/python*/site-packages"))
    import importlib
    import types

    package = types.ModuleType("metaworld")
    package.__path__ = [str(packages / "metaworld")]
    sys.modules["metaworld"] = package
    try:
        experts = importlib.import_module("metaworld.policies").ENV_POLICY_MAP
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "metaworld"]:
            del sys.modules[name]
    sentences = json.loads((packages / "lerobot" / "envs" / "metaworld_config.json").read_text())
    return {sentence: experts[task] for task, sentence in sentences["TASK_DESCRIPTIONS"].items()}


@pytest.mark.sims
@needs("metaworld")
def test_metaworlds_experts_succeed_through_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Real experts behind the real protocol: state, sentence, action path and success are right end to end."""
    experts = metaworld_experts()
    running: dict[str, Any] = {}

    def act(observation: Observation) -> np.ndarray:
        if observation.prompt not in running:
            running[observation.prompt] = experts[observation.prompt]()
        return running[observation.prompt].get_action(observation.state.astype(np.float64))

    policy = Scripted(spec_of(39, 4), act)
    options = json.dumps({**PLAIN, "state": 39})
    wins = {}
    with serving(policy) as address:
        for task in ("drawer-close", "reach", "window-open", "pick-place"):
            code, report, said = evaluate(
                capsys, address, "--env", f"metaworld/{task}", "--episodes", 2, "--replan", 1, "--workers", 1,
                "--env-options", options, "--seed", 0,
            )  # fmt: skip
            assert code == 0, said
            wins[task] = report["variants"][0]["wins"]
    assert wins == dict.fromkeys(wins, 2)
    assert len(running) == 4
    assert policy.seen[0].images["image"].std() > 10


@pytest.mark.sims
@needs("metaworld")
def test_metaworld_the_same_twice_and_by_itself() -> None:
    """An episode does not depend on those before it, nor on who plays it."""
    elsewhere = foreign.Foreign(foreign.interpreter("metaworld"))
    task, variant = Task("metaworld_hard", {**PLAIN, "max_steps": 20}), Variant("expert", 1)
    many = campaign.run(task, [variant], range(8), workers=1, elsewhere=elsewhere)[0]
    two = campaign.run(task, [variant], (7, 1), workers=2, elsewhere=elsewhere)[0]
    assert content([many[7], many[1]]) == content(two)
    assert {e.task.partition("/")[0] for e in many} == {"hard"}
    assert len({e.task for e in many}) == 6


@pytest.mark.sims
@needs("metaworld")
def test_no_display_and_no_egl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    policy = Scripted(spec_of(4, 4), lambda observation: np.zeros(4))
    with serving(policy) as address:
        code, _, said = evaluate(capsys, address, "--env", "metaworld/reach", "--episodes", 1, "--workers", 1)
    assert code == 1
    assert "cannot draw here" in said
    assert policy.seen == []

"""Names of joints: matched by name whatever their order, mapped where they differ, refused where nothing says which."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sinew_client.arm.leaders import open_lerobot_leader
from sinew_client.control import LeaderError, Limits, LimitsError, Stopped
from sinew_client.control.facts import facts_of
from sinew_client.control.robots import (
    Dry,
    LeRobotArm,
    Pair,
    Renamed,
    RobotError,
    joints_of,
    lerobot_choice,
    lerobot_config,
    match_joints,
    open_class,
    open_lerobot,
    ordered,
    renamed,
)

from sinew.cli import main
from sinew.policy import open_bundle
from tests.cli.test_run import BLOCKS, PLAIN, last_json

ASSETS = BLOCKS.parent
POLICY: dict[str, Any] = {
    "cameras": [],
    "state": {"dim": 3, "names": ["pan", "lift", "grip"]},
    "action": {"dim": 3, "names": ["pan", "lift", "grip"]},
}


class Arm:
    """A robot whose numbers are in its own order, which it says."""

    def __init__(self, joints: Any = ("grip", "pan", "lift")):
        self.joints = joints
        self.state = np.float32([0.3, 0.1, 0.2])
        self.sent: list[np.ndarray] = []

    def observe(self) -> dict[str, Any]:
        return {"images": {}, "state": self.state, "action": self.state * 10}

    def sense(self) -> np.ndarray:
        return self.state

    def act(self, row: np.ndarray) -> None:
        self.sent.append(row)

    def hold(self) -> None:
        pass


def test_a_robot_in_another_order_is_matched_by_name() -> None:
    robot = Arm()
    found = ordered(robot, POLICY, {})
    seen = found.observe()
    np.testing.assert_array_equal(seen["state"], np.float32([0.1, 0.2, 0.3]))
    np.testing.assert_array_equal(seen["action"], np.float32([1, 2, 3]))
    sense = facts_of(found).sense
    assert sense is not None
    np.testing.assert_array_equal(sense(), np.float32([0.1, 0.2, 0.3]))
    found.act(np.float32([1, 2, 3]))  # pan, lift, grip
    np.testing.assert_array_equal(robot.sent[0], [3, 1, 2])
    assert facts_of(found).names("action") == ["pan", "lift", "grip"]
    same = Arm(["pan", "lift", "grip"])
    assert ordered(same, POLICY, {}) is same
    assert (
        ordered(robot, {"state": {"dim": 3}, "action": {"dim": 3}}, {}) is robot
    )  # of a policy without names
    assert facts_of(robot).names("action") == ["grip", "pan", "lift"]
    assert facts_of(Arm({"state": ["a"], "action": ["b"]})).names("action") == ["b"]
    assert facts_of(Arm(None)).names("state") == []


def test_a_robot_without_hardware_has_names_where_the_policy_names_all_and_counts() -> None:
    dry = Dry({**POLICY, "cameras": [{"name": "front", "height": 48, "width": 64}]})
    frame = dry.observe()["images"]["front"]
    assert (frame.shape, frame.dtype, frame.min(), frame.max()) == ((48, 64, 3), np.uint8, 0, 255)
    assert facts_of(dry).names("action") == ["pan", "lift", "grip"]
    for part in ("state", "action"):
        assert facts_of(Dry({**POLICY, part: {"dim": 3}})).joints is None
    dry.act(np.float32([1, 2, 3, 4]))
    dry.hold()
    np.testing.assert_array_equal(dry.observe()["state"], [1, 2, 3])
    assert (dry.commands, dry.holds) == (1, 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(order=st.permutations(range(6)), states=st.permutations(range(6)), rename=st.booleans())
def test_every_order_comes_out_right(order: list[int], states: list[int], rename: bool) -> None:
    """What the policy says for a name reaches the joint of that name, and what a joint measures its number."""
    names = [f"joint {k}" for k in range(6)]
    theirs = {name: f"motor {name[-1]}" if rename else name for name in names}
    policy = {"state": {"dim": 6, "names": names}, "action": {"dim": 6, "names": names}}
    joints = {"state": [theirs[names[k]] for k in states], "action": [theirs[names[k]] for k in order]}
    robot = Arm(joints)
    robot.state = np.float32([100 + k for k in states])
    found = ordered(robot, policy, theirs if rename else {})
    np.testing.assert_array_equal(found.observe()["state"], 100 + np.arange(6))
    found.act(np.arange(6, dtype=np.float32))
    np.testing.assert_array_equal(robot.sent[0], order)


@pytest.mark.parametrize(
    ("joints", "given_names", "message"),
    [
        (["pan", "lift", "jaw"], {}, "the policy's state has the joints pan, lift, grip, the robot pan, lift, jaw;"),
        (["pan", "lift", "jaw"], {"grip": "claw"}, "--set rename_joint=jaw=grip"),
        (["jaw", "b", "a"], {}, "map the robot's joints, for each of pan, lift, grip: --set rename_joint=NEW=JOINT"),
        (["pan", "lift", "jaw"], {"grip": "jaw", "wrist": "pan"}, "rename_joint: expected joints of the policy, pan"),
        (["pan", "lift", "jaw"], {"grip": "pan", "pan": "pan"}, "map the robot's joints, for each of pan, lift, grip"),
        (["pan", "lift"], {}, "joints: expected 3 names for its state, got 2"),
        ("pan", {}, "joints: expected a list of joint names"),
        ([1, 2, 3], {}, "joints: expected a list of joint names"),
        (["pan", "lift", 3], {}, "joints: expected a list of joint names"),
        ({"state": ["pan", "lift", "grip"]}, {}, "joints: expected a list of joint names"),
        (None, {"grip": "jaw"}, "rename_joint: expected a robot that names its joints"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(joints: Any, given_names: dict[str, str], message: str) -> None:
    with pytest.raises(RobotError) as error:
        ordered(Arm(joints), POLICY, given_names)
    assert message in str(error.value)


def test_lerobots_ending_is_no_difference() -> None:
    assert match_joints(["pan", "wrist.pos"], ["wrist", "pan.pos"], {}) == ["pan.pos", "wrist"]
    with pytest.raises(RobotError, match="shoulder"):
        match_joints(["shoulder"], ["shou"], {})
    assert joints_of({"state": {"dim": 1}, "action": {"dim": 1}}, ["a"], ["b"], {}) == (["a"], ["b"])


class Bus:
    """What one of LeRobot's robots has."""

    action_features: dict[str, Any] = dict.fromkeys(("grip.pos", "pan.pos", "lift.pos"), float)
    observation_features = action_features

    def __init__(self) -> None:
        self.sent: list[dict[str, float]] = []

    def get_observation(self) -> dict[str, float]:
        return {"grip.pos": 3.0, "pan.pos": 1.0, "lift.pos": 2.0}

    def send_action(self, action: dict[str, float]) -> None:
        self.sent.append(action)


def test_lerobots_joints_are_taken_by_name() -> None:
    bus = Bus()
    arm = LeRobotArm(bus, POLICY)
    np.testing.assert_array_equal(arm.observe()["state"], [1, 2, 3])
    arm.act(np.float32([10, 20, 30]))
    assert bus.sent == [{"pan.pos": 10.0, "lift.pos": 20.0, "grip.pos": 30.0}]
    arm.hold()
    assert bus.sent[1] == bus.sent[0]
    LeRobotArm(still := Bus(), POLICY).hold()  # before the first command: where it stands
    assert still.sent == [{"pan.pos": 1.0, "lift.pos": 2.0, "grip.pos": 3.0}]
    assert arm.motion == {"kind": "absolute"}
    other = {**POLICY, "action": {"dim": 3, "names": ["a", "b", "c"]}}
    with pytest.raises(RobotError, match="the policy's action has the joints a, b, c, the robot"):
        LeRobotArm(Bus(), other)
    mapped = LeRobotArm(Bus(), other, joints={"a": "lift.pos", "b": "grip.pos", "c": "pan.pos"})
    assert mapped.joints == ["lift.pos", "grip.pos", "pan.pos"]


def test_cameras_are_called_as_the_policy_calls_them() -> None:
    seen = {"images": {"cam0": 0, "cam1": 1}, "state": np.zeros(1)}
    robot = SimpleNamespace(observe=lambda: seen, act=None, hold=None)
    assert Renamed(robot, {"front": "cam1"}).observe() == {**seen, "images": {"cam0": 0, "front": 1}}
    swapped = Renamed(robot, {"cam0": "cam1", "cam1": "cam0"}).observe()
    assert swapped["images"] == {"cam0": 1, "cam1": 0}
    with pytest.raises(
        RobotError, match=r"--rename: expected a camera of the robot \(cam0, cam1\), got cam2"
    ):
        Renamed(robot, {"front": "cam2"}).observe()
    with pytest.raises(RobotError, match=r"--rename: expected a camera of the robot \(none\), got cam2"):
        renamed({}, {"front": "cam2"})


class Side(Bus):
    def __init__(self, log: list[str], name: str, degrees: bool = True, silent: bool = False):
        super().__init__()
        self.config, self._log, self._name, self._silent = (
            SimpleNamespace(use_degrees=degrees),
            log,
            name,
            silent,
        )

    def connect(self) -> None:
        self._log.append(f"{self._name} opens")
        if self._silent:
            raise ConnectionError("no servo answers")

    def disconnect(self) -> None:
        self._log.append(f"{self._name} closes")


def test_two_of_lerobots_arms_are_one_robot_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    left, right = Side(log, "left"), Side(log, "right")
    names = [f"{side}_{joint}" for side in ("right", "left") for joint in ("pan", "lift", "grip")]
    vector = {"dim": 6, "names": names}
    arm = LeRobotArm(Pair(left, right), {"cameras": [], "state": vector, "action": vector})
    assert (arm.joint_unit, arm.motion) == ("deg", {"kind": "absolute"})
    np.testing.assert_array_equal(arm.observe()["state"], [1, 2, 3, 1, 2, 3])
    arm.act(np.float32([1, 2, 3, 10, 20, 30]))
    assert right.sent == [{"pan.pos": 1.0, "lift.pos": 2.0, "grip.pos": 3.0}]
    assert left.sent == [{"pan.pos": 10.0, "lift.pos": 20.0, "grip.pos": 30.0}]
    arm.close()
    with pytest.raises(ConnectionError):
        Pair(left, Side(log, "right", silent=True)).connect()
    assert log == ["left closes", "right closes", "left opens", "right opens", "left closes"]
    monkeypatch.setitem(sys.modules, "lerobot.robots", None)
    for kind, options in (("a", {}), ("a+b", {"left": {}, "right": {}})):
        with pytest.raises(RobotError, match="needs the package lerobot in this environment"):
            open_lerobot(kind, options, POLICY)
    with pytest.raises(
        RobotError, match="use_degrees: expected the same value for both arms, got True and False"
    ):
        Pair(left, Side(log, "right", degrees=False))


@pytest.fixture
def lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is called of LeRobot; of one type, ``arm``, whose option ``device`` is the robot or leader itself."""
    types: Any = SimpleNamespace(get_choice_class={"arm": lambda device: device}.__getitem__)
    made: dict[str, Any] = dict.fromkeys(("RobotConfig", "TeleoperatorConfig"), types)
    made |= {f"make_{kind}_from_config": lambda device: device for kind in ("robot", "teleoperator")}
    for name in ("lerobot.robots", "lerobot.teleoperators"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__name__=name, **made))  # type: ignore[arg-type]
    draccus: Any = SimpleNamespace(utils=SimpleNamespace(DraccusException=TypeError))
    draccus.decode = lambda kind, options: kind(**options)
    monkeypatch.setitem(sys.modules, "draccus", draccus)


def refused(error: type[Exception], message: str, call: Any, *given: Any) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        call(*given)


@pytest.mark.usefixtures("lerobot")
def test_lerobots_arms_and_leaders_are_opened_by_their_type() -> None:
    log: list[str] = []
    left, right, leader = (Side(log, name) for name in ("left", "right", "leader"))
    assert open_lerobot("arm", {"device": left}, POLICY).robot is left
    names = [f"{side}_{joint}" for side in ("left", "right") for joint in ("pan", "lift", "grip")]
    both = {"cameras": [], "state": {"names": names}, "action": {"names": names}}
    each = {"right": {"device": right}, "left": {"device": left}}
    assert open_lerobot("arm+arm", each, both).robot.sides == {"left": left, "right": right}
    leader.feedback_features = {}  # type: ignore[attr-defined]
    found = open_lerobot_leader("arm", {"device": leader}, [*leader.action_features])
    assert found.teleoperator is leader
    assert log == ["left opens", "left opens", "right opens", "leader opens"]
    two = "expected two types, and options with the keys left and right, got"
    for kind, options, message in (
        ("arm", {"device": Side(log, "left", silent=True)}, "lerobot:arm: ConnectionError: no servo answers"),
        ("arm", {"turns": 1}, "lerobot:arm: ValueError: "),
        ("toaster", {}, "lerobot: expected one of the types that LeRobot registers, got 'toaster'"),
        ("arm", {"device": Pair(left, right)}, "robot: the policy's state has 3 values, but the robot has 6"),
        ("arm+arm+arm", each, f"lerobot:arm+arm+arm: {two} 3 types and the keys right, left"),
        ("arm+arm", {}, f"lerobot:arm+arm: {two} 2 types and the keys none"),
    ):
        refused(RobotError, message, open_lerobot, kind, options, POLICY)
    for kind, options, message in (
        ("arm", {"turns": 1}, "--takeover lerobot:arm: ValueError: "),
        ("toaster", {}, "--takeover lerobot:toaster: UnknownTypeError: expected one of the types"),
    ):
        refused(LeaderError, message, open_lerobot_leader, kind, options, [])


def test_what_lerobots_arm_sees_and_says() -> None:
    bus: Any = Bus()
    bus.action_features = {**Bus.action_features, "goal": (2, 2, 3)}  # no joint
    bus.observation_features = {**Bus.action_features, "top": (2, 2, 3)}
    bus.get_observation = lambda: {**Bus.get_observation(bus), "top": np.full((2, 2, 3), 7)}
    policy = {**POLICY, "cameras": [{"name": "front"}]}
    arm, before = LeRobotArm(bus, policy, {"front": "top"}), time.monotonic()
    seen = arm.observe()
    assert before <= seen["time"] <= time.monotonic()
    frame = seen["images"]["front"]
    assert (frame.dtype, frame.min(), frame.max()) == (np.uint8, 7, 7)
    assert not arm.concurrent_hold
    for degrees, unit in ((None, ""), (True, "deg"), (False, "of -100 to 100")):
        bus.config = SimpleNamespace(use_degrees=degrees)
        assert LeRobotArm(bus, POLICY).joint_unit == unit
    mixed: Any = Bus()
    mixed.action_features = mixed.observation_features = {"a": float, "b.pos": float}
    assert LeRobotArm(mixed, {"cameras": [], "state": {}, "action": {}}).motion is None
    two: Any = Bus()
    two.observation_features = {**bus.observation_features, "side": (2, 2, 3)}
    blind: Any = Bus()
    blind.observation_features = {}
    for robot, wanted, message in (
        (bus, policy, "cameras: the policy requires front; the robot has top. Map it with --rename top=front"),
        (two, policy, "cameras: the policy requires front; the robot has top, side. Map it with --rename NEW=front,"),
        (Bus(), policy, "cameras: the policy requires front; the robot has none"),
        (blind, POLICY, "robot: expected all joints of its actions in its state too, but its state has no grip.pos"),
        (Bus(), {**POLICY, "action": {"dim": 2}}, "robot: the policy's action has 2 values, but the robot has 3"),
    ):  # fmt: skip
        refused(RobotError, message, LeRobotArm, robot, wanted)


def test_a_class_is_opened_by_its_name() -> None:
    name = f"{__name__}:Arm"
    assert isinstance(open_class(name, {"joints": ["a"]}), Arm)
    found = open_class(name, {}, {"front": "cam"})
    assert isinstance(found, Renamed)
    for text, options, message in (
        (name, {"soon": 1}, f"robot {name}: TypeError: "),
        ("builtins:list", {}, "robot builtins:list: expected the methods observe, act and hold; observe is missing"),
        ("sys:path", {}, "robot sys:path: expected a class, got list"),
    ):  # fmt: skip
        refused(RobotError, message, open_class, text, options)


def test_numbers_without_names_keep_their_order() -> None:
    """Where a policy names those of its commands alone; and what else a robot has is its own."""
    robot = Arm()
    robot.observe = lambda: {"images": {}, "state": robot.state}  # type: ignore[method-assign]
    found = ordered(robot, {"state": {"dim": 3}, "action": {"names": ["pan", "lift", "grip"]}}, {})
    assert "action" not in found.observe()
    np.testing.assert_array_equal(found.observe()["state"], robot.state)
    found.act(np.float32([1, 2, 3]))
    np.testing.assert_array_equal(robot.sent[0], [3, 1, 2])
    unnamed = {"state": {"dim": 3}, "action": {"dim": 3}}
    said = "rename_joint: expected joints of the policy, but it names none, got grip"
    refused(RobotError, said, ordered, robot, unnamed, {"grip": "jaw"})
    other = Arm(None)
    assert ordered(other, POLICY, {}) is other


def test_limits_are_of_the_joints_that_they_name() -> None:
    found = Limits.parse({"low": [-1, -2, -3], "jerk": [1, None, 3], "names": ["grip", "pan", "lift"]}, 3)
    put = found.ordered(["pan", "lift", "grip"])
    assert put.names == ("pan", "lift", "grip")
    assert put.low.tolist() == [-2, -3, -1]
    assert put.jerk.tolist() == [np.inf, 3, 1]
    assert Limits.parse({"low": 0}, 2).ordered(["a", "b"]).names == ("a", "b")
    assert found.ordered([]) is found
    with pytest.raises(
        LimitsError, match="limits.names: expected the policy's names a, b, c, got grip, pan, lift"
    ):
        found.ordered(["a", "b", "c"])


# ----------------------------------------------------------------------------- bundles, and the command line


@pytest.mark.parametrize("path", sorted(ASSETS.glob("*.gguf")), ids=lambda path: path.stem)
def test_every_packaged_policy_names_its_numbers_and_says_their_units(path: Path) -> None:
    """As the environment that it plays has them."""
    spec = open_bundle(path).manifest.spec
    for vector in (spec.state, spec.action):
        assert len(vector.names) == len(vector.units) == vector.dim
        assert len(set(vector.names)) == vector.dim
    if "blocks" in path.stem or path.stem == "act":
        pytest.importorskip("mujoco")
        from sinew_eval.sim.blocks import STEP_SIZE, BlocksEnv

        assert spec.action.names == BlocksEnv.action_names
        assert spec.action.units[0] == f"{1e3 * STEP_SIZE:g} mm"


def test_names_and_units_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(BLOCKS)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "x [m], y [m], z [m], opening [m]" in said
    Image.new("RGB", (64, 64)).save(tmp_path / "frame.png")
    frames = [word for name in ("front", "wrist") for word in ("--image", f"{name}={tmp_path / 'frame.png'}")]
    state = ("--state", "0,0,0.1,0.06", "--prompt", "put the red block into the left bin")
    assert main(["infer", str(BLOCKS), *frames, *state]) == 0
    assert "x [20 mm]" in capsys.readouterr().out


class Gantry(Arm):
    """The blocks task's hand, whose numbers are in another order."""

    motion = {"kind": "absolute"}  # noqa: RUF012 - as a driver states it
    sent_rows: list[np.ndarray] = []  # noqa: RUF012 - read by the test

    def __init__(self, gripper: str = "gripper", opening: str = "opening"):
        super().__init__({"state": [opening, "z", "y", "x"], "action": [gripper, "z", "y", "x"]})
        self.state = np.float32([0.06, 0.1, 0, 0])

    def observe(self) -> dict[str, Any]:
        frame = np.zeros((64, 64, 3), np.uint8)
        return {"images": {"front": frame, "wrist": frame}, "state": self.state, "time": time.monotonic()}

    def act(self, row: np.ndarray) -> None:
        Gantry.sent_rows.append(row)
        if len(Gantry.sent_rows) % 6 == 0:
            raise Stopped("enough commands")


def test_a_run_takes_joints_and_limits_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same rows reach the robot, each number at the joint of its name, and limits bind those that they name."""
    limits = tmp_path / "limits.json"
    names = ["gripper", "x", "y", "z"]
    limits.write_text(json.dumps({"low": [-9, 0.25, -9, -9], "high": [9, 0.25, 9, 9], "names": names}))
    robot = ("--robot", f"{__name__}:Gantry", "--limits", str(limits), "--seconds", "600")
    Gantry.sent_rows.clear()
    assert main(["run", str(BLOCKS), *PLAIN, *robot, "--record", str(tmp_path / "run.jsonl"), "--json"]) == 0
    assert last_json(capsys)["settings"]["limits"]["names"] == ["x", "y", "z", "gripper"]
    lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    rows = [line["command"]["row"] for line in lines if line["event"] == "command" and line["command"]["row"]]
    assert len(rows) > 3
    np.testing.assert_array_equal(np.float32(rows)[:, ::-1], np.array(Gantry.sent_rows))
    assert (np.float32(rows)[:, 0] == 0.25).all()
    other = ("--robot-options", '{"gripper": "jaw", "opening": "gap"}')
    assert main(["run", str(BLOCKS), *PLAIN, *robot, *other]) == 1
    assert "map the robot's joints, such as --set rename_joint=gap=opening" in capsys.readouterr().err
    mapped = ("--set", "rename_joint=gap=opening", "--set", "rename_joint=jaw=gripper")
    assert main(["run", str(BLOCKS), *PLAIN, *robot, *other, *mapped]) == 0
    capsys.readouterr()
    assert main(["run", str(BLOCKS), *PLAIN, "--seconds", "1", "--set", "rename_joint=x=y"]) == 1
    assert "rename_joint: expected none with --robot dry" in capsys.readouterr().err
    assert main(["run", str(BLOCKS), *PLAIN, *robot, "--set", "rename_joint=x"]) == 1
    assert "rename_joint x: expected NEW=JOINT" in capsys.readouterr().err


def test_a_type_whose_driver_is_missing_says_so(tmp_path, monkeypatch) -> None:
    """And not that no type is called so; one that is there is found beside it."""
    package = tmp_path / "arms"
    for name, text in (("", ""), ("with_driver", "import a_driver_that_nobody_has"), ("plain", "KNOWN = 1")):
        (package / name).mkdir(parents=True, exist_ok=True)
        (package / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    arms = importlib.import_module("arms")

    def known(kind: str) -> type:
        if f"arms.{kind}" in sys.modules:
            return int
        raise KeyError(kind)

    base = SimpleNamespace(get_choice_class=known)
    assert lerobot_choice(arms, base, "plain") is int
    with pytest.raises(
        ImportError, match="got 'with_driver'.*with_driver: No module named 'a_driver_that_nobody"
    ):
        lerobot_choice(arms, base, "with_driver")
    (package / "with_driver" / "__init__.py").write_text("")
    with pytest.raises(KeyError):
        lerobot_choice(arms, base, "toaster")


def test_the_modules_of_an_arms_cameras_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LeRobot knows a camera's type once its module, which may have another name, has been imported."""
    registry = (
        "class CameraConfig:\n    known = {}\n    get_choice_class = known.__getitem__\n"
        "    get_known_choices = classmethod(lambda cls: cls.known)\n"
    )
    register = "from lerobot.cameras import CameraConfig\nCameraConfig.known[{!r}] = int\n"
    for name, text in (
        ("", ""),
        ("cameras", registry),
        ("cameras/opencv", register.format("opencv")),
        ("cameras/realsense", register.format("intelrealsense")),
    ):
        (tmp_path / "lerobot" / name).mkdir(parents=True)
        (tmp_path / "lerobot" / name / "__init__.py").write_text(text)
    (tmp_path / "elsewhere.py").write_text("raise AssertionError('imported')\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lerobot"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    draccus: Any = SimpleNamespace(utils=SimpleNamespace(DraccusException=TypeError))
    draccus.decode = lambda _, options: options
    monkeypatch.setitem(sys.modules, "draccus", draccus)
    try:
        front = {"type": "opencv", "index_or_path": 0}
        both = {
            "cameras": {"front": front},
            "left_arm_config": {"cameras": {"wrist": {"type": "intelrealsense"}}},
        }
        assert lerobot_config(dict, {"cameras": {"front": front}}) == {"cameras": {"front": front}}
        assert "lerobot.cameras.realsense" not in sys.modules
        assert lerobot_config(dict, both) == both
        assert list(importlib.import_module("lerobot.cameras").CameraConfig.known) == [
            "opencv",
            "intelrealsense",
        ]
        assert lerobot_config(dict, {"cameras": {"front": {"index_or_path": 0}}})  # LeRobot rejects this one
        for kind in ("webcam", "elsewhere", "..elsewhere", "opencv.x"):
            with pytest.raises(
                ValueError, match="package named lerobot_camera_NAME that registers it$"
            ) as caught:
                lerobot_config(dict, {"cameras": {"front": {"type": kind}}})
            told = f"cameras.front.type: expected one of intelrealsense, opencv, got {kind!r}; to add a type of your"
            assert str(caught.value).startswith(told)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lerobot"]:
            del sys.modules[name]


def test_an_installed_plugin_of_lerobot_is_found(tmp_path, monkeypatch) -> None:
    """As LeRobot's own commands find it: by the distribution's name, or by the module's in releases up to 0.4."""
    registered: dict[str, type] = {}
    (tmp_path / "arms2").mkdir()
    (tmp_path / "arms2" / "__init__.py").write_text("types = {}\n")
    for name in ("lerobot_robot_dry", "lerobot_teleoperator_dry"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"import arms2; arms2.types[{name[8:]!r}] = int\n")
    (tmp_path / "lerobot_robot_broken.py").write_text("raise RuntimeError('no bus')\n")
    (tmp_path / "not_a_plugin_of_lerobot.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    arms = importlib.import_module("arms2")
    registered = arms.types
    base = SimpleNamespace(get_choice_class=registered.__getitem__, get_known_choices=lambda: registered)
    assert lerobot_choice(arms, base, "robot_dry") is int
    assert lerobot_choice(arms, base, "teleoperator_dry") is int
    with pytest.raises(ImportError, match="lerobot_robot_broken: RuntimeError: no bus"):
        lerobot_choice(arms, base, "robot_broken")
    (tmp_path / "lerobot_robot_broken.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(KeyError) as caught:
        lerobot_choice(arms, base, "robot_dri")
    assert str(caught.value).startswith(
        "expected one of robot_dry, teleoperator_dry, got 'robot_dri'; to add a type"
    )

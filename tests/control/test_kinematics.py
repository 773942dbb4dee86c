"""Poses of an arm's tip and its joints: against MuJoCo's own, within limits, or refused by name."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.control import Journal, Loop, NoCommand, NoObservation, Settings, repeat
from sinew_client.control.end_effector import EndEffector, KinematicsOptions, parse_parts, parts_of
from sinew_client.control.kinematics import Chain, KinematicsError, read_chain
from sinew_client.control.robots import RobotError
from sinew_client.rotations import (
    from_6d,
    from_quaternion,
    from_rpy,
    from_vector,
    to_6d,
    to_quaternion,
    to_rpy,
    to_vector,
)

from sinew.cli import main
from sinew.cli.run_robot import RobotFlags
from tests.cli.test_run import BLOCKS, last_json
from tests.control.test_envelope import driven

mujoco = pytest.importorskip("mujoco")
from benchmarks.kinematics import ARMS, ROBOTS, compiled, drawn, measured, places  # noqa: E402

UR5E = ROBOTS / "ur5e.urdf"
RNG = np.random.default_rng


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("count", [500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_forward_and_inverse_are_mujocos(arm: str, count: int) -> None:
    found = measured(arm, count, near=0.2)
    assert found["forward_m"] < 1e-12
    assert found["forward_turn"] < 1e-12
    assert found["near"]["there"] >= 0.999 * count
    assert found["middle"]["there"] < count  # so that what is not found is counted as that
    assert found["singular"] < 0.2


@pytest.mark.parametrize("arm", ARMS)
def test_the_jacobian_is_mujocos(arm: str) -> None:
    chain, model = read_chain(ROBOTS / f"{arm}.urdf"), compiled(ROBOTS / f"{arm}.urdf")
    data, size = mujoco.MjData(model), len(chain.joints)
    for joints in drawn(chain, 20, RNG(1)):
        data.qpos[:] = joints
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        moved, turned = np.zeros((3, size)), np.zeros((3, size))
        mujoco.mj_jacBody(model, data, moved, turned, model.body(chain.tip).id)
        tip = chain.forward(joints)
        np.testing.assert_allclose(tip.jacobian, np.vstack([moved, turned]), atol=1e-13)
        np.testing.assert_allclose(tip.anchors, data.xanchor, atol=1e-13)


MJCF = """<mujoco><compiler angle="degree"/><default><joint axis="0 1 0" range="-100 100"/></default><worldbody>
<body name="stand" pos="0.1 0.2 0.3" euler="10 20 30"><joint name="rail" type="slide" axis="1 0 0" range="-0.5 0.5"/>
<geom size="0.1"/><body name="arm" pos="0 0 0.2" quat="0.9 0.1 0.3 0.2">
<joint name="bend" pos="0.05 0 0.02"/><joint name="turn" axis="0 0.6 0.8" pos="0 0.1 0" ref="25"/><geom size="0.1"/>
<body name="hand" pos="0.3 0 0"><joint name="twist" axis="1 1 0"/><geom size="0.1"/>
<site name="tool" pos="0.1 0.02 0" euler="0 0 45"/></body></body></body></worldbody></mujoco>"""


def test_mjcf_is_read_with_anchors_references_and_defaults(tmp_path: Path) -> None:
    (tmp_path / "arm.xml").write_text(MJCF)
    chain = read_chain(tmp_path / "arm.xml")
    assert (chain.joints, chain.base, chain.tip) == (("rail", "bend", "turn", "twist"), "world", "tool")
    np.testing.assert_allclose(chain.high, [0.5, *3 * [np.deg2rad(100)]])
    model = mujoco.MjModel.from_xml_string(MJCF)
    data = mujoco.MjData(model)
    for joints in drawn(chain, 20, RNG(2)):
        data.qpos[:] = joints
        mujoco.mj_kinematics(model, data)
        tip = chain.forward(joints)
        np.testing.assert_allclose(tip.place, data.site("tool").xpos, atol=1e-14)
        np.testing.assert_allclose(tip.turn, data.site("tool").xmat.reshape(3, 3), atol=1e-14)
        step = 1e-6 * np.eye(4)
        moved = [
            (chain.forward(joints + each).place - chain.forward(joints - each).place) / 2e-6 for each in step
        ]
        np.testing.assert_allclose(tip.jacobian[:3].T, moved, atol=1e-8)
    assert read_chain(tmp_path / "arm.xml", "hand", "stand").joints == ("bend", "turn", "twist")


URDF = (
    '<robot name="r"><link name="a"/><link name="b"/><joint name="j" type="{}">{}<parent link="a"/><child link="b"/>'
    "</joint></robot>"
)
LIMIT = '<limit lower="-1" upper="1"/>'


@pytest.mark.parametrize(
    ("text", "named", "message"),
    [
        ("<robot", {}, "not well-formed|no element|unclosed"),
        ("<!DOCTYPE x><robot/>", {}, "expected a description without a document type"),
        ("<sdf/>", {}, r"expected URDF \(robot\) or MJCF \(mujoco\), got 'sdf'"),
        (URDF.format("fixed", ""), {}, "expected joints between a and b, got none"),
        (
            URDF.format("floating", ""),
            {},
            "joint j: expected revolute, continuous or prismatic, got floating",
        ),
        (
            URDF.format("revolute", LIMIT + '<mimic joint="k"/>'),
            {},
            "joint j: expected one that moves by itself",
        ),
        (URDF.format("revolute", LIMIT + '<axis xyz="0 0 0"/>'), {}, "joint j: expected an axis and a range"),
        (
            URDF.format("revolute", '<limit lower="1" upper="-1"/>'),
            {},
            "joint j: expected an axis and a range",
        ),
        (
            URDF.format("revolute", '<origin xyz="0 nan 0"/>'),
            {},
            "joint j: expected 3 numbers, got '0 nan 0'",
        ),
        (URDF.format("revolute", LIMIT), {"tip": "c"}, "tip: expected one of b, got 'c'"),
        (URDF.format("revolute", LIMIT), {"base": "c"}, "base: expected one of a, b, got 'c'"),
        (URDF.format("revolute", LIMIT), {"tip": "a", "base": "b"}, "base: expected a link above a, got b"),
        ("<mujoco><worldbody><body pos='x'/></worldbody></mujoco>", {}, "bad format|Error"),
    ],
)
def test_a_description_is_refused_by_name(
    text: str, named: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / ("arm.xml" if text.startswith("<mujoco") else "arm.urdf")
    path.write_text(text)
    with pytest.raises(KinematicsError, match=message):
        read_chain(path, **named)


def test_rotations_come_back() -> None:
    turns = from_vector(RNG(3).normal(size=(500, 3)) * RNG(4).uniform(0, np.pi, (500, 1)) / 2)
    for there, back in (
        (to_vector, from_vector),
        (to_6d, from_6d),
        (to_quaternion, from_quaternion),
        (to_rpy, from_rpy),
    ):
        np.testing.assert_allclose(back(there(turns)), turns, atol=1e-12)
    locked = from_rpy(np.array([0.3, np.pi / 2, 0.5]))
    np.testing.assert_allclose(from_rpy(to_rpy(locked)), locked, atol=1e-12)
    assert to_rpy(locked)[0] == 0.0  # roll and yaw turn about one axis there
    np.testing.assert_allclose(  # URDF's: about fixed axes, roll first
        from_rpy(np.array([np.pi / 2, 0.0, np.pi / 2])) @ [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], atol=1e-12
    )


# ----------------------------------------------------------------------------- a robot that takes poses


POSES: dict[str, Any] = {
    "cameras": [],
    "state": {"dim": 7, "names": ["x", "y", "z", "rx", "ry", "rz", "gripper"]},
    "action": {
        "dim": 7,
        "names": ["x", "y", "z", "rx", "ry", "rz", "gripper"],
        "units": ["m"] * 3 + ["rad"] * 3 + [""],
    },
}


class Bench:
    """Joints that are where they were sent, in an order and unit of its own."""

    def __init__(self, chain: Chain, degrees: bool = False):
        self.joints = [*reversed(chain.joints), "gripper"]
        self.joint_unit = "deg" if degrees else "rad"
        self._unit = 180 / np.pi if degrees else 1.0
        self.state = np.float64([*self._unit * chain.ready()[::-1], 0.5])
        self.sent: list[np.ndarray] = []
        self.held = 0

    def observe(self) -> dict[str, Any]:
        return {"images": {}, "state": self.state.copy(), "age": 0.0}

    def act(self, row: np.ndarray) -> None:
        self.sent.append(row)
        self.state = np.array(row, np.float64)

    def hold(self) -> None:
        self.held += 1

    def angles(self) -> np.ndarray:
        return self.state[:-1][::-1] / self._unit


def arm_of(
    name: str = "ur5e", degrees: bool = False, policy: dict[str, Any] = POSES, **options: Any
) -> tuple[EndEffector, Bench]:
    chain = read_chain(ROBOTS / f"{name}.urdf")
    bench = Bench(chain, degrees)
    return EndEffector(bench, chain, KinematicsOptions.parse(options), policy, 20.0), bench


@pytest.mark.parametrize(("arm", "degrees"), [("ur5e", False), ("panda", True)])
def test_every_command_is_at_its_pose_or_is_refused_by_name(arm: str, degrees: bool) -> None:
    """Poses over and beyond the arm's space: MuJoCo says where each command leads, within ranges and velocities."""
    robot, bench = arm_of(arm, degrees)
    chain, model, rng = robot.chain, compiled(ROBOTS / f"{arm}.urdf"), RNG(5)
    wanted = drawn(chain, 45, rng)
    refused: dict[str, int] = {}
    for number, goal in enumerate(wanted):
        here = bench.angles()
        near = here + rng.uniform(-1, 1, len(here)) * (0.1 if number % 2 else 0.02)
        tip = chain.forward(near if number % 3 else goal)
        place = tip.place * (1.0 if number % 5 else 3.0)
        row = np.float32([*place, *to_vector(tip.turn), 0.25])
        sent, held = len(bench.sent), bench.held
        try:
            robot.act(row)
        except NoCommand as no:
            robot.hold()
            refused[no.reason.split(":")[0].split(",")[0]] = 1
            assert (len(bench.sent), bench.held) == (sent, held + 1)
            continue
        assert bench.sent[-1][-1] == np.float32(0.25)
        joints = bench.angles()
        (there,), (turned,) = places(model, chain.tip, joints[None])
        assert np.linalg.norm(there - place) < 1.1e-3
        assert np.linalg.norm(to_vector(turned @ tip.turn.T)) < 1.1e-2
        assert np.all((joints >= chain.low - 1e-6) & (joints <= chain.high + 1e-6))
        assert np.all(np.abs(joints - here) * 20.0 <= chain.velocity + 1e-3)
        seen = robot.observe()["state"]
        np.testing.assert_allclose(seen[:3], place, atol=1.1e-3)
    assert "out of reach" in refused
    assert any("would have to move faster than" in reason for reason in refused)
    assert len(bench.sent) > 10


KINDS = ("walk", "walk", "hurry", "beyond", "folded", "nan")


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    chunks=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 6)), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_whatever_poses_a_server_says_the_joints_keep_their_limits(
    chunks: list[tuple[str, int]], seed: int
) -> None:
    """Each control step has a command at its pose, within ranges, velocities and away from singular poses, or a hold:
    of a server that walks, hurries, points beyond the arm, at its singular wrist, or at no number."""
    robot, bench = arm_of()
    chain, model, rng = robot.chain, compiled(UR5E), RNG(seed)
    joints, said = chain.ready(), []
    for kind, count in chunks:
        rows = []
        for _ in range(count):
            joints = np.clip(joints + rng.uniform(-0.05, 0.05, 6), chain.low, chain.high)
            goal = {"hurry": joints + rng.uniform(-2, 2, 6), "folded": joints * [1, 1, 1, 1, 0, 1]}.get(
                kind, joints
            )
            tip = chain.forward(goal)
            row = [*tip.place * (3.0 if kind == "beyond" else 1.0), *to_vector(tip.turn), 0.25]
            rows.append([np.nan] * 7 if kind == "nan" else row)
        said.append(rows)

    class Watched(Bench):
        position = np.zeros(7)  # as many numbers as a pose

        def __init__(self) -> None:
            self.observe, self.hold = robot.observe, robot.hold  # type: ignore[method-assign]

        def act(self, row: np.ndarray) -> None:
            before = bench.angles()
            robot.act(row)
            now = bench.angles()
            ((there,), (turned,)) = places(model, chain.tip, now[None])
            assert np.linalg.norm(there - row[:3]) < 1.1e-3
            assert np.linalg.norm(to_vector(turned @ from_vector(row[3:6].astype(float)).T)) < 1.1e-2
            assert np.all((now >= chain.low - 1e-6) & (now <= chain.high + 1e-6))
            assert np.all(np.abs(now - before) * 20.0 <= chain.velocity + 1e-3)
            least = [chain.singularity(each, True).least for each in (now, before)]
            assert least[0] >= min(0.01, least[1]) - 1e-6

    driven(Watched(), said, 30, motion={"kind": "absolute"})  # type: ignore[arg-type]
    assert len(bench.sent) + bench.held == 30 + 1  # a command or a hold in each step, and a hold at the end
    if {kind for kind, _ in chunks} == {"walk"}:
        assert len(bench.sent) > 10


def test_a_singular_pose_is_refused_and_left() -> None:
    """The wrist of a UR is singular where its second joint is 0: the way there is refused, the way out is not."""
    robot, bench = arm_of(singular=0.02)
    chain = robot.chain

    def pose(wrist: float) -> np.ndarray:
        tip = chain.forward(np.array([0.2, -1.2, 1.5, -1.0, wrist, 0.4]))
        return np.float32([*tip.place, *to_vector(tip.turn), 0.0])

    bench.state = np.float64([0.4, 0.5, -1.0, 1.5, -1.2, 0.2, 0.0])
    reason = ""
    for wrist in np.arange(0.4, -0.05, -0.1):
        try:
            robot.act(pose(wrist))
        except NoCommand as no:
            reason = str(no)
            break
    assert re.match(
        r"singular: wrist_1_joint.* would move without the tip: .* expected at least 0.02", reason
    ), reason
    assert 0.0 < bench.angles()[4] < 0.4
    bench.state[1] = 0.01  # a person has brought it there
    robot.hold()
    robot.observe()
    robot.act(pose(0.1))
    assert bench.angles()[4] == pytest.approx(0.1, abs=1e-4)


@pytest.mark.parametrize(
    ("form", "turn", "why"),
    [
        ("quat", [0, 0, 0, 0], "a quaternion of length 0"),
        ("wxyz", [0, 1e-5, 0, 0], "a quaternion of length 1e-05"),
        ("rot6d", [0, 0, 0, 0, 1, 0], "a row of length 0"),
        ("rot6d", [1, 0, 0, -2, 1e-4, 0], "two rows that are parallel"),
    ],
)
def test_numbers_of_no_rotation_are_refused_by_name(form: str, turn: list[float], why: str) -> None:
    size = 4 + len(turn)
    policy = {"cameras": [], **{what: {"dim": size} for what in ("state", "action")}}
    robot, bench = arm_of(policy=policy, action=f"xyz,{form},gripper", state=f"xyz,{form},gripper")
    seen = robot.observe()["state"]
    with pytest.raises(NoCommand, match=f"the {form} of a row is no rotation: it has {why}"):
        robot.act(np.float32([*seen[:3], *turn, 0.0]))
    assert not bench.sent
    robot.act(seen)  # its own pose is one
    assert len(bench.sent) == 1


def test_offsets_are_of_the_base_or_of_the_tip() -> None:
    policy = {**POSES, "action": {"dim": 6}, "state": {"dim": 9}}
    for frame in ("base", "tip"):
        robot, bench = without_gripper(
            policy, action="dxyz*0.02,drotvec*0.1", state="xyz,rot6d", offsets=frame
        )
        before = robot.chain.forward(bench.angles())
        robot.act(np.float32([0.5, 0.0, -0.5, 0.0, 0.3, 0.0]))
        after = robot.chain.forward(bench.angles())
        way, turn = np.array([0.01, 0.0, -0.01]), from_vector(np.array([0.0, 0.03, 0.0]))
        own = frame == "tip"
        np.testing.assert_allclose(after.place, before.place + (before.turn @ way if own else way), atol=1e-6)
        np.testing.assert_allclose(after.turn, before.turn @ turn if own else turn @ before.turn, atol=1e-6)


def without_gripper(policy: dict[str, Any], **options: Any) -> tuple[EndEffector, Bench]:
    chain = read_chain(UR5E)
    bench = Bench(chain)
    bench.joints, bench.state = bench.joints[:-1], bench.state[:-1]
    bench.angles = lambda: bench.state[::-1]  # type: ignore[method-assign]
    return EndEffector(bench, chain, KinematicsOptions.parse(options), policy, 20.0), bench


def test_an_arm_of_five_joints_reaches_the_place() -> None:
    """Of a rotation that it cannot have it takes what is near, and goes exactly to the place."""
    chain = read_chain(UR5E, tip="wrist_2_link")
    assert len(chain.joints) == 5
    bench = Bench(chain)
    with pytest.raises(
        KinematicsError, match="rotation: expected at least 6 joints for exact, base to wrist_2_link has 5"
    ):
        EndEffector(bench, chain, KinematicsOptions.parse({"rotation": "exact"}), POSES, 20.0)
    robot = EndEffector(bench, chain, KinematicsOptions(), POSES, 20.0)
    assert robot.rotation == "near"
    for number in range(20):
        tip = chain.forward(bench.angles())
        wanted = tip.place + RNG(number).uniform(-0.005, 0.005, 3)
        turn = from_vector(RNG(number).uniform(-0.05, 0.05, 3)) @ tip.turn
        robot.act(np.float32([*wanted, *to_vector(turn), 0.0]))
        there = chain.forward(bench.angles())
        assert np.linalg.norm(there.place - wanted) < 1e-6
        assert np.linalg.norm(to_vector(there.turn @ turn.T)) < 0.2


@pytest.mark.parametrize(
    ("names", "offsets", "parts"),
    [
        (("x", "y", "z", "roll", "pitch", "yaw", "gripper"), (), "xyz,rpy,gripper"),
        (("eef.x", "eef.y", "eef.z", "eef.qx", "eef.qy", "eef.qz", "eef.qw"), (), "xyz,quat"),
        (("x", "y", "z", "opening"), (0, 1, 2), "dxyz,gripper"),
        (("ee_x", "ee_y", "ee_z", "rx", "ry", "rz"), (), "xyz,rotvec"),
        (("shoulder_pan", "elbow"), (), ""),
        ((), (), ""),
    ],
)
def test_names_say_what_the_numbers_are(names: tuple[str, ...], offsets: tuple[int, ...], parts: str) -> None:
    assert parts_of(names, offsets) == parts


@pytest.mark.parametrize(
    ("units", "text", "message"),
    [
        (("rad", "rad", "rad"), "xyz", "action.xyz: expected the unit m, cm or mm, the policy says 'rad'"),
        (("m", "m", "m"), "rpy", "action.rpy: expected the unit rad or deg, the policy says 'm'"),
        (("m", "mm", "m"), "xyz", "action.xyz: expected one unit, the policy says m, mm, m"),
        ((), "xyz*0", "action.xyz: expected a size above 0"),
        ((), "abc", "action: expected xyz, rpy"),
        ((), "xyz,rpy,quat", "action: expected one place and one rotation"),
    ],
)
def test_units_are_the_bundles_or_are_refused(units: tuple[str, ...], text: str, message: str) -> None:
    with pytest.raises(KinematicsError, match=re.escape(message)):
        parse_parts(text, units)


def test_units_are_taken_from_the_bundle() -> None:
    xyz, turned = parse_parts("xyz,rpy", ("mm",) * 3 + ("deg",) * 3)
    np.testing.assert_allclose([xyz.unit, turned.unit], [1e-3, np.pi / 180])
    (step,) = parse_parts("dxyz", ("20 mm",) * 3)
    assert (step.unit, step.offset) == (0.02, True)
    policy = {**POSES, "state": {**POSES["state"], "units": ["mm"] * 3 + ["deg"] * 3 + [""]}}
    robot, bench = arm_of(policy=policy)
    tip = robot.chain.forward(bench.angles())
    np.testing.assert_allclose(
        robot.observe()["state"], [*1e3 * tip.place, *np.rad2deg(to_vector(tip.turn)), 0.5], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tips": "x"}, "tips: unknown; known are tip, base"),
        ({"tip": 3}, "tip: expected a text, got"),
        ({"unit": "turns"}, "unit: expected one of rad, deg, got 'turns'"),
        ({"within": 3}, "within: expected 2 numbers above 0"),
        ({"singular": -1}, "singular: expected one number above 0"),
        ({"velocity": [1, 2]}, "velocity: expected one number above 0, or 6"),
        ({"rotation": "keep", "action": "joints"}, "action: expected poses, got 'joints'"),
        ({"action": "xyz,rpy"}, "action: expected 7 numbers, as the policy has, got 6"),
        ({"state": "dxyz,rotvec,gripper"}, "state: expected no offsets"),
        ({"action": "xyz*1,gripper,gripper,gripper,gripper"}, "expected 4 numbers beside the arm's"),
        ({"state": "xyz,gripper,gripper,gripper,gripper"}, "state: expected at most 1 grippers"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((KinematicsError, RobotError), match=re.escape(message)):
        arm_of(**options)


def test_joints_of_another_unit_or_name_are_refused() -> None:
    chain = read_chain(UR5E)
    bench = Bench(chain)
    bench.joint_unit = "of -100 to 100"
    with pytest.raises(RobotError, match="expected joints in radians or degrees, got of -100 to 100"):
        EndEffector(bench, chain, KinematicsOptions(), POSES, 20.0)
    bench = Bench(chain)
    bench.joints = [name.replace("_joint", "") for name in bench.joints]
    with pytest.raises(RobotError, match="--rename-joint"):
        EndEffector(bench, chain, KinematicsOptions(), POSES, 20.0)
    said = {name: name.replace("_joint", "") for name in chain.joints}
    assert EndEffector(bench, chain, KinematicsOptions(), POSES, 20.0, said).observe()["state"].shape == (7,)


def test_a_state_that_is_not_finite_is_no_observation_and_moves_nothing() -> None:
    policy = {
        **POSES,
        "action": {**POSES["action"], "names": ["dx", "dy", "dz", "rx", "ry", "rz", "gripper"]},
    }
    robot, bench = arm_of(policy=policy, action="dxyz,drotvec,gripper")
    row = np.zeros(7, np.float32)
    robot.act(row)
    sent = len(bench.sent)
    for number in (np.nan, np.inf):
        bench.state[2] = number
        with pytest.raises(NoObservation, match="the state is not finite"):
            robot.observe()
        with pytest.raises(NoCommand, match="the state is not finite"):
            robot.act(row)
    assert len(bench.sent) == sent


def test_the_commands_of_a_control_step_share_its_velocity() -> None:
    """Of two commands in a control step each may go half as far as the one of a step."""
    for substeps, taken in ((1, True), (2, False)):
        opener = RobotFlags("dry", kinematics=UR5E, hz=20.0).opener(substeps)
        robot: Any = opener({**POSES, "control_hz": 5.0})[0]
        start = robot.chain.ready()
        robot.observe()
        start[0] += 0.75 * robot.chain.velocity[0] / 20.0
        tip = robot.chain.forward(start)
        row = np.float32([*tip.place, *to_vector(tip.turn), 0.0])
        refused: Any = pytest.raises(NoCommand, match="faster than")
        with contextlib.nullcontext() if taken else refused:
            robot.act(row)


def test_a_loop_holds_for_what_is_refused_and_its_journal_repeats_it(tmp_path: Path) -> None:
    robot, bench = arm_of()
    start = np.asarray(robot.observe()["state"])
    chunks = [np.tile(start, (10, 1)), np.tile(start + np.float32([9, 0, 0, 0, 0, 0, 0]), (10, 1))]
    asked: list[int] = []

    def connect() -> Any:
        def call(observation: Any, seconds: float) -> np.ndarray:
            asked.append(1)
            return chunks[len(asked) // 2 % 2]

        return call

    settings = Settings(
        hz=20.0, handover="freeze", replan="full", motion={"kind": "absolute"}, limits={"velocity": 100.0}
    )
    loop = Loop(robot, connect, settings, 7, "go")
    journal = Journal(tmp_path / "run.jsonl", settings, 7)
    loop.listeners.append(journal.put)
    report = loop.run(60)
    journal.close()
    reasons = [reason for reason in report.held if reason.startswith("out of reach")]
    assert len(reasons) == 1
    assert "no chunk yet" not in report.held or report.held["no chunk yet"] < 10
    assert report.executed == len(bench.sent)
    assert report.executed + sum(report.held.values()) == 60
    assert bench.held > 0
    found = repeat(tmp_path / "run.jsonl")
    assert (found.commands, found.differences) == (60, [])


# ----------------------------------------------------------------------------- from the command line


LINE = ("run", str(BLOCKS), "--prompt", "go", "--timeout", "60")
DRY = (*LINE, "--robot", "dry", "--kinematics", str(UR5E))


@pytest.mark.usefixtures("dry_ends")
def test_a_policy_of_poses_drives_a_robot_of_joints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, "--seconds", "60", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.strip().splitlines()[-1])
    assert report["executed"] > 0
    assert (
        "6 joints from base to tool0; action dxyz*0.02,gripper, state xyz,gripper; rotation keep"
        in printed.err
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--robot", "dry", "--kinematics", "nothing.urdf"), "--kinematics: nothing.urdf"),
        ((*DRY[6:], "--kinematics-options", '{"tip": "hand"}'), "tip: expected one of tool0, got 'hand'"),
        (
            (*DRY[6:], "--kinematics-options", '{"action": "xyz,rpy"}'),
            "action.rpy: expected the unit rad or deg",
        ),
        (
            ("--robot", "dry", "--kinematics-options", "{}"),
            "--kinematics-options: expected --kinematics beside it",
        ),
        (
            ("--robot", "blocks", "--kinematics", str(UR5E)),
            "--kinematics: expected a robot that takes joints, got --robot gym:",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(
    more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LINE, "--seconds", "1", *more]) == 1
    assert message in capsys.readouterr().err


def test_doctor_compares_where_the_tip_is_with_the_training_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lamed.py").write_text(
        "import numpy as np\n"
        "class Arm:\n"
        "    def observe(self):\n"
        "        frame = np.zeros((64, 64, 3), np.uint8)\n"
        "        return {'images': {'front': frame, 'wrist': frame}, 'state': [0, -1.2, 1.8, -2.2, -1.57, 0, 0.03]}\n"
        "    def act(self, row): raise AssertionError('commanded')\n"
        "    def hold(self): raise AssertionError('commanded')\n"
    )
    monkeypatch.chdir(tmp_path)
    line = [
        "doctor",
        str(BLOCKS),
        "--observe",
        "lamed:Arm",
        "--kinematics",
        str(UR5E),
        "--seconds",
        "0.3",
        "--json",
    ]
    assert main(line) == 1
    found = [
        each for each in last_json(capsys)["checks"] if "x" in each["subject"] or "state" in each["subject"]
    ]
    assert found, "a base that is not the policy's was not seen"

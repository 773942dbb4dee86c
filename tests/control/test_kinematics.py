"""Poses of an arm's tip and its joints: against MuJoCo's own, within limits, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sinew_client.arm.end_effector import (
    EndEffector,
    KinematicsOptions,
    KnownArm,
    moves_joints,
    numbers_of,
    parse_parts,
    parts_of,
)
from sinew_client.arm.kinematics import Chain, KinematicsError, read_chain
from sinew_client.arm.takeover import Takeover
from sinew_client.control import (
    Journal,
    Loop,
    NoCommand,
    NoObservation,
    Settings,
    SimulatedPace,
    repeat,
)
from sinew_client.control.facts import facts_of
from sinew_client.control.motion import parse_motion
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
<body name="stand" pos="0.1 0.2 0.3" euler="10 20 30">
<joint name="rail" type="slide" axis="1 0 0" range="-0.5 0.5" ref="0.2"/>
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


def test_the_only_end_of_an_mjcf_is_its_tip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site, or a body that none hangs from; of several the names are said."""
    body = '<body name="{}"><joint name="{}" axis="0 0 1"/><geom size="0.1"/>{}</body>'
    path = tmp_path / "arm.xml"

    def chain(*bodies: str, **named: str) -> Chain:
        path.write_text(f"<mujoco><worldbody>{''.join(bodies)}</worldbody></mujoco>")
        return read_chain(path, **named)

    hand = chain(body.format("hand", "j", ""))
    assert (hand.tip, hand.low.tolist(), hand.high.tolist()) == (
        "hand",
        [-np.inf],
        [np.inf],
    )  # no range is said
    assert chain(body.format("arm", "i", body.format("hand", "j", ""))).joints == ("i", "j")
    thumb = body.format("thumb", "k", "")
    two = body.format("arm", "i", body.format("hand", "j", "") + thumb)
    with pytest.raises(KinematicsError, match="tip: expected one of hand, thumb, got ''"):
        chain(two)
    assert chain(two, tip="thumb").joints == ("i", "k")
    assert chain(body.format("arm", "i", body.format("hand", "j", "")), tip="arm").joints == ("i",)
    with pytest.raises(KinematicsError, match="base: expected a body between the world and hand, got thumb"):
        chain(two, tip="hand", base="thumb")
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(KinematicsError, match="MJCF needs the package mujoco"):
        chain(two)


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
        ("<sdf/>", {}, r"expected a URDF file \(robot\) or an MJCF file \(mujoco\), got 'sdf'"),
        (URDF.format("fixed", ""), {}, "expected joints between a and b, got none"),
        (
            URDF.format("floating", ""),
            {},
            "joint j: expected the type revolute, continuous or prismatic, got floating",
        ),
        (
            URDF.format("revolute", LIMIT + '<mimic joint="k"/>'),
            {},
            "joint j: expected a joint that takes commands",
        ),
        (
            URDF.format("revolute", LIMIT + '<axis xyz="0 0 0"/>'),
            {},
            "joint j: expected an axis that is not 0",
        ),
        (
            URDF.format("revolute", '<limit lower="1" upper="-1"/>'),
            {},
            "joint j: expected an axis that is not 0",
        ),
        (
            URDF.format("revolute", '<origin xyz="0 nan 0"/>'),
            {},
            "joint j: expected 3 numbers, got '0 nan 0'",
        ),
        (
            URDF.format("revolute", '<limit lower="low" upper="1"/>'),
            {},
            "joint j: expected 1 numbers, got 'low'",
        ),
        (URDF.format("revolute", LIMIT), {"tip": "c"}, "tip: expected one of b, got 'c'"),
        (URDF.format("revolute", LIMIT), {"base": "c"}, "base: expected one of a, b, got 'c'"),
        (
            URDF.format("revolute", LIMIT),
            {"tip": "a", "base": "b"},
            "base: expected a link between the root and a, got b",
        ),
        (
            "<robot><link/><link/></robot>",
            {},
            "link: expected a name for each link, got a link without a name",
        ),
        (
            "<robot><link name='a'/><joint name='j'><parent/><child link='a'/></joint></robot>",
            {},
            "joint j: expected the attribute link of parent and child, one is missing",
        ),
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
    quaternions = to_quaternion(turns)
    np.testing.assert_allclose(np.linalg.norm(quaternions, axis=-1), 1.0, atol=1e-12)
    np.testing.assert_allclose(from_quaternion(3 * quaternions), turns, atol=1e-12)  # of any length
    least = np.array([1e-13, 0.0, 0.0])
    np.testing.assert_allclose(to_vector(from_vector(least)), least, rtol=1e-6)
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
        r"singular pose: wrist_1_joint.* would move without moving the tip: .* expected at least 0.02", reason
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
    with pytest.raises(NoCommand, match=f"the {form} of an action is not a rotation: it has {why}"):
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
        KinematicsError, match="rotation: exact needs at least 6 joints, and base to wrist_2_link has 5"
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
        (("gripper", "x", "y", "z"), (1, 2, 3), "gripper,dxyz"),
        (("left jaw", "finger_1", "qw", "qx", "qy", "qz"), (), "gripper,gripper,wxyz"),
        (("tcp_x", "delta_y", "d_z", "rx"), (), ""),
        (("shoulder_pan", "elbow"), (), ""),
        ((), (), ""),
    ],
)
def test_names_say_what_the_numbers_are(names: tuple[str, ...], offsets: tuple[int, ...], parts: str) -> None:
    assert parts_of(names, offsets) == parts


@pytest.mark.parametrize(
    ("units", "text", "message"),
    [
        (("rad", "rad", "rad"), "xyz", "action.xyz: expected the unit m, cm or mm, the policy states 'rad'"),
        (("m", "m", "m"), "rpy", "action.rpy: expected the unit rad or deg, the policy states 'm'"),
        (
            ("m", "mm", "m"),
            "xyz",
            "action.xyz: expected the same unit for all values, got m, mm, m from the policy",
        ),
        ((), "xyz*0", "action.xyz: expected a number above 0 after *"),
        ((), "abc", "action: expected xyz, rpy"),
        ((), "xyz,rpy,quat", "action: expected at most one position"),
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
        ({"tips": "x"}, "tips: unknown option; use one of tip, base"),
        ({"tip": 3}, "tip: expected a text, got"),
        ({"unit": "turns"}, "unit: expected one of rad, deg, got 'turns'"),
        ({"within": 3}, "within: expected 2 numbers above 0"),
        ({"singular": -1}, "singular: expected one number above 0"),
        ({"velocity": [1, 2]}, "velocity: expected a number above 0, or a list of 6"),
        ({"rotation": "keep", "action": "joints"}, "action: expected poses, got 'joints'"),
        ({"action": "xyz,rpy"}, "action: expected a layout with 7 values, as the policy has, got 6"),
        ({"state": "dxyz,rotvec,gripper"}, "state: expected no deltas"),
        ({"action": "xyz*1,gripper,gripper,gripper,gripper"}, "expected 4 values in addition to the arm's"),
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
    with pytest.raises(RobotError, match="rename_joint"):
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
        robot: Any = opener({**POSES, "control_hz": 5.0})
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
    loop.controller.listeners.append(journal.put)
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


# ----------------------------------------------------------------------------- an arm that can be computed by hand


def planar(**options: Any) -> Chain:
    """An arm in the plane z = 0.3: joints a and b about z, 1 m and 0.5 m long; no velocity is stated of b."""
    given: dict[str, Any] = {
        "joints": ("a", "b"),
        "places": np.array([[0.0, 0.0, 0.3], [1.0, 0.0, 0.0]]),
        "turns": np.tile(np.eye(3), (2, 1, 1)),
        "axes": np.array([[0.0, 0.0, 1.0]] * 2),
        "slides": np.zeros(2, bool),
        "low": np.array([-3.0, -2.0]),
        "high": np.array([3.0, 2.0]),
        "velocity": np.array([2.0, np.nan]),
        "tip_place": np.array([0.5, 0.0, 0.0]),
        "tip_turn": np.eye(3),
        "base": "base",
        "tip": "tip",
    }
    return Chain(**{**given, **options})


def tip_at(a: float, b: float) -> list[float]:
    return [np.cos(a) + 0.5 * np.cos(a + b), np.sin(a) + 0.5 * np.sin(a + b), 0.3]


class Two:
    """A robot of the joints b, jaw and a, in radians, of which only the state is looked at."""

    joints: Any = ("b", "jaw", "a")

    def __init__(self, a: float = 0.2, b: float = 1.0, jaw: float = 0.7):
        self.state, self.sent, self.did = np.array([b, jaw, a]), [], None  # type: ignore[var-annotated]

    def observe(self) -> dict[str, Any]:
        return {"images": {}, "state": self.state, **({} if self.did is None else {"action": self.did})}

    def act(self, row: np.ndarray) -> None:
        self.sent.append(row.tolist())

    def hold(self) -> None:
        pass


def policy_of(action: int, state: int = 4, **about: Any) -> dict[str, Any]:
    return {"cameras": [], "state": {"dim": state}, "action": {"dim": action}, **about}


def planar_robot(robot: Any, chain: Chain | None = None, **options: Any) -> EndEffector:
    given = {"action": "xyz,gripper", "state": "xyz,gripper", **options}
    return EndEffector(robot, chain or planar(), KinematicsOptions.parse(given), policy_of(4), 10.0)


def test_reach_is_the_length_of_what_hangs_from_the_first_joint() -> None:
    assert planar().reach == 1.5
    rail = {"slides": np.array([True, False]), "low": np.array([-0.75, -2.0]), "high": np.array([0.25, 2.0])}
    assert planar(**rail).reach == 2.25  # as far as the rail goes
    assert planar(**{**rail, "high": np.array([np.inf, 2.0])}).reach == 1.5  # which is endless
    point = {"places": np.zeros((2, 3)), "tip_place": np.zeros(3)}
    assert planar(**point).reach == 1.0  # lengths are counted in it


def test_joints_are_found_within_their_ranges_near_where_they_start() -> None:
    chain, turn = planar(), np.eye(3)
    for start, goal in (([0.2, 1.0], [0.5, 1.3]), ([0.2, -1.0], [0.5, -1.3]), ([2.5, 1.8], [2.9, 1.9])):
        place = np.array(tip_at(*goal))
        found = chain.inverse(place, turn, np.array(start), 0.0)
        np.testing.assert_allclose(found, goal, atol=1e-6)
        away, _ = chain.apart(place, turn, found)
        assert away < 1e-7
    pair = chain.inverse(
        np.array([tip_at(0.5, 1.3), tip_at(0.1, 0.6)]), turn, np.array([0.2, 1.0]) * np.ones((2, 1)), 0
    )
    np.testing.assert_allclose(pair, [[0.5, 1.3], [0.1, 0.6]], atol=1e-6)
    goals = np.array([tip_at(0.5, 1.3), tip_at(-2.6, 1.9)])  # one near, one many steps away
    both = chain.inverse(goals, turn, np.array([0.2, 1.0]) * np.ones((2, 1)), 0.0)
    alone = [chain.inverse(goal, turn, np.array([0.2, 1.0]), 0.0) for goal in goals]
    np.testing.assert_allclose(both, alone, atol=1e-12)
    for wanted, start in ((2.2, 1.0), (-2.2, -1.0)):  # b ends before: as near as it can be, and at its end
        place = np.array(tip_at(0.5, wanted))
        found = chain.inverse(place, turn, np.array([0.2, start]), 0.0)
        assert found[1] == np.sign(wanted) * 2.0
        best = min(np.linalg.norm(place - tip_at(a, found[1])) for a in np.linspace(-1, 2, 3001))
        assert chain.apart(place, turn, found)[0] == pytest.approx(best, abs=1e-5)
    away, apart = chain.apart(
        np.array([*tip_at(0.5, 1.3)[:2], 0.55]), from_rpy(np.array([0.0, 0.0, 1.9])), np.array([0.5, 1.3])
    )
    assert (away, apart) == (pytest.approx(0.25), pytest.approx(0.1))
    far = chain.inverse(
        np.array([1.5, 0.0, 0.3]), turn, np.array([5.0, -9.0]), 0.0
    )  # starts out of its range
    assert ((chain.low <= far) & (far <= chain.high)).all()


def test_how_singular_an_arm_is() -> None:
    """Of its place alone the two-joint arm has the singular values of [[-s, -s'], [c, c']], in reaches of 1.5 m."""
    found = planar().singularity(np.array([0.3, 1.1]), 0.0)
    (x, y, _), half = tip_at(0.3, 1.1), 0.5 * np.array([-np.sin(1.4), np.cos(1.4)])
    values = np.linalg.svd(np.stack([[-y, x], half], axis=1) / 1.5)[1]
    assert found.least == pytest.approx(values[1])
    assert planar().singularity(np.array([0.3, 0.0]), 0.0).least == pytest.approx(0.0, abs=1e-12)
    turned = planar().singularity(np.array([0.3, 0.0]), 1.0)  # what it cannot move it can still turn
    assert turned.least == pytest.approx(np.linalg.svd([[1.0, 1 / 3], [1.0, 1.0]])[1][1])
    np.testing.assert_allclose(np.linalg.norm(found.joints), 1.0)
    assert (found.joints >= 0).all()


def test_an_arm_without_hardware_begins_well_inside_its_ranges() -> None:
    chain = planar(low=np.array([-0.4, 0.3]), high=np.array([0.6, 0.8]))
    ready = chain.ready()
    assert ((ready >= [-0.3, 0.35]) & (ready <= [0.5, 0.75])).all()
    others = np.random.default_rng(5).uniform([-0.3, 0.35], [0.5, 0.75], (50, 2))
    least = [chain.singularity(joints).least for joints in others]
    assert chain.singularity(ready).least > np.quantile(least, 0.9)
    assert (np.abs(planar().ready()) <= 0.8 * np.pi / 2).all()  # of wide ranges the middle
    away = planar(low=np.array([2.0, -3.0]), high=np.array([3.0, -2.0])).ready()  # which this one is not in
    assert ((away >= [2.1, -2.9]) & (away <= [2.9, -2.1])).all()
    (begins, _) = planar(low=np.array([np.pi / 2, -1.0]), high=np.array([3.0, 1.0])).ready()
    assert begins > np.pi / 2 + 0.1  # a range that begins where this one ends


def test_a_pose_moves_the_joints_and_the_gripper_and_nothing_else() -> None:
    robot = Two()
    arm = planar_robot(robot)
    np.testing.assert_allclose(arm.observe()["state"], [*tip_at(0.2, 1.0), 0.7], atol=1e-6)
    arm.act(np.float32([*tip_at(0.3, 1.2), 0.9]))
    np.testing.assert_allclose(robot.sent, [[1.2, 0.9, 0.3]], atol=1e-5)
    # The next one goes on from what was sent, though it was not seen; after a hold from what is seen.
    arm.act(np.float32([*tip_at(0.45, 1.2), 0.9]))
    np.testing.assert_allclose(robot.sent[-1], [1.2, 0.9, 0.45], atol=1e-5)
    with pytest.raises(NoCommand) as no:
        arm.act(np.float32([*tip_at(0.7, 1.2), 0.9]))
    assert str(no.value) == "a would have to move faster than 2/s: by 2.5/s"
    arm.hold()
    with pytest.raises(NoCommand, match="a would have to move faster than 2/s: by 2.5/s"):
        arm.act(np.float32([*tip_at(0.45, 1.0), 0.9]))
    robot.sense = lambda: np.array([1.1, 0.4, 0.1])  # type: ignore[attr-defined]
    sense = facts_of(arm).sense
    assert sense is not None
    np.testing.assert_allclose(sense(), [*tip_at(0.1, 1.1), 0.4], atol=1e-6)
    del robot.sense  # type: ignore[attr-defined]
    robot.did = np.array([1.1, 0.4, 0.1])
    np.testing.assert_allclose(arm.observe()["action"], [*tip_at(0.1, 1.1), 0.4], atol=1e-6)
    offsets = planar_robot(robot, action="dxyz,gripper")
    assert "action" not in offsets.observe()  # an offset from where it is says nothing
    offsets.act(np.float32([0.01, 0.02, 0.0, 0.5]))
    place = np.array(tip_at(robot.sent[-1][2], robot.sent[-1][0]))
    np.testing.assert_allclose(place, np.add(tip_at(0.2, 1.0), [0.01, 0.02, 0.0]), atol=1e-6)
    robot.state = robot.state + 0.1
    offsets.act(np.float32([0.0, 0.0, 0.0, 0.5]))  # is from where the robot is now
    place = np.array(tip_at(robot.sent[-1][2], robot.sent[-1][0]))
    np.testing.assert_allclose(place, tip_at(0.3, 1.1), atol=1e-6)


def test_what_a_joint_may_do_in_a_period_is_what_is_said_of_it() -> None:
    """Of the description, of the options, or half a turn a second; the joint that hurries most is named."""
    for velocity, step, named in (
        (None, (0.2, 0.0), ""),
        (None, (0.201, 0.0), "a would have to move faster than 2/s"),
        (None, (0.0, np.pi / 10 - 1e-4), ""),
        (None, (0.0, np.pi / 10 + 1e-4), "b would have to move faster than 3.142/s"),
        (1, (0.1, 0.1), ""),
        (1, (0.1, 0.11), "b would have to move faster than 1/s"),
        ([1.0, 4], (0.12, 0.45), "a would have to move faster than 1/s"),
        ([1.0, 4], (0.12, 0.5), "b would have to move faster than 4/s"),
    ):
        robot = Two()
        arm = planar_robot(robot, velocity=velocity)
        row = np.float32([*tip_at(0.2 + step[0], 1.0 + step[1]), 0.9])
        if named:
            with pytest.raises(NoCommand) as no:
                arm.act(row)
            assert no.value.reason == named
            assert not robot.sent
        else:
            arm.act(row)
            np.testing.assert_allclose(robot.sent[0][::2], [1.0 + step[1], 0.2 + step[0]], atol=1e-5)
    text = planar_robot(Two()).text()
    assert text == (
        "kinematics: 2 joints from base to tip; action xyz,gripper, state xyz,gripper; rotation free; no velocity is"
        " stated of b, 3.142/s is taken"
    )
    assert planar_robot(Two(), velocity=3, action="dxyz*0.02,gripper").text() == (
        "kinematics: 2 joints from base to tip; action dxyz*0.02,gripper, state xyz,gripper; rotation free"
    )


def test_a_pose_may_be_missed_by_so_much_and_not_by_more() -> None:
    for lift, sent in ((0.0009, True), (0.0011, False)):  # out of the arm's plane
        robot = Two()
        arm, row = planar_robot(robot), np.float32([*tip_at(0.25, 1.1), 0.5]) + np.float32([0, 0, lift, 0])
        with contextlib.nullcontext() if sent else pytest.raises(NoCommand) as no:  # type: ignore[attr-defined]
            arm.act(row)
        assert len(robot.sent) == sent
    assert str(no.value).startswith("out of reach: [")
    assert "is missed by 0.0011 m" in str(no.value)
    with pytest.raises(NoCommand) as no:
        planar_robot(Two(b=1.9)).act(np.float32([*tip_at(0.2, 2.05), 0.5]))
    assert no.value.reason == "out of reach, b at an end of the range"
    with pytest.raises(NoCommand) as no:
        planar_robot(Two(b=-1.9)).act(np.float32([*tip_at(0.2, -2.05), 0.5]))
    assert no.value.reason == "out of reach, b at an end of the range"
    # Rotations count where the action has them exactly: here of an arm that has six joints for it.
    for turn, sent in ((0.04, True), (0.06, False)):
        arm_, bench = arm_of(within=[1e-3, 0.05])
        tip = arm_.chain.forward(bench.angles())
        arm_.chain = replace(arm_.chain, low=bench.angles(), high=bench.angles())  # so that it can only stay
        row = np.float32([*tip.place, *to_vector(from_vector(np.array([0.0, 0.0, turn])) @ tip.turn), 0.5])
        with contextlib.nullcontext() if sent else pytest.raises(NoCommand, match="out of reach"):  # type: ignore[attr-defined]
            arm_.act(row)
        assert len(bench.sent) == sent


def test_a_stretched_arm_is_singular_and_may_be_bent() -> None:
    robot = Two(b=0.15)
    least = planar().singularity(np.array([0.2, 0.1]), 0.0).least
    for limit, sent in ((least - 1e-4, True), (least + 1e-4, False)):
        arm = planar_robot(robot, singular=limit)
        row = np.float32([*tip_at(0.2, 0.1), 0.9])
        if sent:
            arm.act(row)
        else:
            with pytest.raises(NoCommand, match=f"expected at least {limit:g}$") as no:
                arm.act(row)
            assert no.value.reason == "singular pose: a, b would move without moving the tip"
    assert len(robot.sent) == 1
    robot.state[0] = 0.01
    bent = planar_robot(robot, singular=0.3)
    bent.act(np.float32([*tip_at(0.2, 0.1), 0.9]))  # is nearer still to what is asked for
    assert len(robot.sent) == 2


def test_a_rotation_is_what_the_action_and_the_arm_have() -> None:
    five = read_chain(UR5E, tip="wrist_2_link")
    for chain, action, rotation in (
        (five, "xyz,gripper", "free"),
        (five, "xyz,rotvec,gripper", "near"),
        (read_chain(UR5E), "xyz,gripper", "keep"),
        (read_chain(UR5E), "xyz,rotvec,gripper", "exact"),
    ):
        size = 4 + 3 * ("rotvec" in action)
        options = KinematicsOptions.parse({"action": action, "state": "xyz,gripper"})
        assert EndEffector(Bench(chain), chain, options, policy_of(size), 20.0).rotation == rotation
    for options, message in (
        ({"rotation": "near"}, "rotation: near needs a rotation in the action"),
        ({"rotation": "exact"}, "rotation: exact needs a rotation in the action"),
        (
            {"action": "quat", "state": "quat"},
            "action: expected a position of the tip (xyz or dxyz), got none",
        ),
    ):
        bare = Two()
        bare.joints = ("b", "a") if "action" in options else bare.joints
        with pytest.raises(KinematicsError, match=re.escape(message)):
            planar_robot(bare, **options)
    found = EndEffector(  # its own joints are part of this state, and two numbers beside them
        Two(),
        planar(),
        KinematicsOptions.parse({"action": "xyz,gripper", "state": "gripper,joints"}),
        policy_of(4),
        10.0,
    )
    np.testing.assert_allclose(found.observe()["state"], [0.7, 1.0, 0.7, 0.2], atol=1e-6)
    with pytest.raises(RobotError, match=re.escape("expected 3 values (a, b and 1 more), got shape [2]")):
        found._checked([1.0, 2.0])
    assert found.motion is None
    assert planar_robot(Two()).motion == {"kind": "absolute"}


def test_where_an_arm_is_is_known_of_any_robot() -> None:
    robot = Two()
    robot.state = np.array([90.0, 0.5, 0.0])
    arm = KnownArm(robot, planar(), ("b", "jaw", "a"), units=("deg", "", "deg"))
    assert arm.arm_points() is None
    assert arm.observe()["state"] is robot.state
    points = [[0, 0, 0], [0, 0, 0.3], [1, 0, 0.3], [1, 0.5, 0.3]]  # base, joints, tip
    np.testing.assert_allclose(arm.arm_points(), points, atol=1e-12)
    np.testing.assert_allclose(copy.copy(arm).arm_points(), points, atol=1e-12)
    rail = planar(slides=np.array([True, False]), axes=np.array([[1.0, 0, 0], [0, 0, 1.0]]))
    slid = KnownArm(robot, rail, ("b", "jaw", "a"), "deg")
    robot.state = np.array([90.0, 0.5, 0.25])
    slid.observe()  # a slide has metres whatever the unit of the others is
    np.testing.assert_allclose(slid.arm_points()[-1], [1.25, 0.5, 0.3], atol=1e-12)
    assert (
        arm.text()
        == "kinematics: 2 joints from base to tip, to show the arm; the policy's actions are joints"
    )
    for units, got in ((("deg", "", "rad"), "deg or rad"), (("turns", "", "turns"), "turns")):
        with pytest.raises(RobotError, match=f"robot: expected joints in radians or degrees, got {got};"):
            KnownArm(robot, planar(), ("b", "jaw", "a"), units=units)
    assert facts_of(KnownArm(robot, planar(), ("b.pos", "jaw", "a.pos"), spare=1)).points is not None
    for spare, got in ((0, "jaw"), (2, "jaw")):
        with pytest.raises(
            RobotError, match=f"expected {spare} values in addition to the arm's.*, got {got}$"
        ):
            KnownArm(robot, planar(), ("b", "jaw", "a"), spare=spare)
    with pytest.raises(RobotError, match="got none$"):
        KnownArm(robot, planar(), ("b", "a"), spare=1)
    joints = {"state": {"names": ["a", "b", "jaw"]}, "action": {"names": ["jaw", "b.pos", "a.pos"]}}
    assert moves_joints(joints, planar(), {})
    assert moves_joints({"state": {"names": ["a", "b"]}, "action": {"names": ["b", "a"]}}, planar(), {})
    assert not moves_joints(joints, planar(), {"a": "shoulder"})
    assert not moves_joints({**joints, "action": {"names": ["a"]}}, planar(), {})
    assert not moves_joints({**joints, "state": {}}, planar(), {})
    assert numbers_of(planar(), parse_parts("gripper,xyz,gripper,gripper")) == [
        "a",
        "b",
        "gripper",
        "gripper1",
        "gripper2",
    ]


@pytest.mark.parametrize(
    ("text", "units", "parts"),
    [
        ("xyz, quat ,gripper", (), [("xyz", 0, 3, 1.0), ("quat", 3, 4, 1.0), ("gripper", 7, 1, 1.0)]),
        ("gripper,xyz", ("x", "cm", "cm", "cm"), [("gripper", 0, 1, 1.0), ("xyz", 1, 3, 0.01)]),
        ("rot6d,joints", ("1", "", "1", "", "1", "", "a", "b"), [("rot6d", 0, 6, 1.0), ("joints", 6, 2, 1.0)]),
        ("drpy*0.5,xyz", ("deg",) * 3 + ("m",) * 3, [("rpy", 0, 3, 0.5), ("xyz", 3, 3, 1.0)]),
        ("wxyz", ("", "1", "1", ""), [("wxyz", 0, 4, 1.0)]),
        ("drotvec", ("0.5 deg",) * 3, [("rotvec", 0, 3, np.pi / 360)]),
        ("dxyz", ("2.5cm",) * 3, [("xyz", 0, 3, 0.025)]),
    ],
)  # fmt: skip
def test_parts_follow_each_other(text: str, units: tuple[str, ...], parts: list[tuple]) -> None:
    found = parse_parts(text, units, joints=2)
    assert [(part.form, part.first, part.size, pytest.approx(part.unit)) for part in found] == parts
    assert [part.offset for part in found] == [word.strip().startswith("d") for word in text.split(",")]
    vector = np.arange(20.0)
    for part in found:
        np.testing.assert_allclose(part.of(vector), part.unit * vector[part.first : part.first + part.size])


@pytest.mark.parametrize(
    ("text", "units", "message"),
    [
        ("dquat", (), "got 'dquat'"),
        ("dgripper", (), "got 'dgripper'"),
        ("xyz,xyz", (), "action: expected at most one position (xyz) and one rotation, got 'xyz,xyz'"),
        ("xyz*inf", (), "action.xyz: expected a number above 0 after *, got 'inf'"),
        ("xyz*", (), "action.xyz: expected a number above 0 after *, got ''"),
        ("xyz*-1", (), "action.xyz: expected a number above 0 after *, got '-1'"),
        ("quat", ("rad",) * 4, "action.quat: expected the unit none, the policy states 'rad'"),
        ("xyz", ("m", "", "m"), "action.xyz: expected the unit m, cm or mm, the policy states ''"),
        ("rotvec", ("1",) * 3, "action.rotvec: expected the unit rad or deg, the policy states '1'"),
    ],
)
def test_parts_that_say_nothing_are_refused(text: str, units: tuple[str, ...], message: str) -> None:
    with pytest.raises(KinematicsError, match=re.escape(message)):
        parse_parts(text, units)


@pytest.mark.parametrize("field", ["within", "singular"])
@pytest.mark.parametrize("value", [0, -1.0, np.inf, np.nan, True, "1", None])
def test_bounds_of_a_pose_are_numbers_above_zero(field: str, value: Any) -> None:
    """Each of two, or one; any finite number above 0 is one."""
    count = 2 if field == "within" else 1
    said = f"{field}: expected {'2 numbers' if count == 2 else 'one number'} above 0, got"
    for each in ([value, 1.0], [1.0, value], [1.0] * 3, [1.0]) if count == 2 else (value, [1.0]):
        with pytest.raises(KinematicsError, match=said):
            KinematicsOptions.parse({field: each})
    assert KinematicsOptions.parse({"within": (1e-9, 1), "singular": 5}).singular == 5


# ----------------------------------------------------------------------------- from the command line


LINE = ("run", str(BLOCKS), "--prompt", "go", "--timeout", "60")
DRY = (*LINE, "--robot", "dry", "--set", f"kinematics={UR5E}")


@pytest.mark.usefixtures("dry_ends")
def test_a_policy_of_poses_drives_a_robot_of_joints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DRY, "--seconds", "600", "--json"]) == 0
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
        (("--robot", "dry", "--set", "kinematics=nothing.urdf"), "kinematics: nothing.urdf"),
        ((*DRY[6:], "--set", 'kinematics_options={"tip": "hand"}'), "tip: expected one of tool0, got 'hand'"),
        (
            (*DRY[6:], "--set", 'kinematics_options={"action": "xyz,rpy"}'),
            "action.rpy: expected the unit rad or deg",
        ),
        (
            ("--robot", "dry", "--set", "kinematics_options={}"),
            "kinematics_options needs kinematics",
        ),
        (
            ("--robot", "blocks", "--set", f"kinematics={UR5E}"),
            "kinematics: expected a robot that takes joints, got --robot gym:",
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
        "--set",
        f"kinematics={UR5E}",
        "--seconds",
        "0.3",
        "--json",
    ]
    assert main(line) == 1
    found = [
        each for each in last_json(capsys)["checks"] if "x" in each["subject"] or "state" in each["subject"]
    ]
    assert found, "a base that is not the policy's was not seen"


@pytest.mark.parametrize("kind", ["old", "missing"])
@pytest.mark.parametrize("by", ["offsets", "a hold"])
def test_a_pose_that_counts_from_a_state_that_is_not_known_is_held(kind: str, by: str) -> None:
    """Offsets count from where the tip is seen in their control step, and so does the first pose after a hold."""
    names = ["dx", "dy", "dz", "rx", "ry", "rz", "gripper"]
    offsets = {**POSES, "action": {**POSES["action"], "names": names}}
    if by == "offsets":
        robot, bench = arm_of(policy=offsets, action="dxyz,drotvec,gripper")
        rows = np.tile(np.float32([1e-3, 0, 0, 0, 0, 0, 0.5]), (30, 1))
    else:
        robot, bench = arm_of()
        rows = np.tile(np.asarray(robot.observe()["state"]), (30, 1))
    wrong = False

    def observe() -> dict[str, Any]:
        if wrong and kind == "missing":
            raise NoObservation("front: no frame")
        return {"images": {}, "state": bench.state.copy(), "age": 5.0 * wrong}

    bench.observe = observe  # type: ignore[method-assign]
    robot.position = np.zeros(7)  # of what `driven` takes the width of a command
    loop = driven(robot, [rows], 4)  # which holds it at its end
    assert len(bench.sent) > 1
    wrong = True
    sent = len(bench.sent)
    for _ in range(4):
        loop.tick(loop.pace.next())
    assert len(bench.sent) == sent
    assert loop.reason in ("front: no frame", "the newest frame is older than 0.5 s")


def test_a_pose_after_a_hold_counts_from_where_the_arm_is_then() -> None:
    robot, bench = arm_of()
    row = np.asarray(robot.observe()["state"])
    robot.act(row)
    robot.hold()
    bench.state = bench.state + np.array([*[0.5] * 6, 0.0])  # somebody has moved it
    with pytest.raises(NoCommand, match="would have to move faster"):
        robot.act(row)


def test_a_person_who_drives_poses_is_held_where_the_arm_is_not_seen_after_a_hold() -> None:
    """Its joints count from where they are seen then, whoever drives."""
    robot, bench = arm_of()
    place = np.asarray(robot.observe()["state"])

    class Hand:
        def read(self) -> Any:
            return place

    motion = {"kind": "absolute"}
    takeover = Takeover(Hand(), parse_motion(motion), 7, None, 0.1)
    loop = Loop(
        robot,
        lambda: None,  # type: ignore[arg-type, return-value]
        Settings(20.0, handover="aligned", motion=motion),
        7,
        "go",
        SimulatedPace(20.0),
        listeners=[takeover],
    )
    loop.source = SimpleNamespace(  # type: ignore[assignment]
        ready=lambda now: False, poll=lambda now: None, cancel=lambda: None, continuous=False
    )
    takeover.take_over()
    for _ in range(4):
        loop.tick(loop.pace.next())
    assert loop.controller.driver == "human"
    sent = len(bench.sent)
    assert sent > 1
    bench.observe = lambda: {"images": {}, "state": bench.state, "age": 5.0}  # type: ignore[method-assign]
    robot.hold()  # as a watchdog does
    for _ in range(3):
        loop.tick(loop.pace.next())
    assert len(bench.sent) == sent
    assert loop.reason == "the state is not known"

"""The contracts of packages/sinew_ros/config: each drives arms behind their own topics, by the line at its head."""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sinew_client.arm.kinematics import read_chain
from sinew_client.rotations import to_vector
from sinew_ros.__main__ import main
from sinew_ros.contract import ContractError, parse, read
from sinew_ros.dds import Dds
from sinew_ros.messages import command, differs

from tests.robots.poser import Poser
from tests.ros.arms import Arms
from tests.ros.test_bridge import domain  # noqa: F401 - a fixture
from tests.serve.puppet import desk, until

CONFIG = Path(__file__).resolve().parents[2] / "packages" / "sinew_ros" / "config"
VIPERX = ("waist", "shoulder", "elbow", "forearm_roll", "wrist_angle", "wrist_rotate")
HAND = {"/franka_gripper/move": lambda width: width / 2}  # one finger of two
READY = [0.0, -0.8, 0.0, -2.2, 0.0, 1.6, 0.8]  # of a Franka, radians


def test_alohas_numbers_are_openpis() -> None:
    """Its own four constants: of a finger in metres, and of the motor in radians, closed and open."""
    contract = read(CONFIG / "aloha.yaml")
    assert (contract.state_dim, contract.action_dim, contract.settings.hz) == (14, 14, 50)
    for part in contract.states:
        assert part.joints == (*VIPERX, "left_finger")
        for metres, number in ((0.01844, 0.0), (0.058, 1.0)):
            assert part.scale[-1] * metres + part.offset[-1] == pytest.approx(number, abs=1e-5)
    for arm, hand in (contract.outputs[:2], contract.outputs[2:]):
        said = command(arm, np.arange(6.0), 0.0)
        assert said == {"name": "arm", "cmd": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]}
        for number, radians in ((0.0, -0.6213), (1.0, 1.4910)):
            said = command(hand, np.array([number]), 0.0)
            assert said == {"name": "gripper", "cmd": pytest.approx(radians, abs=1e-5)}


def test_frankas_limits_are_within_its_tables() -> None:
    low = [-2.7437, -1.7837, -2.9007, -3.0421, -2.8065, 0.5445, -3.0159]  # of the FR3, by its maker
    high = [2.7437, 1.7837, 2.9007, -0.1518, 2.8065, 4.5169, 3.0159]
    velocity = [2.62, 2.62, 2.62, 2.62, 5.26, 4.18, 5.26]
    contract = read(CONFIG / "franka.yaml")
    guard = contract.settings.controller(8).guard
    assert guard is not None
    limits = guard.limits
    assert limits is not None
    assert np.all(limits.low[:7] > low)
    assert np.all(limits.high[:7] < high)
    assert np.all(limits.velocity[:7] < np.array(velocity) / 2.9)
    hand = contract.outputs[1]
    assert command(hand, np.array([1.0]), 0.0) == {"width": pytest.approx(0.08), "speed": 0.1}
    for before, sent, new in ((0.45, 0.4, False), (0.45, 0.3, True), (0.5, 0.45, True), (0.5, 0.495, False)):
        # now 0.5: 8 mm on the way, 16 mm, 4 mm and there, 0.4 mm
        assert differs(hand, np.array([0.5]), np.array([before]), np.array([sent])) == new
    poses = read(CONFIG / "franka_poses.yaml")
    assert poses.kinematics is not None
    assert poses.outputs[0].joints == poses.kinematics[0].joints


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("action", 0, "group"), None, r"action\[0\].group: expected a value, got nothing"),
        (
            ("action", 1, "joints"),
            ["a", "b"],
            r"action\[1\].joints: expected one joint for a JointSingleCommand, got 2",
        ),
        (("action", 1, "group"), "arm", r"action\[1\].group: unknown"),
        (("kinematics",), {"file": "none.urdf"}, r"kinematics: .*none.urdf"),
        (("kinematics",), {"tip": "a"}, "kinematics.file: expected a value, got nothing"),
        (("kinematics",), {"file": "x.urdf", "tipp": "a"}, "kinematics: .*tipp"),
    ],
)
def test_what_is_wrong_in_a_contract_is_named(path: tuple[Any, ...], value: Any, said: str) -> None:
    import yaml

    given = yaml.safe_load((CONFIG / "aloha.yaml").read_text())
    *way, last = path
    at = given
    for key in way:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    with pytest.raises(ContractError, match=said):
        parse(given)


def test_the_bytes_of_a_makers_messages_are_those_of_their_definitions() -> None:
    pytest.importorskip("rosbags", reason="the extra `ros` is not installed")
    from sinew_ros import dds_types
    from sinew_ros.bag import build, types

    store = types()
    kinds = dict(dds_types.TYPES)
    kinds |= {f"{name}_Goal": goal for name, (_, _, goal) in dds_types.ACTIONS.items()}
    for name, fields in (
        ("interbotix_xs_msgs/msg/JointGroupCommand", {"name": "arm", "cmd": [0.5, -1.0]}),
        ("interbotix_xs_msgs/msg/JointSingleCommand", {"name": "gripper", "cmd": 0.25}),
        ("control_msgs/action/GripperCommand_Goal", {"command": {"position": 0.5, "max_effort": 2.0}}),
        ("franka_msgs/action/Move_Goal", {"width": 0.08, "speed": 0.1}),
    ):
        wanted = bytes(store.serialize_cdr(build(store, name, fields), name))
        made = bytes(dds_types.build(kinds[name], fields).serialize())
        assert made[4 : len(wanted)] == wanted[4:], name
    # What takes a goal: rmw_cyclonedds's head, the goal's number, the goal.
    request, _, goal = dds_types.ACTIONS["franka_msgs/action/Move"]
    sent = bytes(request(1, 2, dds_types.Uuid([3] * 16), goal(0.08, 0.1)).serialize())
    assert sent[4:] == struct.pack("<Qq16Bdd", 1, 2, *[3] * 16, 0.08, 0.1)


@pytest.mark.slow
def test_a_goal_that_is_refused_is_told(domain: int, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    contract = read(CONFIG / "franka.yaml")
    moves = {output.topic: "/joint_states" for output in contract.outputs}
    arms, own = Arms(contract, Dds(domain), [*READY, 0.04], moves, HAND), Dds(domain)
    arms.accepts = False
    send = own.publisher("/franka_gripper/move", "franka_msgs/action/Move")
    until(lambda: send({"width": 0.04, "speed": 0.1}) or "refused" in caplog.text, "an answer")
    assert "/franka_gripper/move: goal" in caplog.text
    assert not arms.commands["/franka_gripper/move"]
    own.close()
    arms.close()


def drive(
    name: str, policy: Poser, arms: Callable[[Any], Arms], tmp_path: Path, over: Callable[[Arms], bool]
) -> Arms:
    """Run the contract's own line until ``over``; return the arms."""
    contract = read(CONFIG / f"{name}.yaml")
    with desk(policy=policy) as server, contextlib.closing(arms(contract)) as found:
        ended = threading.Event()

        def watch() -> None:
            until(lambda: found.enable({"data": True}) or ended.is_set() or over(found), "the arms are there")
            if not ended.is_set():
                signal.raise_signal(signal.SIGINT)

        watcher = threading.Thread(target=watch)
        watcher.start()
        line = ["run", str(CONFIG / f"{name}.yaml"), "--server", server.native, "--transport", "dds"]
        try:
            assert main([*line, "--record", str(tmp_path / "bag")]) == 0
        finally:
            ended.set()
            watcher.join()
    return found


def near(arms: Arms, goal: list[float]) -> bool:
    return bool(np.abs(np.array(list(arms.at.values())) - goal).max() < 2e-3)


@pytest.mark.slow
def test_two_viperx_reach_a_pose_of_fourteen_numbers(
    domain: int,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left, right = [0.2, -0.4, 0.5, 0.1, -0.2, 0.3], [-0.2, -0.5, 0.6, 0.0, -0.3, 0.1]
    goal = [*left, 1.0, *right, 0.25]
    names = [f"{side}_{joint}" for side in ("left", "right") for joint in (*VIPERX, "gripper")]
    cameras = dict.fromkeys(("cam_high", "cam_left_wrist", "cam_right_wrist"), (48, 64))
    sides = [f"/follower_{side}" for side in ("left", "right")]

    def finger(radians: float) -> float:  # metres of its motor's, both from closed to open
        return 0.01844 + (0.058 - 0.01844) * (radians + 0.6213) / (1.4910 + 0.6213)

    moves = {
        f"{side}/commands/joint_{kind}": f"{side}/joint_states"
        for side in sides
        for kind in ("group", "single")
    }
    hands = {f"{side}/commands/joint_single": finger for side in sides}
    start = ([0.0] * 6 + [0.01844]) * 2
    reached = [*left, 0.058, *right, finger(-0.6213 + 0.25 * (1.4910 + 0.6213))]
    policy = Poser(goal, names, cameras)
    arms = drive(
        "aloha", policy, lambda contract: Arms(contract, Dds(domain), start, moves, hands), tmp_path,
        lambda arms: near(arms, reached),
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert policy.seen[0].state == pytest.approx([0.0] * 14, abs=1e-4)
    assert set(report["topics"]) == {*cameras, "state[0]", "state[1]"}
    assert report["bag"]["failed"] == 0
    assert report["bag"]["written"]["/follower_left/commands/joint_single"] > 0
    assert min(len(arms.commands[topic]) for topic in moves) > 10
    cmds = np.array([message.cmd for message in arms.commands["/follower_left/commands/joint_group"]])
    assert np.abs(np.diff(cmds, axis=0)).max() <= 3 / 50 + 1e-6  # radians of a step by the contract


@pytest.mark.slow
def test_a_franka_reaches_joints_and_closes_its_hand(
    domain: int,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    goal = [0.2, -0.6, 0.1, -2.0, 0.1, 1.7, 0.7]
    names = [*(f"fr3_joint{at}" for at in range(1, 8)), "gripper"]
    moves = {
        "/fr3_arm_controller/joint_trajectory": "/joint_states",
        "/franka_gripper/move": "/franka_gripper/joint_states",
    }
    policy = Poser([*goal, 0.5], names, {"exterior": (48, 64), "wrist": (48, 64)})
    arms = drive(
        "franka", policy,
        lambda contract: Arms(contract, Dds(domain), [*READY, 0.04], moves, HAND),
        tmp_path, lambda arms: near(arms, [*goal, 0.02]),
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert policy.seen[0].state == pytest.approx([*READY, 1.0], abs=1e-4)
    goals = arms.commands["/franka_gripper/move"]
    assert 1 <= len(goals) <= 6  # for each centimetre and the end of the way, and none for a hand that stays
    assert goals[-1].goal.width == pytest.approx(0.04, abs=1e-3)
    assert {message.goal.speed for message in goals} == {0.1}
    assert report["control"]["executed"] > 0
    assert report["bag"]["failed"] == 0


@pytest.mark.slow
def test_a_policy_of_poses_moves_a_franka_by_its_kinematics(
    domain: int,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chain = read_chain(CONFIG / "../../../examples/robots/panda.urdf", "panda_link8", "panda_link0")
    start = [*READY[:5], 2.4, READY[6]]  # a rotation vector far from half a turn, where its sign would change
    wanted = np.array(start) + np.array([0.1, 0.1, 0.0, 0.1, 0.0, -0.1, 0.1])
    tip = chain.forward(wanted)
    goal = [*tip.place, *to_vector(tip.turn), 0.5]
    names = ["x", "y", "z", "rx", "ry", "rz", "gripper"]
    moves = {
        "/fer_arm_controller/joint_trajectory": "/joint_states",
        "/franka_gripper/move": "/franka_gripper/joint_states",
    }

    def there(arms: Arms) -> bool:
        found = chain.forward(np.array(list(arms.at.values())[:7]))
        return bool(
            np.abs(found.place - tip.place).max() < 1e-3 and np.abs(found.turn - tip.turn).max() < 5e-3
        )

    arms = drive(
        "franka_poses", Poser(goal, names, {"wrist": (48, 64)}, step=0.01),
        lambda contract: Arms(contract, Dds(domain), [*start, 0.04], moves, HAND),
        tmp_path, there,
    )  # fmt: skip
    assert there(arms)
    sent = arms.commands["/fer_arm_controller/joint_trajectory"]
    assert {len(message.points) for message in sent} == {1}
    rows = np.array([message.points[0].positions for message in sent])
    assert (
        np.abs(np.diff(rows, axis=0)).max() <= 0.7 / 15 + 1e-5
    )  # radians of a step, by the contract's kinematics

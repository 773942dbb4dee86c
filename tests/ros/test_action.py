"""The action RunPolicy over DDS: its bytes, its states, and what the robot does meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sinew_ros.__main__ import main
from sinew_ros.actions import NONE, TERMINATED, UNKNOWN_GOAL
from sinew_ros.bridge import LATCHED, Bridge
from sinew_ros.contract import parse
from sinew_ros.goals import (
    ABORTED,
    CANCEL,
    CANCELED,
    ENDED,
    HOLD_LIMIT,
    KIND,
    NAME,
    PREEMPTED,
    SUCCEEDED,
    SUCCESS,
    TIME_LIMIT,
    UNKNOWN,
    Goals,
)
from sinew_ros.lifecycle import Managed

from tests.ros.acting import over_services
from tests.ros.test_bridge import Robot, contract, domain, running, sending  # noqa: F401 - a fixture
from tests.ros.test_lifecycle import Manager
from tests.serve.puppet import desk, until

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "packages" / "sinew_msgs" / "action" / "RunPolicy.action"
WAIT_S = 60.0
NO_STAMP = {"sec": 0, "nanosec": 0}


class Caller:
    """A client of the action, as `ros2 action` and ActionClient are: three services and two topics."""

    def __init__(self, transport: Any):
        self._transport = transport
        self.feedback: list[Any] = []
        self.told: list[dict[bytes, int]] = []  # goal -> status, of each message
        below = f"{NAME}/_action/"
        transport.subscribe(f"{below}feedback", f"{KIND}_FeedbackMessage", "command", self.feedback.append)
        transport.subscribe(f"{below}status", "action_msgs/msg/GoalStatusArray", "command", self._status)

    def _status(self, message: Any) -> None:
        self.told.append({bytes(x.goal_info.goal_id.uuid): x.status for x in message.status_list})

    def _call(self, service: str, kind: str, **fields: Any) -> Any:
        answer = self._transport.call(f"{NAME}/_action/{service}", kind, fields, WAIT_S)
        assert answer is not None, service
        return answer

    def send(self, number: int, prompt: str = "go", **limits: Any) -> bool:
        goal = {"prompt": prompt, **{k: v if isinstance(v, bool) else seconds(v) for k, v in limits.items()}}
        return self._call("send_goal", f"{KIND}_SendGoal", goal_id=uuid(number), goal=goal).accepted

    def cancel(self, number: int = 0, stamp: dict[str, int] | None = None) -> tuple[int, int]:
        """Return the code, and how many goals are cancelled now; 0: all of them."""
        info = {"goal_id": uuid(number), "stamp": stamp or NO_STAMP}
        answer = self._call("cancel_goal", "action_msgs/srv/CancelGoal", goal_info=info)
        return answer.return_code, len(answer.goals_canceling)

    def result(self, number: int) -> Any:
        """Wait for the end of a goal."""
        return self._call("get_result", f"{KIND}_GetResult", goal_id=uuid(number))

    def states(self, number: int) -> list[int]:
        """Return the states that were told of a goal, without repetitions."""
        found = [told[key] for told in self.told if (key := bytes([number] * 16)) in told]
        return [state for k, state in enumerate(found) if not k or state != found[k - 1]]


def uuid(number: int) -> dict[str, Any]:
    return {"uuid": [number] * 16}


def seconds(value: float) -> dict[str, int]:
    return {"sec": int(value // 1), "nanosec": round(value % 1 * 1e9)}


@contextlib.contextmanager
def node(domain: int, **settings: Any) -> Iterator[SimpleNamespace]:  # noqa: F811
    """A bridge behind the action, a robot, and a client."""
    from sinew_ros.dds import Dds

    with desk() as server, contextlib.ExitStack() as stack:
        robot, transport, goals = Robot(domain), Dds(domain), Goals()
        stack.callback(robot.transport.close)
        stack.callback(transport.close)
        given = contract(server.native, goals={"feedback": 50, **settings})
        bridge = Bridge(parse(given), transport, goals=goals)
        goals.open(bridge)
        transport.act(NAME, KIND, goals)
        stack.enter_context(running(bridge))
        caller = Caller(robot.transport)
        success = robot.transport.publisher("/sinew/success", "std_msgs/msg/Bool")
        yield SimpleNamespace(
            robot=robot, bridge=bridge, goals=goals, caller=caller, success=success, server=server
        )


def test_its_bytes_are_those_of_its_definition() -> None:
    typesys = pytest.importorskip("rosbags.typesys", reason="the extra `ros` is not installed")
    from sinew_ros import dds_types
    from sinew_ros.bag import build

    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    goal, result, feedback = FILE.read_text().split("---")
    number, stamp, limit = uuid(7), {"sec": -3, "nanosec": 4}, seconds(2.5)
    info = {"goal_id": number, "stamp": stamp}
    constants = {}
    for name, text in (("Goal", goal), ("Result", result), ("Feedback", feedback)):
        found = typesys.get_types_from_msg(text, f"sinew_msgs/action/RunPolicy_{name}")
        constants |= {key: value for key, _, value in found[f"sinew_msgs/action/RunPolicy_{name}"][0]}
        store.register(found)
    assert constants == {
        "SUCCESS": SUCCESS, "CANCELED": CANCEL, "TIME_LIMIT": TIME_LIMIT, "HOLD_LIMIT": HOLD_LIMIT,
        "PREEMPTED": PREEMPTED, "ENDED": ENDED,
    }  # fmt: skip
    known = {name: value for name, _, value in store.fielddefs["action_msgs/msg/GoalStatus"][0]}
    for name, value in (
        ("UNKNOWN", UNKNOWN),
        ("SUCCEEDED", SUCCEEDED),
        ("CANCELED", CANCELED),
        ("ABORTED", ABORTED),
    ):
        assert known[f"STATUS_{name}"] == value
    own = "sinew_msgs/action/RunPolicy"
    call = "uint64 guid\nint64 seq\nunique_identifier_msgs/UUID goal_id"
    answer = "uint64 guid\nint64 seq\n"
    asked = {"prompt": "grüß dich", "time_limit": limit, "hold_limit": limit, "limit_succeeds": True}
    came = {
        "outcome": 5,
        "message": "x",
        "elapsed": limit,
        "steps": 9,
        "held": 1,
        "chunks": 3,
        "failed_requests": 2,
    }
    goes = {"elapsed": limit, "steps": 9, "held": 1, "message": "", "age_ms": 2.5, "command": [0.5, -1.0]}
    for kind, text, fields in (
        (dds_types.SERVICES[f"{KIND}_SendGoal"][0], f"{call}\n{own}_Goal goal", {"goal_id": number, "goal": asked}),
        (dds_types.SERVICES[f"{KIND}_SendGoal"][1], f"{answer}bool accepted\nbuiltin_interfaces/Time stamp",
         {"accepted": True, "stamp": stamp}),
        (dds_types.SERVICES[f"{KIND}_GetResult"][0], call, {"goal_id": number}),
        (dds_types.SERVICES[f"{KIND}_GetResult"][1], f"{answer}int8 status\n{own}_Result result",
         {"status": -4, "result": came}),
        (dds_types.SERVICES["action_msgs/srv/CancelGoal"][0], f"{answer}action_msgs/GoalInfo goal_info",
         {"goal_info": info}),
        (dds_types.SERVICES["action_msgs/srv/CancelGoal"][1],
         f"{answer}int8 return_code\naction_msgs/GoalInfo[] goals_canceling",
         {"return_code": -1, "goals_canceling": [info, info]}),
        (dds_types.TYPES[f"{KIND}_FeedbackMessage"], f"unique_identifier_msgs/UUID goal_id\n{own}_Feedback feedback",
         {"goal_id": number, "feedback": goes}),
        (dds_types.TYPES["action_msgs/msg/GoalStatusArray"], "action_msgs/GoalStatus[] status_list",
         {"status_list": [{"goal_info": info, "status": 6}]}),
    ):  # fmt: skip
        message = f"sinew_msgs/msg/{kind.__name__}"
        store.register(typesys.get_types_from_msg(text, message))
        given = {"guid": 7, "seq": 8, **fields} if "guid" in text else fields
        wanted = store.serialize_cdr(build(store, message, given), message)
        assert bytes(dds_types.build(kind, given).serialize())[4:] == bytes(wanted)[4:], message


# What rclpy's own server says of the script in acting.py (test_rclpy.py asks it again): the answers that are not
# obvious, and the states of each goal.
RECORDED = [
    ["send", 1, "go", False], ["cancel", 9, 0, 2, []], ["cancel", 2, 0, 2, []], ["cancel", 3, 0, 0, []],
    ["cancel", 1, 0, 0, [1]], ["cancel", 1, 0, 3, []], ["cancel", 0, 0, 0, []], ["result", 1, 5, 5, "scripted", 7],
    ["result", 3, 6, 6, "scripted", 7], ["cancel", 0, 4, 0, [4]], ["cancel", 6, 4, 0, [6]],
    ["result", 9, 0, 0, "", 0], ["cancel", 0, 0, 0, [7]],
]  # fmt: skip
STATES = {
    "1": [1, 2, 3, 5], "3": [1, 2, 6], "4": [1, 2, 3, 6], "5": [1, 2, 4], "6": [1, 2, 3, 4], "7": [1, 2, 3, 5]
}  # fmt: skip


def test_its_answers_are_those_of_rclpys_server() -> None:
    said, states = over_services()
    left = iter(said)
    for each in RECORDED:  # in this order
        assert each in left
    assert states == STATES


def test_goals_drive_one_at_a_time(domain: int, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    with node(domain) as it, sending(it.robot):
        caller = it.caller
        assert not it.robot.arm  # nothing moves without a goal
        # One that runs until somebody says that it is reached.
        assert caller.send(1, "higher", time_limit=WAIT_S)
        until(lambda: it.robot.arm, "a trajectory")
        assert not caller.send(2)  # refused: one runs
        assert main(["goal", "go"]) == 1
        assert f"{NAME}: the goal was rejected; read the reason in the node's log" in capsys.readouterr().err
        assert not caller.send(1)  # and that number is taken
        until(lambda: caller.feedback and caller.feedback[-1].feedback.command, "a feedback")
        said = caller.feedback[-1].feedback
        assert list(said.command) == pytest.approx([5.0, 5.0])  # the puppet's
        assert said.steps >= said.held >= 0
        assert "higher" in it.server.puppet.computed
        until(lambda: it.success({"data": True}) or it.goals.count["succeeded"])
        ended = caller.result(1)
        assert (ended.status, ended.result.outcome) == (SUCCEEDED, SUCCESS)
        assert ended.result.steps > ended.result.held
        assert ended.result.chunks > 0
        assert it.bridge.loop.controller.paused
        until(lambda: len(it.robot.arm[-1].points) == 1, "the end of the trajectory where it was")
        # Cancelled by another client, by its number and as all of them.
        for number, asked in ((3, 3), (4, 0)):
            assert caller.send(number, time_limit=WAIT_S)
            assert caller.cancel(9) == (UNKNOWN_GOAL, 0)
            assert caller.cancel(asked) == (NONE, 1)
            ended = caller.result(number)
            assert (ended.status, ended.result.outcome) == (CANCELED, CANCEL)
            assert it.bridge.loop.controller.paused  # by the time that it is said
            assert caller.cancel(number) == (TERMINATED, 0)
        # The time limit, which is a failure, or what was wanted.
        for number, succeeds in ((5, False), (6, True)):
            assert caller.send(number, time_limit=0.3, limit_succeeds=succeeds)
            ended = caller.result(number)
            status, outcome = (SUCCEEDED, SUCCESS) if succeeds else (ABORTED, TIME_LIMIT)
            assert (ended.status, ended.result.outcome) == (status, outcome)
            assert ended.result.elapsed.sec + 1e-9 * ended.result.elapsed.nanosec >= 0.3
        assert main(["goal", "", "--time-limit", "0.3", "--limit-succeeds"]) == 0
        assert json.loads(capsys.readouterr().out)["outcome"] == "succeeded"
        # What the server refuses, until it has held for too long.
        assert caller.send(7, "fail", hold_limit=0.3)
        ended = caller.result(7)
        assert (ended.status, ended.result.outcome) == (ABORTED, HOLD_LIMIT)
        assert ended.result.steps == ended.result.held > 0
        assert ended.result.failed_requests > 0
        assert ended.result.message.startswith("held for 0.3 s: ")
        assert caller.result(9).status == UNKNOWN
        assert not caller.send(8, time_limit=-1.0)
        until(lambda: caller.states(7)[-1] == ABORTED)
        assert caller.states(1)[-2:] == [2, SUCCEEDED]
        for number in (3, 4):
            assert caller.states(number) == [1, 2, 3, CANCELED]
        late: list[Any] = []  # who comes later is told the newest status
        it.robot.transport.subscribe(
            f"{NAME}/_action/status", "action_msgs/msg/GoalStatusArray", LATCHED, late.append
        )
        until(lambda: late, "the last status")
        assert late[0].status_list[-1].status == ABORTED
        assert it.goals.count == {
            "succeeded": 3,
            "cancelled": 2,
            "time limit": 1,
            "hold limit": 1,
            "refused": 3,
        }


def test_a_newer_goal_takes_the_place_of_one(domain: int, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    with node(domain, preempt=True) as it, sending(it.robot):
        assert it.caller.send(1)
        until(lambda: it.robot.arm, "a trajectory")
        assert it.caller.send(2, "higher")
        ended = it.caller.result(1)
        assert (ended.status, ended.result.outcome) == (ABORTED, PREEMPTED)
        until(lambda: "higher" in it.server.puppet.computed)
        own = [2] * 16
        until(lambda: [x for x in it.caller.feedback if list(x.goal_id.uuid) == own and x.feedback.command])
        assert not it.bridge.loop.controller.paused
        assert "paused: the robot holds" not in caplog.text
        it.goals.shut("the node is deactivated")
        assert "paused: the robot holds" in caplog.text
        assert it.bridge.loop.controller.paused
        ended = it.caller.result(2)
        assert (ended.status, ended.result.outcome, ended.result.message) == (
            ABORTED,
            ENDED,
            "the node is deactivated",
        )
        assert ended.result.steps > ended.result.held
        assert not it.caller.send(3)


def test_a_managed_node_takes_goals_while_it_is_active(domain: int, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    from sinew_ros.dds import Dds

    with desk() as server, contextlib.ExitStack() as stack:
        robot, serving, goals = Robot(domain), Dds(domain), Goals()
        stack.callback(robot.transport.close)
        stack.callback(serving.close)
        given = parse(contract(server.native, prompt=""))
        managed = Managed(
            serving, serving, lambda topics: Bridge(given, topics, managed=True, goals=goals), goals
        )
        stack.callback(managed.wait)
        stack.callback(managed.stop)
        serving.act(NAME, KIND, goals)
        manager, caller = Manager(robot.transport), Caller(robot.transport)
        assert not caller.send(1)
        assert manager.change(1)
        assert not caller.send(1)
        assert "a goal was rejected: the node is not active" in caplog.text
        with sending(robot):
            assert manager.change(3)
            assert not caller.send(1, "")
            assert "prompt: expected an instruction" in caplog.text
            assert managed.bridge is not None
            assert managed.bridge.loop.controller.paused  # until there is a goal
            assert caller.send(1)
            until(lambda: robot.arm, "a trajectory")
            assert manager.change(4)
            assert managed.bridge.loop.controller.paused
            ended = caller.result(1)
            assert (ended.status, ended.result.message) == (ABORTED, "the node is deactivating")
            assert not caller.send(2)
            assert manager.change(3)
            assert caller.send(2)
            assert manager.change(label="shutdown")
            assert caller.result(2).result.outcome == ENDED


@pytest.mark.slow
def test_the_programs_send_and_take_goals(domain: int, tmp_path: Path) -> None:  # noqa: F811
    own = os.environ | {"PYTHONPATH": os.pathsep.join(["packages/sinew_ros", *sys.path])}
    with desk() as server, contextlib.ExitStack() as stack:
        robot = Robot(domain)
        stack.callback(robot.transport.close)
        stack.enter_context(sending(robot))
        (tmp_path / "robot.yaml").write_text(json.dumps(contract(server.native)))

        def begun(*line: Any) -> subprocess.Popen[str]:
            found = subprocess.Popen(
                [sys.executable, "-m", "sinew_ros", *map(str, line)], env=own, cwd=ROOT, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            stack.callback(found.kill)
            return found

        absent = begun("goal", "go")
        assert "no action server answered in 10 s" in absent.communicate(timeout=WAIT_S)[1]
        assert absent.returncode == 1
        node = begun("run", tmp_path / "robot.yaml", "--action", "--transport", "dds")
        goal = begun("goal", "go", "--time-limit", 1, "--limit-succeeds")
        told = json.loads(goal.communicate(timeout=WAIT_S)[0])
        assert (goal.returncode, told["outcome"]) == (0, "succeeded")
        assert told["steps"] > told["held"]
        goal = begun("goal", "", "--time-limit", WAIT_S)
        assert goal.stderr is not None
        assert "steps" in goal.stderr.readline()
        goal.send_signal(signal.SIGTERM)  # a job behind a shell ignores SIGINT
        told = json.loads(goal.communicate(timeout=WAIT_S)[0])
        assert (goal.returncode, told["outcome"]) == (1, "cancelled")
        node.send_signal(signal.SIGTERM)
        report = json.loads(node.communicate(timeout=WAIT_S)[0])
    assert (node.returncode, report["goals"]) == (0, {"succeeded": 1, "cancelled": 1})

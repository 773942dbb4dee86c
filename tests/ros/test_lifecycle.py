"""A managed node over DDS: its services as a manager calls them, and what the robot is told meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sinew_ros.bridge import Bridge
from sinew_ros.contract import parse
from sinew_ros.driven import hold
from sinew_ros.lifecycle import ACTIVE, ASKED, FINALIZED, INACTIVE, STATES, TRANSITIONS, Managed

from tests.ros.test_bridge import Robot, contract, domain, sending  # noqa: F401 - a fixture
from tests.serve.puppet import desk, until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


class Manager:
    """Calls the services of a node, as Nav2's manager and `ros2 lifecycle` do."""

    def __init__(self, transport: Any):
        self.events: list[Any] = []
        self._transport = transport
        transport.subscribe(
            "/sinew_policy/transition_event",
            "lifecycle_msgs/msg/TransitionEvent",
            "command",
            self.events.append,
        )

    def ask(self, name: str, kind: str, **fields: Any) -> Any:
        answer = self._transport.call(f"/sinew_policy/{name}", f"lifecycle_msgs/srv/{kind}", fields, WAIT_S)
        assert answer is not None, name
        return answer

    def change(self, number: int = 0, label: str = "") -> bool:
        return self.ask("change_state", "ChangeState", transition={"id": number, "label": label}).success

    @property
    def state(self) -> str:
        return self.ask("get_state", "GetState").current_state.label


def test_numbers_and_bytes_are_those_of_the_definitions() -> None:
    typesys = pytest.importorskip("rosbags.typesys", reason="the extra `ros` is not installed")
    from sinew_ros import dds_types
    from sinew_ros.bag import build, types
    from sinew_ros.lifecycle import _description

    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE)
    known = {
        name: number
        for name, _, number in (
            *store.fielddefs["lifecycle_msgs/msg/State"][0],
            *store.fielddefs["lifecycle_msgs/msg/Transition"][0],
        )
    }
    for number, label in STATES.items():
        kind = "TRANSITION" if number >= 10 else "PRIMARY"
        assert known[f"{kind}_STATE_{label.upper()}"] == number
    doing = {
        "configuring": "CONFIGURE",
        "cleaningup": "CLEANUP",
        "shuttingdown": "SHUTDOWN",
        "activating": "ACTIVATE",
    }
    doing |= {"deactivating": "DEACTIVATE", "errorprocessing": "ERROR"}
    for number, (label, start, goal) in TRANSITIONS.items():
        name = f"ON_{doing.get(STATES[start])}_{label.rpartition('_')[2].upper()}"
        if number in ASKED:
            name = f"{STATES[start].upper()}_SHUTDOWN" if label == "shutdown" else label.upper()
            assert doing[STATES[goal]] == label.upper()
        assert known[f"TRANSITION_{name}"] == number
    event = {"timestamp": 1 << 60, **_description(12)}
    kind = "lifecycle_msgs/msg/TransitionEvent"
    wanted = store.serialize_cdr(build(store, kind, event), kind)
    assert bytes(dds_types.build(dds_types.TYPES[kind], event).serialize())[4:] == bytes(wanted)[4:]
    about = {
        "id": "a",
        "instance_id": "b",
        "active": True,
        "heartbeat_timeout": 4.0,
        "heartbeat_period": 0.25,
    }
    status, kind = {"header": {"stamp": {"sec": 1, "nanosec": 2}, "frame_id": ""}, **about}, "bond/msg/Status"
    wanted = types().serialize_cdr(build(types(), kind, status), kind)
    assert bytes(dds_types.build(dds_types.TYPES[kind], status).serialize())[4:] == bytes(wanted)[4:]
    # The services, as rmw_cyclonedds sends them: the caller, the number of its call, then the half's own.
    for name, half, text, fields in (
        ("ChangeState", 0, "lifecycle_msgs/Transition transition", {"transition": event["transition"]}),
        ("ChangeState", 1, "bool success", {"success": True}),
        ("GetState", 0, "uint8 structure_needs_at_least_one_member", {}),
        ("GetState", 1, "lifecycle_msgs/State current_state", {"current_state": event["start_state"]}),
        ("GetAvailableStates", 1, "lifecycle_msgs/State[] available_states",
         {"available_states": [event["start_state"], event["goal_state"]]}),
        ("GetAvailableTransitions", 1, "lifecycle_msgs/TransitionDescription[] available_transitions",
         {"available_transitions": [_description(1), _description(62)]}),
    ):  # fmt: skip
        made = dds_types.build(
            dds_types.SERVICES[f"lifecycle_msgs/srv/{name}"][half], {"guid": 7, "seq": 8, **fields}
        )
        message = f"lifecycle_msgs/msg/{name}{half}"
        store.register(typesys.get_types_from_msg(f"uint64 guid\nint64 seq\n{text}", message))
        given = {"guid": 7, "seq": 8, **(fields or {"structure_needs_at_least_one_member": 0})}
        wanted = store.serialize_cdr(build(store, message, given), message)
        assert bytes(made.serialize())[4:] == bytes(wanted)[4:], name


def test_a_manager_sets_its_states(domain: int, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    from sinew_ros.dds import Dds

    server_and_patience: list[Any] = ["tcp://127.0.0.1:1", 0.2]  # nobody listens there
    with desk() as server, contextlib.ExitStack() as stack:
        robot, serving = Robot(domain), Dds(domain)
        stack.callback(robot.transport.close)
        stack.callback(serving.close)
        node = Managed(
            serving,
            serving,
            lambda topics: Bridge(
                parse(contract(server_and_patience[0])), topics, server_and_patience[1], managed=True
            ),
        )
        stack.callback(node.wait)
        stack.callback(node.stop)
        manager = Manager(robot.transport)
        assert manager.state == "unconfigured"
        assert len(manager.ask("get_available_states", "GetAvailableStates").available_states) == 11
        asked = manager.ask("get_available_transitions", "GetAvailableTransitions").available_transitions
        assert [(each.transition.label, each.goal_state.label) for each in asked] == [
            ("configure", "configuring"),
            ("shutdown", "shuttingdown"),
        ]
        graph = manager.ask("get_transition_graph", "GetAvailableTransitions").available_transitions
        assert len(graph) == 7 + 3 * 6
        assert not manager.change(3)  # activate: not yet
        assert "in the state unconfigured expected one of configure (1), shutdown (5), got 3" in caplog.text
        assert not manager.change(1)  # no server: the node stays as it is, and says why
        assert (manager.state, node.bridge) == ("unconfigured", None)
        server_and_patience[:] = [server.native, WAIT_S]
        assert manager.change(label="configure")
        with sending(robot):
            for _ in range(2):
                assert manager.state == "inactive"
                assert node.bridge is not None
                front = node.bridge.robot.cameras["front"]
                until(lambda: front.received > 3, "messages")  # noqa: B023
                robot.enable({"data": True})
                count = len(robot.arm)
                assert manager.change(3)
                until(lambda: len(robot.arm) > count, "a trajectory")  # noqa: B023
                assert manager.change(4)
                bridge = node.bridge
                assert bridge.loop.controller.paused
                count = bridge.report()["published"]["/gripper"]
                assert manager.change(2)
                until(lambda: manager.state == "unconfigured")
                # An inactive node moves nothing.
                assert bridge.report()["published"]["/gripper"] <= count + 1
                assert manager.change(1)
                assert node.bridge is not None
                assert node.bridge.robot.cameras["front"] is not front  # a bridge of its own
        assert manager.change(label="shutdown")
        node.wait()
        assert STATES[node.state] == "finalized"
        assert not manager.change(1)
        until(lambda: manager.events[-1].goal_state.label == "finalized", "the last event")
    told = [(each.transition.id, each.goal_state.label) for each in manager.events]
    assert told[:2] == [(1, "configuring"), (11, "unconfigured")]
    assert told[-2:] == [(6, "shuttingdown"), (50, "finalized")]


@pytest.mark.parametrize("by", ["silence", "a word"])
def test_a_node_whose_manager_is_gone_holds(domain: int, by: str) -> None:  # noqa: F811
    """The manager's half of a bond by hand, as bond_core has it: its heartbeats say how long it may be silent."""
    from sinew_ros.dds import Dds

    with desk() as server, contextlib.ExitStack() as stack:
        robot, serving = Robot(domain), Dds(domain)
        stack.callback(robot.transport.close)
        stack.callback(serving.close)
        node = Managed(
            serving, serving, lambda topics: Bridge(parse(contract(server.native)), topics, managed=True)
        )
        stack.callback(node.wait)
        stack.callback(node.stop)
        manager = Manager(robot.transport)
        heard: list[Any] = []
        say = robot.transport.publisher("/bond", "bond/msg/Status")
        robot.transport.subscribe("/bond", "bond/msg/Status", "command", heard.append)

        def heartbeat(
            instance: str, active: bool = True, patience: float = WAIT_S, name: str = "sinew_policy"
        ) -> None:
            about = {"header": {"stamp": {"sec": 0, "nanosec": 0}, "frame_id": ""}, "id": name}
            say({**about, "instance_id": instance, "active": active, "heartbeat_timeout": patience})

        def lives() -> Any:
            return [
                each for each in heard if each.id == "sinew_policy" and each.instance_id not in ("m1", "m2")
            ]

        assert manager.change(1)
        with sending(robot):
            for instance, before in (("m1", ""), ("m2", "m1")):
                heard.clear()
                assert manager.change(3)
                until(lambda: len(lives()) > 2, "heartbeats")  # before a manager answers, and without one
                assert all(each.active for each in lives())
                assert len({each.instance_id for each in lives()}) == 1

                def bound(instance: str = instance) -> bool:
                    # Repeat it, because a heartbeat before the node's reader is known would be lost.
                    heartbeat(instance)
                    return node._bond is not None and node._bond._sister == instance

                until(bound, "a bond")
                heartbeat(before or "m0", active=False)  # the last words of a bond before,
                heartbeat(instance, active=False, name="another_node")  # and those of another's
                heartbeat("m9", patience=0.0)
                count = len(lives())
                until(lambda: len(lives()) > count + 3, "more heartbeats")  # noqa: B023
                assert node.state == ACTIVE
                heartbeat(instance, active=by == "silence", patience=0.1)
                until(lambda: node.state == INACTIVE, "the node to deactivate itself")
                assert node.bridge is not None
                assert node.bridge.loop.controller.paused
                until(lambda: not lives()[-1].active, "its own last word")
        assert manager.change(label="shutdown")


@pytest.mark.slow
def test_the_program_is_a_managed_node(domain: int, tmp_path: Path) -> None:  # noqa: F811
    from sinew_ros.dds import Dds

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["packages/sinew_ros", *sys.path])}
    line = [sys.executable, "-m", "sinew_ros", "run", tmp_path / "robot.yaml", "--lifecycle"]

    def begun(*more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*line, *more],
            env=environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    with desk() as server, contextlib.closing(Dds(domain)) as transport:
        (tmp_path / "robot.yaml").write_text(json.dumps(contract(server.native)))
        manager = Manager(transport)
        for wrong, said in (
            (("--transport", "dds", "--steps", "3"), "--steps: cannot be combined with --lifecycle"),
            (("--transport", f"bag:{tmp_path}"), "expected a rosbag of ROS 2"),
        ):
            with begun(*wrong) as refused:
                assert said in refused.communicate(timeout=WAIT_S)[1]
            assert refused.returncode == 1
        for by in ("shutdown", "signal"):
            with begun("--transport", "dds") as program:
                try:
                    assert manager.state == "unconfigured"
                    if by == "signal":
                        program.send_signal(signal.SIGTERM)
                    else:
                        assert manager.change(1)
                        assert manager.change(3)
                        assert manager.state == "active"
                        assert manager.change(label="shutdown")
                    said, errors = program.communicate(timeout=WAIT_S)
                finally:
                    program.kill()
            assert program.returncode == 0, errors
            report = json.loads(said)
            assert report["state"] == "finalized"
            assert ("control" in report) == (by == "shutdown")


def test_a_loop_that_fails_while_it_is_told_to_hold_is_named() -> None:
    """And not that it did not hold, which is what follows from it."""
    told, served = threading.Event(), {}
    loop = SimpleNamespace(steps=0)

    def run() -> None:
        told.wait(WAIT_S)
        raise OSError("the arm does not answer")

    bridge = SimpleNamespace(
        loop=loop,
        contract=SimpleNamespace(settings=SimpleNamespace(period=0.01)),
        run=run,
        stop=told.set,
        enable=lambda on: on or told.set(),
    )
    serving = SimpleNamespace(
        publisher=lambda *_: lambda _: None,
        subscribe=lambda *_: None,
        serve=lambda name, _, answer: served.update({name: answer}),
        now=None,
    )
    node = Managed(serving, serving, lambda _: bridge)  # type: ignore[arg-type, return-value]
    for number, works in ((1, True), (3, True), (4, False)):
        request = SimpleNamespace(transition=SimpleNamespace(id=number, label=""))
        assert served["~/change_state"](request) == {"success": works}
    with pytest.raises(OSError, match="the arm does not answer"):
        node.wait()
    assert node.state == FINALIZED


def test_a_loop_that_does_not_hold_its_robot_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node must not report that the robot holds while its loop stands still."""
    monkeypatch.setattr("sinew_ros.driven.HOLDS_S", 0.01)
    asked: list[bool] = []
    still = SimpleNamespace(
        contract=SimpleNamespace(settings=SimpleNamespace(period=0.001)),
        loop=SimpleNamespace(steps=7),
        ended=False,
        enable=asked.append,
    )
    with pytest.raises(RuntimeError, match="did not hold the robot in time"):
        hold(still)
    assert asked == [False]

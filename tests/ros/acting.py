"""Calls of a ROS action, and the answers of a server: one script for the server of rclpy and for Sinew's server over
DDS.

``python -m tests.ros.acting`` prints the answers of rclpy, in an environment that ``make ros`` has created.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from sinew_ros.actions import ActionServer
from sinew_ros.goals import ABORTED, CANCELED, KIND, NAME, SUCCEEDED
from sinew_ros.messages import time_of

WAIT_S = 60.0
NEVER = {"sec": 0, "nanosec": 0}
Call = Callable[
    [str, dict], Any
]  # gets the name of a service and the fields of a request, and returns the response


class Scripted:
    """An actor that rejects the goal "no", does not let "stubborn" be cancelled, and ends no goal by itself."""

    def __init__(self) -> None:
        self.goals: dict[int, Any] = {}

    def wants(self, goal: Any) -> bool:
        return goal.prompt != "no"

    def cancels(self, number: bytes) -> bool:
        return self.goals[number[0]].goal.prompt != "stubborn"

    def begin(self, goal: Any) -> None:
        self.goals[goal.id[0]] = goal

    def end(self, number: int, status: int) -> None:
        limit = time.monotonic() + WAIT_S
        while number not in self.goals and time.monotonic() < limit:
            time.sleep(0.005)
        self.goals[number].end(status, {"outcome": status, "message": "scripted", "steps": 7})


def transcript(actor: Scripted, call: Call) -> list[Any]:
    """Return the answers of a server to the script."""
    said: list[Any] = []
    after: dict[int, dict[str, int]] = {}  # number of a goal -> a time between this goal and the next one

    def uuid(number: int) -> dict[str, Any]:
        return {"uuid": [number] * 16}

    def send(number: int, prompt: str = "go") -> None:
        answer = call("send_goal", {"goal_id": uuid(number), "goal": {"prompt": prompt}})
        said.append(["send", number, prompt, answer.accepted])
        time.sleep(0.02)
        after[number] = time_of(
            time.time()
        )  # rcl sets the stamp of a goal after its answer, so the time must be later
        time.sleep(0.02)

    def cancel(number: int, until: int = 0) -> None:
        info = {"goal_id": uuid(number), "stamp": after[until] if until else NEVER}
        answer = call("cancel_goal", {"goal_info": info})
        found = sorted(int(each.goal_id.uuid[0]) for each in answer.goals_canceling)
        said.append(["cancel", number, until, answer.return_code, found])

    def result(number: int) -> None:
        answer = call("get_result", {"goal_id": uuid(number)})
        said.append(
            [
                "result",
                number,
                answer.status,
                answer.result.outcome,
                answer.result.message,
                answer.result.steps,
            ]
        )

    cancel(0)  # there are no goals yet
    send(1)
    send(1)  # the same id again
    send(2, "no")
    send(3, "stubborn")
    cancel(9)  # an unknown goal
    cancel(2)  # a rejected goal
    cancel(3)
    cancel(1)
    cancel(1)  # the goal is being cancelled
    cancel(0)  # all goals: one is being cancelled, the other cannot be cancelled
    actor.end(1, CANCELED)
    result(1)
    actor.end(3, ABORTED)  # rclpy skips the goals after one that cannot be cancelled
    result(3)
    cancel(1)  # the goal has ended
    send(1)  # the id of a goal whose result is still stored
    for number in (4, 5, 6):
        send(number)
    cancel(0, until=4)
    send(7)
    cancel(6, until=4)  # goals that are already being cancelled are not reported again
    actor.end(4, ABORTED)  # each of these terminal states may follow a cancel
    actor.end(6, SUCCEEDED)
    actor.end(5, SUCCEEDED)
    for number in (4, 5, 6, 2, 9):
        result(number)
    cancel(0)  # all remaining goals
    actor.end(7, CANCELED)
    result(7)
    return said


def over_services() -> tuple[list[Any], dict[str, list[int]]]:
    """Return the answers of Sinew's server over services and topics, and the states of each goal that it publishes."""
    services: dict[str, Any] = {}
    told: list[Any] = []
    transport = SimpleNamespace(
        now=time.time,
        take=lambda name, _kind, take: services.update({name.rpartition("/")[2]: take}),
        publisher=lambda *_: told.append,
    )
    actor = Scripted()
    ActionServer(transport, NAME, KIND, actor)  # type: ignore[arg-type]

    def call(service: str, fields: dict) -> Any:
        answers: list[Any] = []
        services[service](_object(_filled(service, fields)), answers.append)
        return _object(_filled(service, answers[0]))

    said = transcript(actor, call)
    return said, _states(
        [[(x["goal_info"]["goal_id"]["uuid"][0], x["status"]) for x in m["status_list"]] for m in told]
    )


def over_rclpy() -> tuple[list[Any], dict[str, list[int]]]:
    """Return the same as :func:`over_services`, but from rclpy's action server.

    The transport of the node creates this server. A second node sends the calls.
    """
    import rclpy
    from action_msgs.msg import GoalStatusArray
    from action_msgs.srv import CancelGoal
    from rclpy.qos import QoSProfile
    from sinew_msgs.action import RunPolicy
    from sinew_ros.node import Rclpy
    from sinew_ros.node import _filled as filled

    actor, transport = Scripted(), Rclpy()
    asks = rclpy.create_node("asks")
    executor = rclpy.executors.SingleThreadedExecutor()
    executor.add_node(asks)
    told: list[Any] = []
    below = f"{NAME}/_action/"
    asks.create_subscription(
        GoalStatusArray, f"{below}status", lambda m: told.append(m.status_list), QoSProfile(depth=100)
    )
    impl = RunPolicy.Impl
    kinds = {
        "send_goal": impl.SendGoalService,
        "get_result": impl.GetResultService,
        "cancel_goal": CancelGoal,
    }
    clients = {name: asks.create_client(kind, below + name) for name, kind in kinds.items()}
    transport.act(NAME, KIND, actor)  # type: ignore[arg-type]

    def call(service: str, fields: dict) -> Any:
        assert clients[service].wait_for_service(WAIT_S)
        request = filled(kinds[service].Request(), {k: v for k, v in fields.items() if k != "goal"})
        if "goal" in fields:
            request.goal = filled(RunPolicy.Goal(), fields["goal"])
        future = clients[service].call_async(request)
        executor.spin_until_future_complete(future, WAIT_S)
        return future.result()

    said = transcript(actor, call)
    executor.spin_once(0.2)
    end = time.monotonic() + WAIT_S
    while [x.status for x in told[-1] if x.goal_info.goal_id.uuid[0] == 7] != [
        CANCELED
    ] and time.monotonic() < end:
        executor.spin_once(0.2)
    transport.close()
    return said, _states([[(int(x.goal_info.goal_id.uuid[0]), x.status) for x in each] for each in told])


def _states(told: list[list[tuple[int, int]]]) -> dict[str, list[int]]:
    """Return the states of each goal, without repetitions."""
    found: dict[str, list[int]] = {}
    for message in told:
        for number, status in message:
            states = found.setdefault(str(number), [])
            if states[-1:] != [status]:
                states.append(status)
    return found


def _filled(service: str, fields: dict) -> dict:
    """Return the fields with the further fields that a message would have."""
    if service == "get_result":
        return {"result": {"outcome": 0, "message": "", "steps": 0}, **fields}
    return fields


def _object(value: Any) -> Any:
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _object(each) for name, each in value.items()})
    return [_object(each) for each in value] if isinstance(value, list) else value


class Client:
    """A node of rclpy with an ActionClient."""

    def __init__(self, name: str):
        import rclpy
        from rclpy.action import ActionClient
        from sinew_msgs.action import RunPolicy

        self._rclpy, self.node, self._goal = rclpy, rclpy.create_node(name), RunPolicy.Goal
        self.client = ActionClient(self.node, RunPolicy, NAME)
        self.feedback: list[Any] = []
        assert self.client.wait_for_server(WAIT_S)

    def wait(self, future: Any) -> Any:
        self._rclpy.spin_until_future_complete(self.node, future, timeout_sec=WAIT_S)
        return future.result()

    def send(self, time_limit: float = WAIT_S) -> Any:
        goal = self._goal(prompt="go")
        goal.time_limit.sec, goal.time_limit.nanosec = int(time_limit), int(time_limit % 1 * 1e9)
        return self.wait(self.client.send_goal_async(goal, lambda each: self.feedback.append(each.feedback)))

    def end(self, handle: Any) -> list[int]:
        answer = self.wait(handle.get_result_async())
        return [answer.status, answer.result.outcome]

    def until(self, condition: Callable[[], Any]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition() and time.monotonic() < end:
            self._rclpy.spin_once(self.node, timeout_sec=0.1)
        assert condition()


def killed() -> None:
    """Run a client that ends as soon as its goal is accepted."""
    import rclpy

    rclpy.init()
    handle = Client("killed").send(1.5)
    os._exit(7 if handle.accepted else 1)


def asked() -> None:
    """Call a node as two clients of rclpy, and print the results. The node's end must end the last goal."""
    import rclpy
    from action_msgs.msg import GoalStatusArray
    from rclpy.qos import qos_profile_action_status_default
    from std_msgs.msg import Bool

    rclpy.init()
    one, other = Client("one"), Client("other")
    said: dict[str, Any] = {}
    handle = one.send()
    one.until(lambda: one.feedback and len(one.feedback[-1].command))
    said["command"] = list(one.feedback[-1].command)
    said["accepted"] = [handle.accepted, other.send().accepted]
    answer = one.wait(handle.cancel_goal_async())
    said["cancelled"] = [answer.return_code, len(answer.goals_canceling), *one.end(handle)]
    handle = one.send()
    success = other.node.create_publisher(Bool, "/sinew/success", 10)
    ended = handle.get_result_async()
    one.until(lambda: success.publish(Bool(data=True)) or ended.done())
    said["succeeded"] = [
        ended.result().status,
        ended.result().result.outcome,
        ended.result().result.chunks > 0,
    ]
    said["time limit"] = one.end(one.send(0.5))
    states: list[int] = []
    one.node.create_subscription(
        GoalStatusArray, f"{NAME}/_action/status", lambda each: states.append(each.status_list[-1].status),
        qos_profile_action_status_default,
    )  # fmt: skip
    one.until(lambda: states)  # no state has changed since then
    said["exit of the killed"] = subprocess.run(
        [sys.executable, "-m", "tests.ros.acting", "killed"], check=False
    ).returncode
    count = len(states)
    one.until(lambda: states[count:] and states[-1] == ABORTED)
    said["after the killed"] = states[-1]
    handle = one.send()
    print("runs", flush=True)
    said["the node's end"] = one.end(handle)
    print(json.dumps(said))


if __name__ == "__main__":
    what = sys.argv[1] if sys.argv[1:] else ""
    {"killed": killed, "asked": asked}[what]() if what else print(json.dumps(over_rclpy()))

"""The bridge as a node of rclpy. :mod:`sinew_ros.bridge` contains all decisions, and this module only transports
messages.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sinew_client import ClientError

from sinew_ros.actions import KEPT_S
from sinew_ros.bridge import NODE, SENSOR
from sinew_ros.goals import ABORTED, CANCELED, SUCCEEDED, Goals


class Rclpy:
    """A node of rclpy as the transport of a bridge. ROS time is the node's clock, which may be simulated.

    Args:
        name: Name of the node.
        arguments: Arguments for ROS, such as ``--ros-args``.

    Raises:
        ClientError: rclpy is not installed.
    """

    def __init__(self, name: str = NODE, arguments: list[str] | None = None):
        try:
            import rclpy
        except ImportError as error:
            raise ClientError(
                f"rclpy: source an installation of ROS 2 first, or use --transport dds ({error})"
            ) from error
        rclpy.init(args=arguments)
        self._rclpy, self.node = rclpy, rclpy.create_node(name)
        self._thread: threading.Thread | None = None

    def subscribe(self, topic: str, kind: str, quality: str, callback: Callable[[Any], None]) -> None:
        from rclpy.qos import QoSProfile, qos_profile_sensor_data

        profile = qos_profile_sensor_data if quality == SENSOR else QoSProfile(depth=10)
        self.node.create_subscription(_message(kind), topic, callback, profile)
        self._spin()

    def publisher(self, topic: str, kind: str) -> Callable[[Mapping[str, Any]], None]:
        made = _message(kind)
        if "/action/" in kind:
            from rclpy.action import ActionClient

            client = ActionClient(self.node, made, topic)
            return lambda fields: client.send_goal_async(_filled(made.Goal(), fields))
        publisher = self.node.create_publisher(made, topic, 10)
        return lambda fields: publisher.publish(_filled(made(), fields))

    def act(self, name: str, kind: str, actor: Goals) -> None:
        """Run an action server of rclpy.

        Args:
            name: Name of the action.
            kind: Type of the action.
            actor: Object that accepts, runs and cancels the goals.
        """
        from rclpy.action import ActionServer, CancelResponse, GoalResponse

        made = _message(kind)

        def accepted(handle: Any) -> None:
            goal = RclpyGoal(handle, made, self.node.executor)
            handle.execute(goal.ended)
            actor.begin(goal)

        ActionServer(
            self.node,
            made,
            name,
            # rclpy requires this argument, but `accepted` starts each goal with its own callback.
            execute_callback=lambda _: made.Result(),
            goal_callback=lambda goal: GoalResponse.ACCEPT if actor.wants(goal) else GoalResponse.REJECT,
            handle_accepted_callback=accepted,
            cancel_callback=lambda handle: (
                CancelResponse.ACCEPT if actor.cancels(bytes(handle.goal_id.uuid)) else CancelResponse.REJECT
            ),
            result_timeout=KEPT_S,
        )
        self._spin()

    def serve(self, name: str, kind: str, answer: Callable[[Any], Mapping[str, Any]]) -> None:
        """Answer the calls of a service.

        Args:
            name: Name of the service.
            kind: Type of the service.
            answer: Returns the fields of the response to a request.
        """

        def reply(request: Any, response: Any) -> Any:
            return _filled(response, answer(request))

        self.node.create_service(_message(kind), name, reply)
        self._spin()

    def _spin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        from rclpy.executors import ExternalShutdownException

        with contextlib.suppress(ExternalShutdownException):
            self._rclpy.spin(self.node)

    def now(self) -> float:
        return self.node.get_clock().now().nanoseconds * 1e-9

    def close(self) -> None:
        """End the thread that spins the node, then destroy the node. Without this, the exit of the process would
        interrupt the thread.
        """
        self._rclpy.try_shutdown()
        if self._thread is not None:
            self._thread.join(5.0)
        self.node.destroy_node()


class RclpyGoal:
    """A goal that rclpy's action server has accepted. The thread that runs the node's callbacks also sends the result
    of the goal.
    """

    def __init__(self, handle: Any, made: Any, executor: Any):
        from rclpy.task import Future

        self.goal, self.id = handle.request, bytes(handle.goal_id.uuid)
        self._handle, self._made, self._executor = handle, made, executor
        self._end, self._told = Future(executor=executor), threading.Event()

    def feedback(self, fields: Mapping[str, Any]) -> None:
        self._handle.publish_feedback(_filled(self._made.Feedback(), fields))

    def end(self, status: int, fields: Mapping[str, Any]) -> None:
        self._end.set_result((status, fields))
        self._executor.wake()
        self._told.wait(1.0)

    async def ended(self, handle: Any) -> Any:
        """Wait for the end of the goal, and return its result."""
        status, fields = await self._end
        {SUCCEEDED: handle.succeed, CANCELED: handle.canceled, ABORTED: handle.abort}[status]()
        # Set the event only after the present task, because this task still sends the result.
        self._executor.create_task(self._told.set)
        return _filled(self._made.Result(), fields)


def _message(kind: str) -> Any:
    package, sort, name = kind.split("/")
    return getattr(importlib.import_module(f"{package}.{sort}"), name)


def _filled(message: Any, fields: Mapping[str, Any]) -> Any:
    """Set the fields of a message from a mapping. The level of a DiagnosticStatus becomes a byte."""
    forms = message.get_fields_and_field_types()
    for name, value in fields.items():
        if match := re.fullmatch(r"(sequence<)?(\w+)/(\w+)>?", forms[name]):
            made = _message(f"{match[2]}/msg/{match[3]}")
            value = [_filled(made(), each) for each in value] if match[1] else _filled(made(), value)
        elif forms[name] == "octet":
            value = bytes([value])
        setattr(message, name, value)
    return message

"""The bridge as a node of rclpy. Everything that decides is in :mod:`sinew_ros.bridge`; nothing here is run in CI,
because rclpy comes with an installed ROS 2 and not from a package index."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sinew_client import ClientError

from sinew_ros.bridge import SENSOR


class Rclpy:
    """A node of rclpy as the transport of a bridge; ROS time is the node's clock, simulated where it is so."""

    def __init__(self, name: str = "sinew_policy", arguments: list[str] | None = None):
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
        if self._thread is None:
            self._thread = threading.Thread(target=self._rclpy.spin, args=(self.node,), daemon=True)
            self._thread.start()

    def publisher(self, topic: str, kind: str) -> Callable[[Mapping[str, Any]], None]:
        from rosidl_runtime_py import set_message_fields

        if "/action/" in kind:
            from rclpy.action import ActionClient

            action = _message(kind)
            client = ActionClient(self.node, action, topic)

            def send(fields: Mapping[str, Any]) -> None:
                goal = action.Goal()
                set_message_fields(goal, dict(fields))
                client.send_goal_async(goal)

            return send
        made = _message(kind)
        publisher = self.node.create_publisher(made, topic, 10)

        def publish(fields: Mapping[str, Any]) -> None:
            message = made()
            set_message_fields(message, _octets(fields))
            publisher.publish(message)

        return publish

    def serve(self, name: str, kind: str, answer: Callable[[Any], Mapping[str, Any]]) -> None:
        """Answer the calls of a service."""
        from rosidl_runtime_py import set_message_fields

        package, _, service = kind.split("/")

        def reply(request: Any, response: Any) -> Any:
            set_message_fields(response, dict(answer(request)))
            return response

        found = getattr(importlib.import_module(f"{package}.srv"), service)
        self.node.create_service(found, name, reply)
        if self._thread is None:
            self._thread = threading.Thread(target=self._rclpy.spin, args=(self.node,), daemon=True)
            self._thread.start()

    def now(self) -> float:
        return self.node.get_clock().now().nanoseconds * 1e-9

    def close(self) -> None:
        self.node.destroy_node()
        self._rclpy.try_shutdown()


def _message(kind: str) -> Any:
    package, sort, name = kind.split("/")
    return getattr(importlib.import_module(f"{package}.{sort}"), name)


def _octets(value: Any) -> Any:
    """Return fields as rclpy takes them: the level of a DiagnosticStatus is a byte there."""
    if isinstance(value, Mapping):
        return {key: bytes([each]) if key == "level" else _octets(each) for key, each in value.items()}
    return [_octets(each) for each in value] if isinstance(value, list) else value

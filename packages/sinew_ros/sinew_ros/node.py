"""The bridge as a node of rclpy. Everything that decides is in :mod:`sinew_ros.bridge`."""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sinew_client import ClientError

from sinew_ros.bridge import NODE, SENSOR


class Rclpy:
    """A node of rclpy as the transport of a bridge; ROS time is the node's clock, simulated where it is so."""

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

    def serve(self, name: str, kind: str, answer: Callable[[Any], Mapping[str, Any]]) -> None:
        """Answer the calls of a service."""

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
        """End the thread, which a process that exits would cut off, then the node."""
        self._rclpy.try_shutdown()
        if self._thread is not None:
            self._thread.join(5.0)
        self.node.destroy_node()


def _message(kind: str) -> Any:
    package, sort, name = kind.split("/")
    return getattr(importlib.import_module(f"{package}.{sort}"), name)


def _filled(message: Any, fields: Mapping[str, Any]) -> Any:
    """Return a message with a mapping's fields; the level of a DiagnosticStatus is a byte there."""
    forms = message.get_fields_and_field_types()
    for name, value in fields.items():
        if found := re.fullmatch(r"(sequence<)?(\w+)/(\w+)>?", forms[name]):
            made = _message(f"{found[2]}/msg/{found[3]}")
            value = [_filled(made(), each) for each in value] if found[1] else _filled(made(), value)
        elif forms[name] == "octet":
            value = bytes([value])
        setattr(message, name, value)
    return message

"""Topics over CycloneDDS, without an installed ROS. The messages have the format of rmw_cyclonedds and
rmw_fastrtps.

In DDS, the topic ``/joint_states`` has the name ``rt/joint_states``, and the type ``sensor_msgs/msg/JointState``
has the name ``sensor_msgs::msg::dds_::JointState_`` (ROS 2 design, "Topic and Service name mapping to DDS").
``ros2 node list`` does not list the bridge, because the bridge does not publish on ros_discovery_info. ``ros2
topic list`` lists its topics. Since Kilted, Fast DDS describes its types in a form that CycloneDDS does not
support, so their topics do not connect. config/fastdds.xml disables this form in a robot's nodes.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sinew_client import ClientError

from sinew_ros.actions import ActionServer, Reply
from sinew_ros.bridge import COMMAND, LATCHED, NODE, SENSOR
from sinew_ros.goals import Goals

logger = logging.getLogger(__name__)
READER_S = 1.0  # longest time that a reply waits until DDS has announced the caller's reader
CYCLONE = b"\x01\x10"  # vendor id of CycloneDDS, with which its GUIDs begin (RTPS)


class Dds:
    """A DDS participant as the transport of a bridge.

    Args:
        domain: Number of the DDS domain; None uses ROS_DOMAIN_ID of the environment, or 0.

    Raises:
        ClientError: The package cyclonedds is not installed.
    """

    def __init__(self, domain: int | None = None):
        try:
            from cyclonedds.domain import DomainParticipant
        except ImportError as error:
            raise ClientError(
                f"topics over DDS need the package cyclonedds: pip install 'sinew-ros[dds]' ({error})"
            ) from error
        self._participant = DomainParticipant(
            int(os.environ.get("ROS_DOMAIN_ID", "0")) if domain is None else domain
        )
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def subscribe(self, topic: str, kind: str, quality: str, callback: Callable[[Any], None]) -> None:
        from cyclonedds.sub import DataReader

        reader = DataReader(self._participant, self._topic(topic, kind), qos=_qos(quality))
        self._begin(reader, topic, callback)

    def _begin(self, reader: Any, topic: str, callback: Callable[[Any], None]) -> None:
        thread = threading.Thread(target=self._read, args=(reader, topic, callback), daemon=True)
        self._threads.append(thread)
        thread.start()

    def publisher(self, topic: str, kind: str, quality: str = COMMAND) -> Callable[[Mapping[str, Any]], None]:
        from cyclonedds.pub import DataWriter

        from sinew_ros import dds_types

        if kind in dds_types.ACTIONS:
            return self._goals(topic, kind)
        writer = DataWriter(self._participant, self._topic(topic, kind), qos=_qos(quality))
        return lambda fields: writer.write(dds_types.build(dds_types.TYPES[kind], fields))

    def _goals(self, name: str, kind: str) -> Callable[[Mapping[str, Any]], None]:
        """Return a function that sends the fields of a goal to an action server. A rejected goal is logged. The
        function does not request the result.

        The function raises ClientError for a server on another DDS than CycloneDDS, because the header of a call
        differs there.
        """
        from cyclonedds.builtin import BuiltinDataReader, BuiltinTopicDcpsSubscription

        from sinew_ros import dds_types

        request, response, goal = dds_types.ACTIONS[kind]
        service = f"{name}/_action/send_goal"
        calls, replies = self._caller(service, request, response)
        readers = BuiltinDataReader(self._participant, BuiltinTopicDcpsSubscription)
        own, sent = int.from_bytes(os.urandom(8), "big"), itertools.count(1)

        def refused(reply: Any) -> None:
            if reply.guid == own and not reply.accepted:
                logger.warning("%s: the server rejected goal %d", name, reply.seq)

        self._begin(replies, name, refused)

        def send(fields: Mapping[str, Any]) -> None:
            for each in readers.read(256):
                if getattr(each, "topic_name", "") == f"rq{service}Request" and each.key.bytes[:2] != CYCLONE:
                    raise ClientError(
                        f"{name}: expected an action server of rmw_cyclonedds, got one of another DDS (vendor"
                        f" {each.key.bytes[:2].hex()}); use --transport rclpy"
                    )
            number = dds_types.Uuid(list(os.urandom(16)))
            calls.write(request(own, next(sent), number, dds_types.build(goal, fields)))

        return send

    def serve(self, name: str, kind: str, answer: Callable[[Any], Mapping[str, Any]]) -> None:
        """Answer the calls of a service one after another, on a thread for this service.

        The callers must use rmw_cyclonedds. rmw_fastrtps sends the identity of a caller outside the message,
        where CycloneDDS does not read it.

        Args:
            name: Name of the service.
            kind: Type of the service.
            answer: Returns the fields of the response to a request.
        """
        self.take(name, kind, lambda call, reply: reply(answer(call)))

    def take(self, name: str, kind: str, take: Callable[[Any, Reply], None]) -> None:
        """Receive the calls of a service. The service may reply to each call at any time.

        Args:
            name: Name of the service.
            kind: Type of the service.
            take: Called with each request and a function that sends its reply. Any thread may call this function.
        """
        from cyclonedds.pub import DataWriter
        from cyclonedds.sub import DataReader

        from sinew_ros import dds_types

        request, response = dds_types.SERVICES[kind]
        calls = DataReader(
            self._participant, self._topic(name + "Request", request, "rq"), qos=_qos("command")
        )
        replies = DataWriter(
            self._participant, self._topic(name + "Reply", response, "rr"), qos=_qos("command")
        )

        def reply(call: Any, fields: Mapping[str, Any]) -> None:
            message = dds_types.build(response, fields)
            message.guid, message.seq = call.guid, call.seq
            _wait_for_reader(calls, replies, call)
            replies.write(message)

        self._begin(calls, name, lambda call: take(call, partial(reply, call)))

    def act(self, name: str, kind: str, actor: Goals) -> None:
        """Run an action server.

        Args:
            name: Name of the action.
            kind: Type of the action.
            actor: Object that accepts, runs and cancels the goals.
        """
        ActionServer(self, name, kind, actor)

    def call(self, name: str, kind: str, fields: Mapping[str, Any], seconds: float) -> Any:
        """Call a service, and return its response.

        Args:
            name: Name of the service.
            kind: Type of the service.
            fields: Fields of the request.
            seconds: Seconds to wait.

        Returns:
            The response; None if no response arrived in time, or if the server has disconnected.
        """
        from sinew_ros import dds_types

        request, response = dds_types.SERVICES[kind]
        calls, replies = self._caller(name, request, response)
        message = dds_types.build(request, fields)
        message.guid, message.seq = int.from_bytes(os.urandom(8), "big"), 1
        end = time.monotonic() + seconds
        while not (calls.get_matched_subscriptions() and replies.get_matched_publications()):
            if time.monotonic() > end:
                return None
            time.sleep(0.02)
        calls.write(message)
        while time.monotonic() < end and calls.get_matched_subscriptions():
            for sample in replies.take(16):
                if getattr(sample, "guid", None) == message.guid and sample.seq == message.seq:
                    return sample
            time.sleep(0.005)
        return None

    def _caller(self, name: str, request: Any, response: Any) -> tuple[Any, Any]:
        """Create a writer for the calls of a service and a reader for their replies.

        Args:
            name: Name of the service in ROS.
            request: DDS structure of a call.
            response: DDS structure of a reply.
        """
        from cyclonedds.pub import DataWriter
        from cyclonedds.sub import DataReader

        calls = self._topic(name + "Request", request, "rq")
        replies = self._topic(name + "Reply", response, "rr")
        qos = _qos("command")
        return DataWriter(self._participant, calls, qos=qos), DataReader(self._participant, replies, qos=qos)

    def now(self) -> float:
        return time.time()

    def close(self) -> None:
        """End the threads that read messages."""
        self._ended.set()
        for thread in self._threads:
            thread.join(5.0)

    def _topic(self, topic: str, kind: Any, prefix: str = "rt") -> Any:
        """Create a DDS topic.

        Args:
            topic: Name in ROS; ``~`` stands for the node's name.
            kind: Name of a message type in ROS, or a DDS structure.
            prefix: Prefix of the name in DDS: rt for topics, rq for requests, rr for replies.
        """
        from cyclonedds.topic import Topic

        from sinew_ros import dds_types

        return Topic(
            self._participant, prefix + topic.replace("~", f"/{NODE}", 1), dds_types.TYPES.get(kind, kind)
        )

    def _read(self, reader: Any, topic: str, callback: Callable[[Any], None]) -> None:
        from cyclonedds.core import InstanceState, ReadCondition, SampleState, ViewState, WaitSet

        condition = ReadCondition(reader, SampleState.Any | ViewState.Any | InstanceState.Any)
        waiting = WaitSet(self._participant)
        waiting.attach(condition)
        while not self._ended.is_set():
            if not waiting.wait(200_000_000):  # nanoseconds
                continue
            for sample in reader.take(64):
                if getattr(sample, "sample_info", None) is not None and not sample.sample_info.valid_data:
                    # Skip this sample: it has no data, and only announces that a writer has disconnected.
                    continue
                try:
                    callback(sample)
                except Exception:
                    logger.exception("%s: a message could not be processed and is skipped", topic)


def _wait_for_reader(calls: Any, replies: Any, call: Any) -> None:
    """Wait until DDS has announced the caller's reader. DDS announces the reader and the writer of a caller
    separately. A reply that is written before the reader is known would be lost.

    Args:
        calls: The service's reader.
        replies: The service's writer.
        call: A sample that `calls` returned. Its participant has one reader of replies for each writer of calls.
    """

    def participants(handles: list[int], of: Callable[[int], Any]) -> list[Any]:
        # An endpoint that disconnects between the two calls has no description.
        return [endpoint.participant_key for each in handles if (endpoint := of(each)) is not None]

    caller = calls.get_matched_publication_data(call.sample_info.publication_handle)
    end = time.monotonic() + READER_S
    while caller is not None and time.monotonic() < end:
        writers = participants(calls.get_matched_publications(), calls.get_matched_publication_data)
        readers = participants(replies.get_matched_subscriptions(), replies.get_matched_subscription_data)
        if readers.count(caller.participant_key) >= writers.count(caller.participant_key):
            return
        time.sleep(0.001)


def _qos(quality: str) -> Any:
    """Return ROS 2's quality of service for sensor data (best effort), for commands (the default), or for the
    status of actions (a late subscriber receives the newest message).
    """
    from cyclonedds.core import Policy, Qos
    from cyclonedds.util import duration

    if quality == SENSOR:
        return Qos(Policy.Reliability.BestEffort, Policy.Durability.Volatile, Policy.History.KeepLast(5))
    latched = quality == LATCHED
    return Qos(
        Policy.Reliability.Reliable(duration(seconds=1)),
        Policy.Durability.TransientLocal if latched else Policy.Durability.Volatile,
        Policy.History.KeepLast(1 if latched else 10),
    )

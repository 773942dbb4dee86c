"""Rosbags as transports, in MCAP or SQLite: :class:`Bag` plays a bag, and :class:`Recorded` records one.

ROS does not have to be installed, because the package rosbags reads and writes the files. ``ros2 bag play``
plays the bags of this module, and this module plays the bags of ``ros2 bag record``.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from sinew_client import ClientError

logger = logging.getLogger(__name__)

STORAGES = ("mcap", "sqlite3")
DEFINITIONS = {  # message definitions that the package rosbags does not include
    "interbotix_xs_msgs/msg/JointGroupCommand": "string name\nfloat32[] cmd",
    "interbotix_xs_msgs/msg/JointSingleCommand": "string name\nfloat32 cmd",
    "control_msgs/msg/GripperCommand": "float64 position\nfloat64 max_effort",
    "control_msgs/action/GripperCommand_Goal": "control_msgs/GripperCommand command",
    "franka_msgs/action/Move_Goal": "float64 width\nfloat64 speed",
    "bond/msg/Status": "std_msgs/Header header\nstring id\nstring instance_id\nbool active\n"
    "float32 heartbeat_timeout\nfloat32 heartbeat_period",
}
WAITING = 256  # most messages that wait for the disk; further messages are not recorded
Take = Callable[[Any], None]


def types() -> Any:
    """Load the message definitions of ROS 2 Humble.

    Raises:
        ClientError: The package rosbags is not installed.
    """
    try:
        from rosbags.typesys import Stores, get_types_from_msg, get_typestore
    except ImportError as error:
        raise ClientError(f"bags need the package rosbags: pip install 'sinew-ros[bag]' ({error})") from error
    store = get_typestore(Stores.ROS2_HUMBLE)
    for name, text in DEFINITIONS.items():
        definitions = get_types_from_msg(text, name)
        store.register({each: form for each, form in definitions.items() if each not in store.fielddefs})
    return store


class Bag:
    """A transport that plays a bag at the speed of the recording. ROS time is the time in the bag.

    Published messages are discarded, except by a :class:`Recorded` around this transport.

    Args:
        path: Folder of the bag.

    Raises:
        ClientError: The folder is not a bag, or a topic has another type than the subscription.
    """

    def __init__(self, path: Path):
        self._store = types()
        from rosbags.rosbag2 import Reader, ReaderError

        try:
            self._reader = Reader(path)
            self._reader.open()  # bounded: by the bag reader of rosbags
        except (ReaderError, OSError) as error:
            raise ClientError(f"{path}: expected a rosbag of ROS 2, got {error}") from error
        self._takes: dict[str, list[Take]] = {}
        self._kinds = {each.topic: each.msgtype for each in self._reader.connections}
        self._first = self._reader.start_time * 1e-9 if self._reader.message_count else 0.0
        self._began: float | None = None  # time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def subscribe(self, topic: str, kind: str, quality: str, callback: Take) -> None:
        if self._kinds.get(topic, kind) != kind:
            raise ClientError(
                f"{topic}: expected {kind} in the bag, got {self._kinds[topic]}; change the contract"
            )
        self._takes.setdefault(topic, []).append(callback)

    def publisher(self, topic: str, kind: str) -> Callable[[Mapping[str, Any]], None]:
        return lambda _: None

    def now(self) -> float:
        return self._first + (0.0 if self._began is None else time.monotonic() - self._began)

    def begin(self, over: Callable[[], None]) -> None:
        """Start to play the bag. ``over`` is called after the last message."""
        missing = sorted(set(self._takes) - set(self._kinds))
        if missing:
            logger.warning("the bag has no messages on these topics of the contract: %s", ", ".join(missing))
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._play, args=(over,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._reader.close()

    def _play(self, over: Callable[[], None]) -> None:
        try:
            connections = [each for each in self._reader.connections if each.topic in self._takes]
            for connection, stamp, data in self._reader.messages(connections) if connections else ():
                if self._ended.wait(max(0.0, 1e-9 * stamp - self.now())):
                    return
                try:
                    message = self._store.deserialize_cdr(data, connection.msgtype)
                    for take in self._takes[connection.topic]:
                        take(message)
                except Exception:
                    logger.exception("%s: a message could not be processed and is skipped", connection.topic)
        finally:
            over()


class Recorded:
    """A transport that also writes all received and published messages to a bag, on its own thread.

    The robot never waits for the disk. Messages that a slow or full disk does not accept are counted, and the
    first one is logged.

    Args:
        transport: The transport to record.
        path: Folder of the bag, which must not exist yet.
        storage: One of ``STORAGES``.

    Raises:
        ClientError: The folder exists already.
    """

    def __init__(self, transport: Any, path: Path, storage: str = "mcap"):
        self._transport, self._store, self.path = transport, types(), path
        if path.exists():
            raise ClientError(f"--record: the folder {path} exists already; choose a new folder")
        # Entries are (time in ns, topic, type, message). None ends the thread.
        self._waiting: queue.Queue = queue.Queue(WAITING)
        self.written: Counter = Counter()  # topic -> number of messages
        self.failed = 0
        self._thread = threading.Thread(target=self._write, args=(storage,), daemon=True)
        self._thread.start()

    def subscribe(self, topic: str, kind: str, quality: str, callback: Take) -> None:
        def take(message: Any) -> None:
            # Call the robot's callback first, so that the robot does not wait for the recording.
            callback(message)
            self._put(topic, kind, message)

        self._transport.subscribe(topic, kind, quality, take)

    def publisher(self, topic: str, kind: str) -> Callable[[Mapping[str, Any]], None]:
        publish = self._transport.publisher(topic, kind)

        def both(fields: Mapping[str, Any]) -> None:
            publish(fields)
            self._put(topic, f"{kind}_Goal" if "/action/" in kind else kind, fields)

        return both

    def now(self) -> float:
        return float(self._transport.now())

    def begin(self, over: Callable[[], None]) -> None:
        """Start the recorded transport, if it plays messages. ``over`` is called after the last message."""
        if (begin := getattr(self._transport, "begin", None)) is not None:
            begin(over)

    def close(self) -> None:
        """Close the recorded transport, then complete the bag."""
        self._transport.close()
        self._waiting.put(None)
        self._thread.join()

    def report(self) -> dict[str, Any]:
        """Return the path of the bag, the number of written messages of each topic, and the number of lost
        messages.
        """
        return {"path": str(self.path), "written": dict(self.written), "failed": self.failed}

    def _put(self, topic: str, kind: str, message: Any) -> None:
        try:
            self._waiting.put_nowait((round(self.now() * 1e9), topic, kind, message))
        except queue.Full:
            self._fail("the disk is too slow")

    def _write(self, storage: str) -> None:
        from rosbags.rosbag2 import StoragePlugin, Writer

        writer = Writer(self.path, version=9, storage_plugin=StoragePlugin[storage.upper()])
        connections: dict[str, Any] = {}
        try:
            with writer:
                while (each := self._waiting.get()) is not None:
                    stamp, topic, kind, message = each
                    if topic not in connections:
                        connections[topic] = writer.add_connection(topic, kind, typestore=self._store)
                    data = self._store.serialize_cdr(build(self._store, kind, message), kind)
                    writer.write(connections[topic], stamp, data)
                    self.written[topic] += 1
        except Exception as error:  # noqa: BLE001 - an error of the disk or of a message must not stop the robot
            self._fail(str(error))
            while self._waiting.get() is not None:
                self.failed += 1

    def _fail(self, why: str) -> None:
        if not self.failed:
            logger.warning(
                "%s: messages are lost in the recording, but the robot continues: %s", self.path, why
            )
        self.failed += 1


def build(store: Any, kind: str, value: Any) -> Any:
    """Convert an object or a mapping to a message of rosbags.

    Args:
        store: Type store of rosbags with the definitions.
        kind: Type of the message, such as ``sensor_msgs/msg/JointState``.
        value: Object or mapping with the fields of the message.

    Returns:
        The message, as an instance of the class in ``store``.
    """
    if type(value) is store.types[kind]:
        return value
    get = value.__getitem__ if isinstance(value, Mapping) else lambda name: getattr(value, name)
    fields = {name: _field(store, form, get(name)) for name, form in store.fielddefs[kind][1]}
    return store.types[kind](**fields)


def _field(store: Any, form: Any, value: Any) -> Any:
    node, inner = form
    if node.name == "NAME":
        return build(store, inner, value)
    if node.name == "BASE":
        return value[0] if inner[0] in ("octet", "byte") and isinstance(value, bytes) else value
    of = inner[0]  # element type of an array or a sequence
    if of[0].name == "BASE" and of[1][0] != "string":
        if isinstance(value, (bytes, bytearray, memoryview)):
            return np.frombuffer(value, np.uint8)
        return np.asarray(value, of[1][0])
    return [_field(store, of, each) for each in value]

"""A robot of LeRobot's remote inference with its messages, its order of steps and its checks, without LeRobot.

LeRobot 0.7 was not on the package index when this was written. The client follows huggingface/lerobot at 88807eb6:
``remote_inference/{client,protocol,codec}.py`` and ``transport/zenoh.py``. It shares no code with the server.
"""

from __future__ import annotations

import atexit
import json
import queue
import time
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

import msgpack
import numpy as np
import zenoh

ROOT = "lerobot/inference/v1/deployments"
WAIT_S = 30.0  # seconds to wait on a machine with load; LeRobot's own limits are shorter
ECHOED = ("artifact_identity", "observation_id", "capture_time", "task", "task_version")


class RemoteFault(Exception):  # noqa: N818 - the client's own word: it ends the run
    """An error message of the server, or an answer that LeRobot's client does not accept."""

    def __init__(self, code: str, message: str, details: Any = None):
        super().__init__(f"{code}: {message}")
        self.code, self.more = code, details


def tensor(value: np.ndarray, order: str = "little") -> dict[str, Any]:
    swapped = value.astype(value.dtype.newbyteorder("<" if order == "little" else ">"))
    return {
        "__lerobot_type__": "tensor",
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "endianness": order,
        "data": swapped.tobytes(),
    }


def rgb(frame: np.ndarray, data: bytes | None = None) -> dict[str, Any]:
    """Return the message of a frame. data: a JPEG file, or None for raw pixels."""
    return {
        "__lerobot_type__": "rgb",
        "encoding": "raw" if data is None else "jpeg",
        "shape": list(frame.shape),
        "dtype": "uint8",
        "channel_order": "RGB",
        "data": frame.tobytes() if data is None else data,
    }


def array(record: Mapping[str, Any]) -> np.ndarray:
    order = "<" if record["endianness"] == "little" else ">"
    return np.frombuffer(record["data"], np.dtype(record["dtype"]).newbyteorder(order)).reshape(
        record["shape"]
    )  # type: ignore[call-overload]


def direct(callback: Any) -> Any:
    """Return a callback that runs without its own thread, because such a thread would keep a failed test's process
    alive."""
    return zenoh.handlers.Callback(callback, indirect=False)


def opened(
    endpoint: str, key: str = "", mode: str = "peer", user: str = "sinew", **settings: Any
) -> zenoh.Session:
    """Open a session as the robot does: one endpoint and no discovery. settings: settings of Zenoh, with __ instead
    of /."""
    config = zenoh.Config()
    for at, value in {
        "mode": mode,
        "scouting/multicast/enabled": False,
        "scouting/gossip/enabled": False,
        "listen/endpoints": [],
        "connect/endpoints": [endpoint],
        "connect/exit_on_failure": True,
        "connect/timeout_ms": 3000,
        **({"transport/auth/usrpwd/user": user, "transport/auth/usrpwd/password": key} if key else {}),
        **{name.replace("__", "/"): value for name, value in settings.items()},
    }.items():
        config.insert_json5(at, json.dumps(value))
    try:
        session = zenoh.open(config)
        atexit.register(session.close)  # a session that a failed test left open would keep the process alive
        return session
    except zenoh.ZError as error:
        raise ConnectionError(f"cannot connect, or the key is not accepted: {error}") from error


class RemoteRobot:
    """One robot. ``features`` is only checked by the server."""

    def __init__(self, address: str, deployment: str, key: str = "", mode: str = "peer", **settings: Any):
        endpoint = address.replace("://", "/")
        self.session = opened(endpoint, key, mode, **settings)
        self.deployment, self.generation, self.sequence = deployment, 0, 0
        self.name = self.instance = ""
        self.descriptor: dict[str, Any] = {}
        self.presence: Any = None
        self.token: Any = None

    def envelope(self, kind: str, body: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
        return {
            "version": 1,
            "message_type": kind,
            "instance_id": self.instance,
            "session_id": self.name,
            "generation": self.generation,
            "request_id": uuid4().hex,
            "body": dict(body),
            **changes,
        }

    def query(self, key: str, message: Mapping[str, Any] | bytes, timeout: float = WAIT_S) -> dict[str, Any]:
        """Send a query when a queryable matches. Returns the answer.

        Raises:
            TimeoutError: No answer arrived.
        """
        payload = message if isinstance(message, bytes) else msgpack.packb(message, use_bin_type=True)
        querier = self.session.declare_querier(
            key, target=zenoh.QueryTarget.ALL, consolidation=zenoh.ConsolidationMode.NONE, timeout=timeout
        )
        try:
            end = time.monotonic() + timeout
            while not querier.matching_status.matching:
                if time.monotonic() > end:
                    raise TimeoutError(f"no server answers {key}")
                time.sleep(0.005)
            replies = [reply.ok.payload.to_bytes() for reply in querier.get(payload=payload) if reply.ok]
        finally:
            querier.undeclare()
        if len(replies) != 1:
            raise TimeoutError(f"expected one answer of {key}, got {len(replies)}")
        return self.read(replies[0])

    @staticmethod
    def read(payload: bytes) -> dict[str, Any]:
        found: dict[str, Any] = msgpack.unpackb(payload, raw=False)
        assert found["version"] == 1
        return found

    def ask(self, key: str, message: Mapping[str, Any], kind: str) -> dict[str, Any]:
        """Send a query whose answer must have a kind and repeat the identity of its request."""
        reply = self.query(key, message)
        same = ("instance_id", "request_id", "generation") + (() if kind == "accepted" else ("session_id",))
        if kind != "descriptor":
            assert all(reply[name] == message[name] for name in same), reply
        raise_error(reply)
        assert reply["message_type"] == kind, reply
        return reply

    # ------------------------------------------------------------------------- a run

    def describe(self) -> dict[str, Any]:
        message = self.envelope("describe", {}, instance_id="", session_id="", generation=0)
        reply = self.ask(f"{ROOT}/{self.deployment}/describe", message, "descriptor")
        body: dict[str, Any] = reply["body"]
        assert reply["request_id"] == message["request_id"]
        assert (body["deployment"], body["instance_id"]) == (self.deployment, reply["instance_id"])
        assert body["ready"]
        self.descriptor, self.instance = body, body["instance_id"]
        self.presence = queue.SimpleQueue[bool]()
        self._watch = self.session.liveliness().declare_subscriber(
            f"{self.at}/alive",
            direct(lambda sample: self.presence.put(sample.kind == zenoh.SampleKind.PUT)),
            history=True,
        )
        return body

    @property
    def at(self) -> str:
        return f"{ROOT}/{self.deployment}/instances/{self.instance}"

    @property
    def key(self) -> str:
        return f"{self.at}/sessions/{self.name}"

    def open_body(self, mode: str = "chunk", merge: str | None = None, **changes: Any) -> dict[str, Any]:
        offered = self.descriptor["capabilities"]
        body = {
            "expected_artifact": self.descriptor["artifact_identity"],
            "features": offered["features"],
            "action_feature": offered["action_feature"],
            "semantics": self.descriptor["semantics"],
            "action_interval": offered["action_interval"],
            "mode": mode,
            "encoding": "raw",
        }
        if merge == "aligned":
            body |= {
                "chunk_settings": {"chunk_merge": merge},
                "required_capabilities": ["chunk_alignment_v2"],
            }
        return {name: value for name, value in (body | changes).items() if value is not ...}

    def open(self, mode: str = "chunk", merge: str | None = None, **changes: Any) -> dict[str, Any]:
        message = self.envelope("open", self.open_body(mode, merge, **changes), session_id="", generation=0)
        reply = self.ask(f"{self.at}/open", message, "accepted")
        body: dict[str, Any] = reply["body"]
        for name in ("artifact_identity", "capabilities"):
            assert body[name] == self.descriptor[name]
        assert body["mode"] == mode
        if merge == "aligned":
            assert body["chunk_settings"] == {"chunk_merge": merge}
        self.name, self.mode, self.merge = reply["session_id"], mode, merge
        self.generation = self.sequence = 0
        assert self.name
        return body

    def begin(self) -> None:
        """Subscribe to the answers, declare the robot, and reset, as the client does after it was accepted."""
        self.answers: queue.Queue[bytes] = queue.Queue()
        self.texts: queue.Queue[bytes] = queue.Queue()
        self._heard = [
            self.session.declare_subscriber(
                f"{self.key}/{end}", direct(lambda sample, into=into: into.put(sample.payload.to_bytes()))
            )
            for end, into in (("act", self.answers), ("language/result", self.texts))
        ]
        self.token = self.session.liveliness().declare_token(f"{self.key}/alive")
        self.control("reset", 0)
        drop = zenoh.CongestionControl.DROP
        self._sent = {
            end: self.session.declare_publisher(f"{self.key}/{end}", congestion_control=drop)
            for end in ("obs", "language/request")
        }
        end = time.monotonic() + WAIT_S
        while not all(each.matching_status.matching for each in self._sent.values()):
            assert time.monotonic() < end, "the server does not subscribe to observations"
            time.sleep(0.005)

    def start(self, mode: str = "chunk", merge: str | None = None, **changes: Any) -> RemoteRobot:
        self.describe()
        self.open(mode, merge, **changes)
        self.begin()
        return self

    def control(self, operation: str, generation: int, **changes: Any) -> dict[str, Any]:
        message = self.envelope("control", {"operation": operation}, generation=generation, **changes)
        reply = self.ask(f"{self.key}/control", message, "ack")
        assert reply["body"]["operation"] == operation
        assert reply["body"]["applied_generation"] == generation
        self.generation = generation
        body: dict[str, Any] = reply["body"]
        return body

    def body(self, features: Mapping[str, Any], task: str = "go", **changes: Any) -> dict[str, Any]:
        self.sequence += 1
        body = {
            "sequence": self.sequence,
            "artifact_identity": self.descriptor["artifact_identity"],
            "observation_id": uuid4().hex,
            "capture_time": time.monotonic(),
            "task": task,
            "task_version": 0,
            "features": dict(features),
            "delay": 0,
            "model_continuation": None,
            "canonical_continuation": None,
            "cursor": 0,
        }
        if self.merge == "aligned":
            body["observation_cursor"] = 0
        return {name: value for name, value in (body | changes).items() if value is not ...}

    def send(self, message: Mapping[str, Any] | bytes, end: str = "obs") -> None:
        payload = message if isinstance(message, bytes) else msgpack.packb(message, use_bin_type=True)
        self._sent[end].put(payload)

    def receive(
        self, message: Mapping[str, Any], texts: bool = False, timeout: float = WAIT_S
    ) -> dict[str, Any]:
        """Return the answer to a message. Answers to older messages are dropped, as in the client."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                found = self.read((self.texts if texts else self.answers).get(timeout=left))
            except queue.Empty:
                break
            same = ("instance_id", "session_id", "generation", "request_id")
            if all(found[name] == message[name] for name in same):
                raise_error(found)
                return found
        raise TimeoutError("no answer arrived in time")

    def infer(self, features: Mapping[str, Any], task: str = "go", **changes: Any) -> dict[str, Any]:
        """Send an observation. Returns the checked body of its action."""
        body = self.body(features, task, **changes)
        message = self.envelope("observation", body)
        self.send(message)
        reply = self.receive(message)
        assert reply["message_type"] == "action"
        found: dict[str, Any] = reply["body"]
        assert all(found[name] == body[name] for name in ECHOED), found
        if self.merge == "aligned":
            for name in ("observation_cursor", "cursor"):
                assert type(found[name]) is int
                assert found[name] == body[name]
        offered = self.descriptor["capabilities"]
        steps = offered["execution_steps" if self.mode == "chunk" else "prediction_steps"]
        shape = (steps, *offered["action_feature"]["shape"])
        for name in ("canonical_actions",) + (() if self.mode == "chunk" else ("model_actions",)):
            rows = array(found[name])
            assert rows.shape == shape
            assert rows.dtype == np.float32
            assert np.isfinite(rows).all()
        assert found["execution_steps"] == steps
        assert all(isinstance(value, float) for value in found["server_durations"].values())
        return found

    def actions(self, features: Mapping[str, Any], task: str = "go", **changes: Any) -> np.ndarray:
        return array(self.infer(features, task, **changes)["canonical_actions"])

    def say(self, features: Mapping[str, Any], kind: str, text: str, **changes: Any) -> dict[str, Any]:
        """Request text. Returns the checked body of the result."""
        body = self.body(features, delay=..., model_continuation=..., canonical_continuation=..., cursor=...)
        body |= {"kind": kind, "text": text, "intent_generation": 3} | changes
        message = self.envelope("language_request", body)
        self.send(message, "language/request")
        found: dict[str, Any] = self.receive(message, texts=True)["body"]
        assert all(found[name] == body[name] for name in (*ECHOED, "kind", "intent_generation"))
        assert found["answer"].strip()
        return found

    def close(self, politely: bool = True) -> None:
        if politely and self.token is not None:
            self.control("close", self.generation)
            self.token = None
        self.session.close()


def raise_error(message: Mapping[str, Any]) -> None:
    if message["message_type"] == "error":
        body = message["body"]
        raise RemoteFault(body["code"], body["message"], body.get("details"))

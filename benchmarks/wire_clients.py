"""One client class for each protocol with the same methods, for benchmarks and tests.

``connect("openpi", address).ask(frames, state, prompt, seed)`` returns the actions and the times that the server
measured. Each class does only what the original client of the protocol does. The messages of GR00T and LeRobot are
those of the clients in ``tests/``.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack
import numpy as np

TIMEOUT_S = 120.0

Frames = dict[str, np.ndarray]


@dataclass(frozen=True)
class Answer:
    """An answer of a server.

    Attributes:
        actions: The chunk.
        total_ms: Time of the policy. None if the protocol does not transmit it.
        queue_ms: Time in the queue of the server. None if the protocol does not transmit it.
    """

    actions: np.ndarray
    total_ms: float | None
    queue_ms: float | None


class WireClient(Protocol):
    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        """Send one observation and return the answer.

        Args:
            frames: Camera name -> uint8 [height, width, 3].
            state: float32 [D].
            prompt: The instruction.
            seed: Seed of the noise, if the protocol can transmit it.
            steps: Number of solver steps, if the protocol can transmit it.
        """

    def close(self) -> None: ...


def connect(wire: str, address: str, api_key: str = "") -> WireClient:
    """Open a client.

    Args:
        wire: Name of the protocol.
        address: The address that ``sinew serve`` prints.
        api_key: The API key, if the server requires one.
    """
    return CLIENTS[wire](address, api_key)


class Native:
    def __init__(self, address: str, api_key: str = ""):
        from sinew_client import Client

        self.client = Client(address, timeout=TIMEOUT_S, api_key=api_key)

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        chunk = self.client.infer(_observation(frames, state, prompt, seed, steps))
        return Answer(chunk.actions, chunk.timing.total_ms, chunk.timing.queue_ms)

    def close(self) -> None:
        self.client.close()


class OpenPI:
    """A client like ``openpi_client.WebsocketClientPolicy``, with the same websocket package, options and encoding."""

    def __init__(self, address: str, api_key: str = ""):
        from websockets.sync.client import connect as websocket

        headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self.stack = contextlib.ExitStack()
        opened = websocket(address, compression=None, max_size=None, additional_headers=headers)
        self.socket = self.stack.enter_context(opened)
        self.socket.recv(TIMEOUT_S)  # the first message of the server is its metadata

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        sent = _observation(frames, state, prompt, seed, steps)
        self.socket.send(msgpack.packb(sent, default=_pack))
        reply = self.socket.recv(TIMEOUT_S)
        if isinstance(reply, str):
            raise RuntimeError(reply)
        found = msgpack.unpackb(reply, object_hook=_unpack)
        timing = found["policy_timing"], found["server_timing"]
        return Answer(found["actions"], timing[0]["infer_ms"], timing[1]["queue_ms"])

    def close(self) -> None:
        self.stack.close()


class Http:
    """A client that sends ``POST /v1/actions`` with msgpack, and keeps its connection open."""

    def __init__(self, address: str, api_key: str = ""):
        self.connection = http.client.HTTPConnection(address.partition("//")[2], timeout=TIMEOUT_S)
        self.headers = {"Content-Type": "application/msgpack"}
        if api_key:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        sent = _observation(frames, state, prompt, seed, steps)
        self.connection.request(
            "POST", "/v1/actions", msgpack.packb(sent, default=_pack), headers=self.headers
        )
        reply = self.connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(body.decode(errors="replace"))
        if reply.headers.get_content_type() == "application/json":
            found = json.loads(body)
        else:
            found = msgpack.unpackb(body, object_hook=_unpack)
        timing = found["timing"]
        return Answer(np.asarray(found["actions"], np.float32), timing["total_ms"], timing["queue_ms"])

    def close(self) -> None:
        self.connection.close()


class Groot:
    def __init__(self, address: str, api_key: str = ""):
        from tests.serve.groot_client import PolicyClient

        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.client = PolicyClient(host, int(port), api_key, timeout_ms=int(1e3 * TIMEOUT_S))
        try:
            self.prompt_key = self.client.get_modality_config()["language"].modality_keys[0]
        except BaseException:
            self.client.close()  # otherwise, closing the ZeroMQ context would wait for this client
            raise

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        observation = {
            "video": {name: frame[None, None] for name, frame in frames.items()},
            "state": {"state": state[None, None]},
            "language": {self.prompt_key: [[prompt]]},
        }
        actions, info = self.client.get_action(observation, {"seed": seed, "solver_steps": steps})
        timing = info["timing"][0]
        return Answer(actions["actions"][0], timing["total_ms"], timing["queue_ms"])

    def close(self) -> None:
        self.client.close()


class LeRobot:
    """A client of LeRobot's protocol, which cannot transmit a seed or times. The server must answer every
    observation."""

    def __init__(self, address: str, api_key: str = "", policy: str = "blocks", kind: str = "smolvla"):
        from tests.serve.test_lerobot_wire import Robot

        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.robot, self.policy, self.kind = Robot(address, metadata), policy, kind
        self.ready = False

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        from tests.serve.test_lerobot_wire import features, rows

        joints = tuple(f"joint{index}.pos" for index in range(len(state)))
        if not self.ready:
            described = features(*frames, joints=joints)
            for name, frame in frames.items():
                described[f"observation.images.{name}"]["shape"] = frame.shape
            self.robot.hello(
                tuple(frames),
                lerobot_features=described,
                pretrained_name_or_path=self.policy,
                policy_type=self.kind,
            )
            self.ready = True
        self._send(dict(zip(joints, state.tolist(), strict=True)) | frames | {"task": prompt})
        actions: list[Any] = []
        while not actions:
            actions = self.robot.actions()
        self.robot.timestep += 1
        return Answer(rows(actions), None, None)

    def _send(self, raw: dict[str, Any]) -> None:
        from tests.serve.test_safe_pickle import TimedObservation, as_lerobot

        step = self.robot.timestep
        self.robot.send(as_lerobot(TimedObservation(1000.0 + step, step, raw, True)))

    def close(self) -> None:
        self.robot.channel.close()


class LeRobotRemote:
    """A robot of LeRobot's remote inference in chunk mode. The protocol cannot transmit a seed."""

    def __init__(self, address: str, api_key: str = "", policy: str = "blocks"):
        from tests.serve.lerobot_remote_client import RemoteRobot, rgb, tensor

        self.tensor, self.rgb = tensor, rgb
        self.robot = RemoteRobot(address, policy, api_key)
        try:
            self.robot.start()
        except BaseException:
            self.robot.close(politely=False)
            raise
        self.names = [each["name"] for each in self.robot.descriptor["capabilities"]["features"]]

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        features: dict[str, Any] = {}
        for name in self.names:
            short = name.rpartition(".")[2]
            frame = frames.get(short)
            features[name] = self.tensor(state.astype(np.float32)) if frame is None else self.rgb(frame)
        from tests.serve.lerobot_remote_client import array

        body = self.robot.infer(features, prompt)
        seconds = body["server_durations"]
        rows = array(body["canonical_actions"])
        return Answer(rows, 1e3 * seconds["worker"], 1e3 * seconds["queue"])

    def close(self) -> None:
        self.robot.close(politely=False)


class Evo1:
    """A client like the scripts in Evo-1's repository: text frames of JSON with pictures in BGR, without seed or
    times.

    Args:
        width: Number of action columns of the robot. The model has 24 columns.
    """

    def __init__(self, address: str, api_key: str = "", width: int = 7):
        from websockets.sync.client import connect as websocket

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self.stack = contextlib.ExitStack()
        opened = websocket(address, compression=None, max_size=None, additional_headers=headers)
        self.socket = self.stack.enter_context(opened)
        self.mask = [1] * width + [0] * (24 - width)

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        pictures = [frame[..., ::-1].tolist() for frame in frames.values()]
        sent = {
            "image": pictures,
            "image_mask": [1] * len(pictures),
            "state": state.tolist(),
            "prompt": prompt,
        }
        self.socket.send(json.dumps({**sent, "action_mask": self.mask}))
        return Answer(np.asarray(json.loads(self.socket.recv(TIMEOUT_S)), np.float32), None, None)

    def close(self) -> None:
        self.stack.close()


class VlaEval:
    """A client like ``vla_eval.connection.Connection``. Frames are sent as PNG, without seed or times.

    An answer is one action of a chunk. So one call plays an episode with as many steps as the server executes of a
    chunk.
    """

    def __init__(self, address: str, api_key: str = ""):
        from websockets.sync.client import connect as websocket

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        self.stack = contextlib.ExitStack()
        opened = websocket(address, compression=None, max_size=None, additional_headers=headers)
        self.socket = self.stack.enter_context(opened)
        self.seq = 0
        self._send("hello", {"harness_version": "0.8.0", "protocol_version": 1})
        self.rows = self._receive("hello")["rows"]

    def ask(
        self, frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None = None
    ) -> Answer:
        self._send("episode_start", {"task": {"name": prompt}})
        rows = []
        for _ in range(self.rows):
            images = {name: _png(frame) for name, frame in frames.items()}
            self._send("observation", {"images": images, "states": state, "task_description": prompt})
            rows.append(self._receive("action")["actions"])
        return Answer(np.stack(rows), None, None)

    def _send(self, kind: str, payload: dict[str, Any]) -> None:
        self.seq += 1
        sent = {"type": kind, "payload": payload, "seq": self.seq, "timestamp": 0.0}
        self.socket.send(msgpack.packb(sent, default=_pack_text))

    def _receive(self, kind: str) -> dict[str, Any]:
        found = msgpack.unpackb(self.socket.recv(TIMEOUT_S), object_hook=_unpack_text)
        if found["type"] != kind:
            raise RuntimeError(f"{found['type']}: {found['payload']}")
        assert found["seq"] == self.seq
        payload: dict[str, Any] = found["payload"]
        return payload

    def close(self) -> None:
        self.stack.close()


CLIENTS: dict[str, Any] = {
    "vla-eval": VlaEval,
    "native": Native,
    "openpi": OpenPI,
    "http": Http,
    "groot": Groot,
    "lerobot": LeRobot,
    "lerobot-remote": LeRobotRemote,
    "evo1": Evo1,
}


def _observation(
    frames: Frames, state: np.ndarray, prompt: str, seed: int, steps: int | None
) -> dict[str, Any]:
    sent = {"images": frames, "state": state, "prompt": prompt, "seed": seed}
    return sent if steps is None else {**sent, "solver_steps": steps}


def _pack(value: Any) -> Any:
    """Encode an array as openpi's msgpack_numpy does."""
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    raise TypeError(type(value).__name__)


def _unpack(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return np.ndarray(
            buffer=found[b"data"], dtype=np.dtype(found[b"dtype"]), shape=tuple(found[b"shape"])
        )
    return found


def _png(frame: np.ndarray) -> dict[str, Any]:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return {"__image__": True, "format": "png", "data": file.getvalue(), "shape": list(frame.shape)}


def _pack_text(value: Any) -> Any:
    """Encode an array as vla-eval does: a map with text keys."""
    return {key.decode() if isinstance(key, bytes) else key: each for key, each in _pack(value).items()}


def _unpack_text(node: dict[str, Any]) -> Any:
    return (
        np.frombuffer(node["data"], node["dtype"]).reshape(node["shape"]) if "__ndarray__" in node else node
    )

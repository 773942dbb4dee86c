"""Read and write the WebSocket messages of vla-eval, whose clients are benchmarks. This module uses no sockets.

Every message is a msgpack map with ``type``, ``payload``, ``seq`` and ``timestamp``. The answer to ``hello`` has
the inputs that the policy needs. ``episode_start`` and ``episode_end`` have no answer. The answer to
``observation`` is an ``action`` with a single action.

Of each chunk, a client gets as many actions as the project that trained the policy executes. If the bundle does not
state this number, the default of Sinew's own robots applies. After a failure, the answer is an ``error`` with
the same ``seq``, and the connection continues. Source: vla-eval 0.8.0, ``protocol/*.py``, ``connection.py``,
``model_servers/{serve,predict,lerobot}.py``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import numpy as np
from aiohttp import web
from sinew_client.control.defaults import REPLAN
from sinew_client.control.replan import parse_rule
from sinew_client.episode import Ensembled
from sinew_client.history import History
from sinew_client.untrusted import shown

from sinew import __version__
from sinew.core import (
    ActionChunk,
    Moment,
    Observation,
    ObservationError,
    PolicySpec,
    RequestError,
    SinewError,
)
from sinew.core.rate_limited_log import LogOnce, RateLimitedLog
from sinew.processing.given import PROMPT_KEYS
from sinew.serve.decode.array import array, unpack
from sinew.serve.decode.frames import PixelBudget, compressed_frame
from sinew.serve.request import Outcome, WireMessage
from sinew.serve.service import Service
from sinew.serve.transport.listen import reachable
from sinew.serve.transport.routes import Dialect, Guard
from sinew.serve.wires import field_names

NAME = "vla-eval"
PROTOCOL = 1  # vla-eval's ``protocol_version``
KINDS = ("hello", "observation", "action", "episode_start", "episode_end", "error")
# Key: field name of vla-eval's benchmarks. Value: field name for a bundle without a key map for this protocol.
SPELLINGS = {"task_description": PROMPT_KEYS[0], "states": "state"}
MAX_NOISE = (1 << 63) - 1
# For a policy with an observation history, a connection stores the decoded frames of earlier steps. The frames
# of one step may have this many times the bytes of the policy's own frames. All steps together may always have
# FEWEST_KEPT bytes. The memory ledger counts them.
KEPT_FRAMES = 8
FEWEST_KEPT = 16 << 20
MAX_TASK = 4096  # largest number of characters and values of a task that enter the seed of an episode
# Types of the values of a task that enter the seed. bool is included as a subclass of int.
PLAIN = (str, int, float, dict, list, type(None))
MAX_SHOWN = 60  # longest part of a client's value in a message, characters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepSeen:
    """The content of an observation message from a benchmark.

    Attributes:
        content: The payload of the message.
        earlier: The earlier observation steps that the policy reads, oldest first.
        seed: Seed of the noise; None lets the policy draw the noise.
        decoded: The decoded step of this observation, for a policy with an observation history.
    """

    content: Mapping[str, Any]
    earlier: tuple[Moment, ...] = ()
    seed: int | None = None
    decoded: list[Moment] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Picture:
    """A frame as an image file or as raw pixels. The server decodes the picture only if it belongs to a camera of
    the policy.
    """

    values: Mapping[str, Any]

    def pixels(self, key: str, budget: PixelBudget) -> np.ndarray:
        """Decode the frame to uint8 [height, width, channels].

        Raises:
            ObservationError: The frame is not a picture, or is too large.
        """
        kind, data = self.values.get("format"), self.values.get("data")
        if kind == "raw":
            return array(key, data, self.values.get("dtype"), self.values.get("shape"))
        if kind not in ("png", "jpeg"):
            raise ObservationError(key, "a picture of format png, jpeg or raw", shown(kind, MAX_SHOWN))
        if not isinstance(data, bytes):
            raise ObservationError(key, "bytes of a picture", type(data).__name__)
        return compressed_frame(key, data, budget)


class Conversation:
    """Handles one connection of a benchmark. It stores the connection's episode, the actions of the last chunk that
    were not sent yet, and the observation history.

    The client sends every step, and stores no steps. So the server decodes each step when it arrives, and stores
    only valid steps. An episode ends with its connection.

    Args:
        spec: The policy's specification.
        about: The service's description.
        query: Query of the address, for clients that accept only an address. ``rows`` sets the number of
            executed actions. ``noise`` is a number that becomes part of every seed.

    Attributes:
        rows: Number of actions of a chunk that are executed before another chunk is computed.

    Raises:
        RequestError: The query is not valid.
    """

    def __init__(self, spec: PolicySpec, about: Mapping[str, Any], query: Mapping[str, str] | None = None):
        options = dict(query or {})
        usual = spec.n_action_steps or parse_rule(REPLAN).horizon(spec.chunk_size)
        self._blend = spec.temporal_ensemble if "rows" not in options else None
        if self._blend is not None:
            # Temporal ensembling averages the chunks of all steps, so every step needs a new chunk.
            usual = 1
        self.rows = _count("rows", options.pop("rows", str(usual)), 1, spec.chunk_size)
        self._ensembled = None if self._blend is None else Ensembled(self._blend)
        self._noise = _count("noise", options.pop("noise", "0"), 0, MAX_NOISE)
        if options:
            raise RequestError(
                f"address: the query supports rows and noise, got {next(iter(options))[:40]!r}; omit this option"
            )
        self._spec, self._about = spec, about
        self._history = History(spec.history, spec.history_stride, spec.history_padding)
        steps = (spec.history - 1) * spec.history_stride + 1
        own = sum(camera.height * camera.width * 3 for camera in spec.cameras)
        # Largest size of the frames of one step, bytes.
        self._room = max(KEPT_FRAMES * own, FEWEST_KEPT // steps)
        self._sizes: deque[int] = deque(maxlen=steps)  # bytes of each step in the history
        self._step = 0  # number of the present step in the episode
        self._seq: int | None = None  # number of the message that is answered; None for an invalid message
        self._left: deque[np.ndarray] = deque()
        self._session = ""
        self._task: bytes | None = None  # hash of the task, from which the noise of an episode is drawn
        self._chunks = 0  # number of chunks in this episode
        self._once, self._quiet = LogOnce(logger), RateLimitedLog(logger)

    def dialect(self) -> Dialect:
        """Return the message handlers (:class:`Dialect`) of this connection."""
        return replace(
            DIALECT, read=self.read, observation=self.observation, seen=self.seen, answer=self.answer,
            error=self.error, kept=self.kept, connect=None,
        )  # fmt: skip

    def kept(self) -> int:
        """Return the bytes of decoded steps that this connection stores between two messages."""
        return sum(self._sizes)

    def read(self, payload: bytes) -> WireMessage:
        """Read a message of the client.

        Raises:
            RequestError: The message is not valid.
            ObservationError: A field of the observation is wrong.
        """
        self._seq = None
        tree = unpack(payload)
        if not isinstance(tree, Mapping) or not {"type", "payload", "seq"} <= tree.keys():
            raise RequestError("request: expected a map with the keys type, payload and seq")
        kind, content, seq = tree["type"], tree["payload"], tree["seq"]
        if not isinstance(kind, str) or kind not in KINDS:
            raise RequestError(f"type: expected one of {', '.join(KINDS)}, got {shown(kind, MAX_SHOWN)}")
        if not isinstance(content, dict):
            raise RequestError(f"payload: expected a map, got {type(content).__name__}")
        if not isinstance(seq, int) or isinstance(seq, bool):
            raise RequestError(f"seq: expected an integer, got {type(seq).__name__}")
        self._seq = seq
        if kind == "hello":
            return WireMessage(endpoint="answered", reply=self._message("hello", self._hello(content)))
        if kind == "episode_start":
            self._begin(content)
            return WireMessage(endpoint="reset", session=self._session)
        if kind == "episode_end":
            self._forget()
            return WireMessage(endpoint="answered")
        if kind == "observation":
            return self._observed(content)
        if kind == "error":
            self._quiet.warning("%s: a client reports: %s", NAME, shown(content.get("error"), 200))
            return WireMessage(endpoint="answered")
        raise RequestError("type: expected a message of a client, got 'action', which only a server sends")

    def answer(
        self, message: WireMessage, outcomes: Sequence[Outcome], _server_ms: float, _before: float | None
    ) -> bytes:
        """Return the answer to an observation: the first action of the new chunk. The next actions of the chunk are
        stored for the next observations.
        """
        (chunk,) = (each for each in outcomes if isinstance(each, ActionChunk))
        self._keep(message)
        rows = chunk.actions[: self.rows]
        if self._ensembled is not None:
            rows = self._ensembled.row(chunk.actions)[None]
        first, *rest = rows
        self._left = deque(rest)
        self._chunks += 1
        for warning in chunk.warnings:
            self._once.warning(f"{NAME}: {warning}")
        warnings = {"warnings": list(chunk.warnings)} if chunk.warnings else {}
        return self._message("action", {"actions": first, **warnings})

    def error(self, error: SinewError) -> bytes | None:
        """Return the error message for the client; None if the message had no valid number."""
        if self._seq is None:
            return None
        return self._message("error", {"error": f"{error} [{error.code}]"})

    def observation(
        self, message: WireMessage, spec: PolicySpec, budget: PixelBudget | None = None
    ) -> Observation:
        """Convert a message of the benchmark to an observation.

        For a policy with an observation history, the decoded step is stored in the message, until the request is
        accepted.

        Raises:
            ObservationError: The observation does not fit the policy.
        """
        result = observation(message, spec, budget)
        if self._spec.history > 1:
            size = sum(frame.nbytes for frame in result.images.values())
            if size > self._room:
                own = ", ".join(f"{each.name} {each.height} x {each.width}" for each in spec.cameras)
                raise ObservationError(
                    "images",
                    f"at most {self._room} bytes of frames, because the server stores earlier steps",
                    f"{size}; send frames with the policy's sizes: {own}",
                )
            moment = Moment(result.images, result.state)
            message.content.decoded.append(moment)
            if not self._sizes and self._spec.history_padding == "repeat":
                result = replace(result, earlier=(moment,) * (self._spec.history - 1))
        return result

    def seen(self, message: WireMessage) -> bytes:
        """Return the next action of the chunk for a step that was decoded without a new chunk."""
        self._keep(message)
        return self._message("action", {"actions": self._left.popleft()})

    def _observed(self, content: Mapping[str, Any]) -> WireMessage:
        if self._left and self._spec.history > 1:
            return WireMessage(StepSeen(content), endpoint="seen", session=self._session)
        if self._left:
            row = self._left.popleft()
            return WireMessage(endpoint="answered", reply=self._message("action", {"actions": row}))
        seen = StepSeen(content, self._history.before(self._step), self._seed())
        return WireMessage(seen, session=self._session)

    def _keep(self, message: WireMessage) -> None:
        """Add a decoded step to the history. Its frames are copied, because they may be views of the whole message."""
        for moment in message.content.decoded if isinstance(message.content, StepSeen) else ():
            self._history.see(self._step, moment.images, moment.state)
            self._sizes.append(sum(each.nbytes for each in (*moment.images.values(), moment.state)))
        self._step += 1

    def _forget(self) -> None:
        """Remove the stored actions and the observation history, because an episode begins or ends."""
        self._left.clear()
        self._history.clear()
        self._sizes.clear()
        self._step = 0

    def _begin(self, content: Mapping[str, Any]) -> None:
        """Begin an episode: store the name of its recording, and the hash of its task for the noise."""
        self._forget()
        self._ensembled = None if self._blend is None else Ensembled(self._blend)
        self._chunks, self._task, self._session = 0, None, ""
        recording, task = content.get("recording"), content.get("task")
        if isinstance(recording, Mapping):
            session = field_names.optional_text("recording.eid", recording.get("eid"))
            Service.check_session(session)
            self._session = session
        if isinstance(task, Mapping) and isinstance(task.get("episode_idx"), int):
            text = json.dumps(_plain(task, [MAX_TASK]), sort_keys=True)
            self._task = hashlib.sha256(text.encode(errors="replace")).digest()

    def _seed(self) -> int | None:
        """Return the seed of the next chunk, 63 bits; None without a task.

        The seed depends on the task, the number of the episode, the number of the chunk and ``noise``. So an
        episode has the same noise in every run and in every shard.
        """
        if self._task is None:
            return None
        drawn = self._noise.to_bytes(8, "big") + self._task + self._chunks.to_bytes(8, "big")
        digest = hashlib.sha256(drawn).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def _hello(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to the message ``hello``, with which a client begins. vla-eval passes the answer's field
        ``observation_params`` to the benchmark as arguments.
        """
        if (version := content.get("protocol_version", PROTOCOL)) != PROTOCOL:
            raise RequestError(f"protocol_version: expected {PROTOCOL}, got {shown(version, MAX_SHOWN)}")
        wants: dict[str, Any] = {}
        if self._spec.state.dim:
            wants["send_state"] = True
        if len(self._spec.cameras) > 1:
            wants["send_wrist_image"] = True
        return {
            "harness_version": f"sinew {__version__}",
            "protocol_version": PROTOCOL,
            "model_server": f"sinew {self._spec.architecture}",
            "capabilities": {},
            "observation_params": wants,
            "observation_spec": {
                "image": {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"},
                "language": {"name": "language", "dims": 0, "format": "language"},
            },
            "rows": self.rows,
            **({} if self._blend is None else {"temporal_ensemble": self._blend}),
            **{name: self._about[name] for name in ("policy", "server") if name in self._about},
        }

    def _message(self, kind: str, payload: Mapping[str, Any]) -> bytes:
        seq = self._seq or 0
        return pack({"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()})


def pack(tree: Any) -> bytes:
    """Return a message in msgpack. Arrays become maps with text as keys, as vla-eval reads them."""
    return msgpack.packb(tree, default=_to_map)


def _to_map(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        dense = np.ascontiguousarray(value)
        shape = list(dense.shape)
        return {"__ndarray__": True, "data": dense.tobytes(), "dtype": dense.dtype.str, "shape": shape}
    raise TypeError(f"a message cannot contain a value of type {type(value).__name__}")


def observation(message: WireMessage, spec: PolicySpec, budget: PixelBudget | None = None) -> Observation:
    """Return the observation of a benchmark. Cameras and vectors that the policy does not read stay undecoded.

    Raises:
        ObservationError: An input of the policy is missing or wrong.
    """
    seen: StepSeen = message.content
    budget = budget or PixelBudget()
    # The second budget counts the pixels of picture files when they are decoded. The first budget counts them
    # again as frames.
    step = _moment(seen.content, spec, budget, budget.again())
    return replace(step, earlier=seen.earlier, session=message.session, seed=seen.seed)


def _moment(
    content: Mapping[str, Any], spec: PolicySpec, budget: PixelBudget, files: PixelBudget
) -> Observation:
    """Return the observation of one step.

    Args:
        content: The payload of the message.
        spec: The policy's specification.
        budget: Counts the pixels of frames.
        files: Counts the pixels of picture files while they are decoded.

    Raises:
        ObservationError: An input of the policy is missing or wrong.
    """
    maps = field_names.key_maps(spec, NAME)
    flat = field_names.flatten(_pictures(content))
    if not maps:
        for key, own in SPELLINGS.items():
            if key in flat:
                if own in flat:
                    raise ObservationError(
                        key, f"one value, as {own}", "two values; send only one of the keys"
                    )
                flat[own] = flat.pop(key)
    read = field_names.keys_read(spec, NAME)
    inputs = {
        key: value.pixels(key, files) if isinstance(value, Picture) else value
        for key, value in flat.items()
        if key in read
    }
    if not spec.state.dim and not maps:
        inputs["state"] = np.zeros(0)
    try:
        return field_names.read_observation(inputs, spec, NAME, budget)
    except ObservationError as error:
        left = [key for key in flat if key not in inputs]
        if error.got.startswith(("keys ", "nothing")) and left:
            raise ObservationError(
                error.field,
                error.expected,
                f"{error.got}; other keys in the message: {', '.join(left)[:200]}",
            ) from None
        raise


def _pictures(node: Any) -> Any:
    """Mark the pictures in nested maps, so that a picture is not flattened. The msgpack decoder has limited the
    depth.
    """
    if not isinstance(node, dict):
        return node
    if node.get("__image__") is True:
        return Picture(node)
    return {key: _pictures(value) for key, value in node.items()}


class ControlPlane:
    """vla-eval's HTTP routes on the same port. ``GET /health`` reports readiness. ``GET /config`` rejects changes
    of the batching, which is set when the server starts.
    """

    name = NAME

    def add(self, service: Service, guarded: Guard, router: web.UrlDispatcher) -> None:
        async def health(_request: web.Request) -> web.Response:
            if problems := service.problems():
                return web.json_response({"status": "unhealthy", "problems": list(problems)}, status=503)
            return web.json_response({"status": "ok"})

        async def config(request: web.Request) -> web.Response:
            if request.query:
                names = ", ".join(sorted(request.query))[:100]
                message = f"{names}: cannot be changed over HTTP; restart the server with --max-batch"
                return web.json_response({"errors": [message]}, status=422)
            return web.json_response({"applied": {}, "config": {}})

        router.add_get("/health", health)
        router.add_get("/config", guarded(config))

    def guide(self, spec: PolicySpec, address: str) -> Sequence[str]:
        return []


def connect(spec: PolicySpec, about: Mapping[str, Any], query: Mapping[str, str]) -> Dialect:
    """Create the message handlers (:class:`Dialect`) of one connection.

    Raises:
        RequestError: The query of the connection's address is not valid.
    """
    return Conversation(spec, about, query).dialect()


def _plain(node: Any, room: list[int]) -> Any:
    """Return the text, the numbers and the containers in a task, without arrays and bytes.

    Args:
        node: The task, or a part of the task.
        room: List with one number: how many characters and values are still allowed.

    Raises:
        RequestError: The task is too large. The error is raised before the task is converted to text.
    """
    texts = (
        [node]
        if isinstance(node, str)
        else [key for key in node if isinstance(key, str)]
        if isinstance(node, dict)
        else []
    )
    room[0] -= 1 + sum(map(len, texts))
    if room[0] < 0:
        raise RequestError(f"task: expected at most {MAX_TASK} characters and values, got more")
    if isinstance(node, dict):
        return {key: _plain(node[key], room) for key in texts if isinstance(node[key], PLAIN)}
    if isinstance(node, list):
        return [_plain(value, room) for value in node if isinstance(value, PLAIN)]
    return node


def _count(name: str, text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and low <= int(text) <= high):
        raise RequestError(f"{name}: expected a whole number from {low} to {high}, got {text[:40]!r}")
    return int(text)


def guide(spec: PolicySpec, address: str) -> list[str]:
    """Return a program that uses the package vla-eval."""
    frames = ", ".join(
        f'"{camera}": np.zeros(({size.height}, {size.width}, 3), np.uint8)'
        for (camera, size) in zip(_cameras(spec), spec.cameras, strict=False)
    )
    return [
        "import anyio",
        "import numpy as np",
        "from vla_eval.connection import Connection",
        "",
        "observation = {",
        f'    "images": {{{frames}}},',
        f'    "states": np.zeros({spec.state.dim}, np.float32),',
        '    "task_description": "pick up the red cube",',
        "}",
        "async def main():",
        f'    async with Connection("{reachable(address)}") as server:',
        '        await server.start_episode({"task": {"name": "try"}})',
        f'        print((await server.act(observation))["actions"])  # float32 [{spec.action.dim}]',
        "anyio.run(main)",
    ]


def _cameras(spec: PolicySpec) -> list[str]:
    """Return the names of the policy's cameras in the field ``images`` of a message."""
    return [key.removeprefix("images/") for key in field_names.camera_keys(spec, NAME).values()]


def _nobody(*_: Any) -> Any:
    raise AssertionError("each connection has its own dialect")


def _silent() -> None: ...


DIALECT = Dialect(
    NAME,
    _nobody,
    observation,
    _nobody,
    guide,
    reset=_silent,
    explains=False,
    # vla-eval steps its simulators on the event loop, so its clients may be too busy to answer pings.
    ping_s=None,
    connect=connect,
    waits=True,
    beside=ControlPlane(),
)
